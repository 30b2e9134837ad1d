"""Fixtures of the engine's tests."""

import sys
from collections.abc import Callable

import pytest
from engine.outgrown_harness import Choice
from engine_harness import model_of
from tiny_models import CONFIGS, ModelUnderTest

import cbgen.engine.manager
from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.offloading import choose_victims
from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch


@pytest.fixture(scope="session")
def tiny_coarse() -> ModelUnderTest:
    """Two full layers and five sliding ones, so that a chunk takes several blocks of both types."""
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 3
    changes = {"num_hidden_layers": 7, "layer_types": kinds, "sliding_window": 12}
    return model_of("gemma3 of 7 layers", CONFIGS["gemma3"], **changes)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Filled while an engine runs: what the manager asked choose_victims, and what it answered."""
    seen: list[Choice] = []

    def watched(batch: ScheduledBatch, active: list[RequestState], cache: PagedCache) -> list[RequestState]:
        victims = choose_victims(batch, active, cache)
        stalled = [request for request, _ in batch.stalled]
        seen.append(Choice([entry.request for entry in batch.scheduled], stalled, active, victims))
        return victims

    monkeypatch.setattr(cbgen.engine.manager, "choose_victims", watched)
    return seen


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a figure for whoever runs the tests; on stderr, which workers have in common."""

    def shown(figure: str) -> None:
        with capsys.disabled():
            print(f"\n  {figure}", file=sys.stderr)

    return shown
