"""The log of steps: sums that are those of the metrics, in bins that join when there are too many."""

import numpy as np
import pytest
from engine_harness import engine_for, greedy_requests, mixed_prompts, raising, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.step_log import COUNTS, FIRST_BIN_S, MAX_BINS, PHASES, SERIES, StepLog

PROMPTS = mixed_prompts(24, vocab_size=320, longest=90, most=30)


@pytest.mark.parametrize(("name", "num_blocks"), [("tiny_llama", 12), ("tiny_llama", 512), ("tiny_gemma3", 512)])
def test_the_log_adds_up_to_the_metrics(request: pytest.FixtureRequest, name: str, num_blocks: int) -> None:
    """In a small cache with offloads, and in a roomy one; time is that of the steps, and what is between them."""
    engine = engine_for(request.getfixturevalue(name), num_blocks=num_blocks, max_batch_tokens=40, page_size=16)
    run_all(engine, greedy_requests(PROMPTS))
    log, metrics = engine.manager.log, engine.manager.metrics
    assert log.total("steps") == pytest.approx(metrics.num_steps)
    assert log.total("requests") == pytest.approx(metrics.num_scheduled_requests)
    counted = {count: getattr(metrics, count) for count in COUNTS}
    assert {count: log.total(count) for count in COUNTS} == pytest.approx(counted)
    assert (metrics.offloads > 0) == (num_blocks == 12)
    computed = sum(len(prompt.token_ids) for prompt in PROMPTS) + metrics.output_tokens - len(PROMPTS)
    computed += metrics.recomputed_tokens - metrics.prefix_hit_tokens
    assert log.total("query_tokens") == pytest.approx(computed)
    assert 0 < log.mean("owned_share") <= metrics.peak_used_share <= 1
    assert all(log.total(phase) > 0 for phase in PHASES)
    assert log.total("forward") + log.total("layout") + log.total("sampling") < metrics.elapsed_s
    timeline = log.as_json()
    assert timeline is not None
    assert list(timeline["series"]) == list(SERIES)
    assert sum(timeline["series"]["steps"]) == pytest.approx(metrics.num_steps, abs=0.01)


def test_a_failed_pass_is_no_step(tiny_llama: ModelUnderTest) -> None:
    """What it cost turns up in the next one."""
    fails = iter([True])
    model = raising(tiny_llama, lambda ids: RuntimeError("once") if next(fails, False) else None)
    engine = engine_for(model)
    run_all(engine, greedy_requests(PROMPTS[:4]))
    log, metrics = engine.manager.log, engine.manager.metrics
    assert metrics.forward_failures == 1
    assert log.total("steps") == pytest.approx(metrics.num_steps)
    assert log.total("recomputed_tokens") == pytest.approx(metrics.recomputed_tokens)


def test_bins_join_two_and_two() -> None:
    """Whatever comes when: no value is lost, and a value stays where its time is."""
    log = StepLog()
    steps = SERIES.index("steps")
    moments = [0.0, 0.1, 0.3, 100.0, 255.9, 256.0, 300.0, 511.0, 5000.0, 5000.0]
    for number, moment in enumerate(moments, start=1):
        log._sums[log._bin_of(moment), steps] += 1
        assert log.total("steps") == number
        assert log._num_bins <= MAX_BINS
    assert log.bin_s == FIRST_BIN_S * 32
    found = [place for place, value in enumerate(log._sums[:, steps]) for _ in range(int(value))]
    assert found == [int(moment // log.bin_s) for moment in moments]


def test_a_step_is_spread_over_its_time() -> None:
    """One that lasts many bins gives each its share; where two steps meet in a bin, both are in it."""
    log = StepLog()
    values = np.full(len(SERIES), 8.0)
    log._spread(0.125, 1.125, values)
    log._spread(1.125, 1.2, values)
    assert log._sums[:6, 0].tolist() == pytest.approx([1.0, 2.0, 2.0, 2.0, 9.0, 0.0])
    log._spread(1.2, 400.0, values)
    assert log.bin_s == 0.5
    assert log.total("steps") == pytest.approx(24.0)
    assert log._sums[700, 0] == pytest.approx(8 * 0.5 / 398.8)


def test_without_a_step_there_is_nothing_to_tell() -> None:
    """As of a job whose rows were all there."""
    assert StepLog().as_json() is None
    assert StepLog().mean("requests") == 0
