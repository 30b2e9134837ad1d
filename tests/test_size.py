"""`cbgen size`: the plan that a run would make, from the config alone."""

import re

import pytest
import torch
from job_harness import cbgen
from models.causal_zoo import PROMISED, build

from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.build import build_engine
from cbgen.errors import ModelError, UsageError
from cbgen.models import seam
from cbgen.models.loading import ModelDescription, describe, load
from cbgen.models.shape import expected_shape, weight_bytes
from cbgen.models.tiny_random import build_tokenizer
from cbgen.size import parse_bytes, size_lines

CPU = torch.device("cpu")
CONTEXT = 512


def described(model_type: str, model: torch.nn.Module) -> ModelDescription:
    return ModelDescription(
        model_type, None, None, torch.float32, model.config, build_tokenizer(), frozenset(), CONTEXT, "zoo"
    )


@pytest.mark.parametrize("model_type", PROMISED)
def test_the_config_tells_what_the_probe_finds(model_type: str) -> None:
    """Shape and weights without loading anything are those of the loaded model."""
    model = build(model_type)
    description = described(model_type, model)
    assert weight_bytes(description) == sum(w.numel() * w.element_size() for w in model.parameters())
    assert expected_shape(description) == seam.attach(model, model_type, CONTEXT)


@pytest.mark.parametrize("num_blocks", [None, 50])
def test_the_plan_is_the_one_that_a_run_makes(num_blocks: int | None) -> None:
    """The blocks and chunks printed are those of an engine built for the same memory."""
    options = ContinuousBatchingConfig(num_blocks=num_blocks, page_size=16, max_requests_per_batch=8).resolve("cpu")
    description = describe("tiny-random", None, "float32", CPU)
    memory_bytes = (1 << 28) + weight_bytes(description)
    lines = size_lines(description, options, memory_bytes, None, [100], "cpu")
    model, shape = load(description, CPU)
    engine = build_engine(model, shape, torch.float32, options, frozenset(), CPU, 1 << 28)
    assert f"{engine.config.num_blocks} blocks of 16 tokens, in {engine.plan.num_chunks} chunks" in lines["cache"]
    assert lines["fits"].startswith(f"{engine.config.num_blocks // 7:,} requests of 100 tokens")


def test_more_memory_fits_more_requests() -> None:
    """The command prints how many requests fit, and gives a line for a length that is asked for."""
    counts = []
    for memory in ("96MiB", "128MiB"):
        result = cbgen("size", "--model", "tiny-random", "--memory", memory, "--tokens", "2048", "--page-size", 32)
        assert result.exit_code == 0, result.output
        counts.append(int(re.search(r"fits +([\d,]+) requests of 2,048 tokens", result.stdout)[1].replace(",", "")))
    assert 0 < counts[0] < counts[1]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda:99", "auto", "bfloat16"),
        ("cuda:99", "float32", "float32"),
        ("cuda:99", "float16", "float16"),
        ("cpu", "auto", "float32"),
    ],
)
def test_a_plan_for_a_device_that_is_not_here(device: str, dtype: str, expected: str) -> None:
    """It is made in the dtype that a run there would load: half the bytes of what is planned on a CPU."""
    result = cbgen("size", "--model", "tiny-random", "--memory", "1GiB", "--device", device, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert f"KV heads of 16, {expected}, context" in result.stdout
    num_bytes = 512 if expected == "float32" else 256  # keys and values of 2 layers with 2 heads of 16
    assert f"tokens     {num_bytes} bytes each" in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--memory", "1KiB"], 1, "weights of tiny-random alone take"),
        (["--memory", "200MiB", "--num-blocks", "1000000"], 1, "room for"),
        (["--memory", "many"], 2, "--memory many"),
        (["--tokens", "9999"], 2, "--tokens 9999"),
        (["--cpu-offload-space", "-1"], 2, "cpu_offload_space"),
        (["--device", "cuda:77"], 2, "--device"),
    ],
)
def test_what_does_not_fit_is_one_line(options: list[str], code: int, words: str) -> None:
    """Bad sizes and plans that cannot be are one line on stderr with the exit code of their kind."""
    result = cbgen("size", "--model", "tiny-random", *options)
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_a_model_that_is_refused_at_load_is_refused_here() -> None:
    """What the config gives away needs no weights."""
    model = build("qwen3_next")
    with pytest.raises(ModelError, match="linear_attention"):
        size_lines(described("qwen3_next", model), ContinuousBatchingConfig().resolve("cpu"), 1 << 33, None, [], "cpu")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 << 30), ("8GB", 8 << 30), ("8g", 8 << 30), ("1.5 MiB", 3 << 19), ("700", 700), ("2TiB", 2 << 40)],
)
def test_sizes_are_binary(text: str, num_bytes: int) -> None:
    """Memory is counted in powers of two, however the unit is spelt."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-3GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With the option's name."""
    with pytest.raises(UsageError, match="--memory"):
        parse_bytes(text)
