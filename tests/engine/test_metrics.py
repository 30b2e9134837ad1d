"""What is counted of requests, and how they are timed."""

import random
from datetime import datetime, timedelta, timezone

import pytest

from cbgen.engine.metrics import EngineMetrics, RequestTimes, request_times
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams

NOW_S = 1e9  # later than any arrival on the monotonic clock


def new_request(num_prompt_tokens: int = 3) -> RequestState:
    return RequestState(0, list(range(num_prompt_tokens)), SamplingParams(max_tokens=8))


def decoding_request() -> RequestState:
    """It has one token."""
    request = new_request()
    compute(request, 3, token_id=7)
    return request


def compute(request: RequestState, query_length: int, token_id: int | None = None, now_s: float = NOW_S) -> None:
    """What the manager does with one request in one pass."""
    if request.status is RequestStatus.PENDING:
        request.admit(request.num_computed_tokens, now_s)
    request.advance(query_length)
    if token_id is not None:
        request.append_token(token_id, now_s)


def count(metrics: EngineMetrics, request: RequestState, query_length: int, token_id: int | None = None) -> None:
    metrics.count_computed(request, query_length)
    compute(request, query_length, token_id)


def test_prompt_tokens_are_counted_once_and_generated_ones_not_at_all():
    """A prompt in two pieces and two decodes: ten prompt tokens computed, nothing again."""
    metrics, request = EngineMetrics(), new_request(10)
    for query_length, token_id, prompt_tokens in ((4, None, 4), (6, 50, 10), (1, 51, 10), (1, 52, 10)):
        count(metrics, request, query_length, token_id)
        assert (metrics.computed_prompt_tokens, metrics.recomputed_tokens) == (prompt_tokens, 0)


def test_after_a_soft_reset_only_what_was_computed_before_is_recomputed():
    """Twelve of thirteen tokens had KV: they are recomputed, in any pieces; the last is new, and no prompt token."""
    metrics, request = EngineMetrics(), new_request(10)
    for query_length, token_id in ((10, 50), (1, 51), (1, 52)):
        count(metrics, request, query_length, token_id)
    request.soft_reset()
    for query_length, token_id, recomputed in ((5, None, 5), (7, None, 12), (1, 53, 12), (1, 54, 12)):
        count(metrics, request, query_length, token_id)
        assert (metrics.computed_prompt_tokens, metrics.recomputed_tokens) == (10, recomputed)


def test_tokens_taken_over_are_no_computed_ones():
    """Of ten prompt tokens eight are matched; after a soft reset the match is longer by two."""
    metrics, request = EngineMetrics(), new_request(12)
    metrics.count_taken_over(request, 8)
    request.admit(8, NOW_S)
    count(metrics, request, 1)
    request.soft_reset()
    metrics.count_taken_over(request, 4)
    assert metrics.prefix_hit_tokens == 8, "fewer than before are none that were not at hand before"
    metrics.count_taken_over(request, 11)
    request.admit(11, NOW_S)
    count(metrics, request, 1, token_id=50)
    assert (metrics.prefix_hit_tokens, metrics.computed_prompt_tokens, metrics.recomputed_tokens) == (10, 2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_an_account_of_every_token(seed):
    """Random pieces, matches, swaps and soft resets, also within a prompt, against a list of what happened when."""
    rng, metrics, request = random.Random(seed), EngineMetrics(), new_request(15)
    computed: list[int] = []
    taken_over: set[int] = set()
    while request.num_generated_tokens < 8:
        if request.status is RequestStatus.PENDING:
            matched = rng.choice([0, rng.randrange(len(request.token_ids))])
            metrics.count_taken_over(request, matched)
            start = max(matched, request.num_computed_tokens)
            request.admit(start, NOW_S)
            taken_over |= set(range(start)) - set(computed)
        query_length = rng.randint(1, request.num_remaining_tokens)
        computed += range(request.num_computed_tokens, request.num_computed_tokens + query_length)
        count(metrics, request, query_length, 60 if query_length == request.num_remaining_tokens else None)
        first_time = set(computed) - taken_over
        assert metrics.recomputed_tokens == len(computed) - len(first_time)
        assert metrics.computed_prompt_tokens == sum(token < 15 for token in first_time)
        assert metrics.prefix_hit_tokens == sum(token < 15 for token in taken_over)
        if rng.random() < 0.3:
            rng.choice([request.soft_reset, request.swap_out])()


def test_steps_add_up():
    """Time runs from the start of the first pass to the end of the last; means and peaks are over all passes."""
    metrics = EngineMetrics()
    assert (metrics.elapsed_s, metrics.mean_batch_requests) == (0.0, 0.0)
    metrics.count_step(10.0, 11.0, num_requests=4, used_share=0.5)
    metrics.count_step(12.0, 12.5, num_requests=1, used_share=0.25)
    assert (metrics.elapsed_s, metrics.mean_batch_requests, metrics.peak_used_share) == (2.5, 2.5, 0.5)
    assert (metrics.num_steps, metrics.num_scheduled_requests) == (2, 5)


@pytest.mark.parametrize(("reason", "error", "ok"), [(FinishReason.STOP, None, 1), (FinishReason.ERROR, "bad", 0)])
def test_only_requests_without_an_error_count_as_done(reason, error, ok):
    """A failed row's prompt is no throughput."""
    metrics, request = EngineMetrics(), decoding_request()
    request.finish(reason, NOW_S, error)
    metrics.count_finished(request)
    assert (metrics.requests_ok, metrics.prompt_tokens) == (ok, 3 * ok)


def timed_request(moments: list[float], reset_after: int | None = None) -> RequestTimes:
    """A request that arrives at 100 s and gets there: scheduled, each token, finished, at the moments given."""
    request = new_request()
    request.timing.arrival_s = 100.0
    if moments[:-1]:
        request.admit(0, moments[0])
    for number, now_s in enumerate(moments[1:-1]):
        compute(request, request.num_remaining_tokens, token_id=number, now_s=now_s)
        if number == reset_after:
            request.soft_reset()
    ok = len(moments) > 2
    request.finish(FinishReason.STOP if ok else FinishReason.ERROR, moments[-1], None if ok else "refused")
    return request_times(request)


@pytest.mark.parametrize(
    ("moments", "queue", "prefill", "decode", "ttft", "tpot"),
    [
        pytest.param([101], None, None, None, None, None, id="refused in the queue"),
        pytest.param([101, 103], 1, None, None, None, None, id="failed in its prompt"),
        pytest.param([102, 105, 105], 2, 3, 0, 5, None, id="one token"),
        pytest.param([102, 105, 109, 109], 2, 3, 4, 5, 4, id="two tokens"),
        pytest.param([100, 101, 103, 107, 107], 0, 1, 6, 1, 3, id="three tokens"),
        pytest.param([100, 100, 100, 100], 0, 0, 0, 0, 0, id="a clock that stood still"),
    ],
)
def test_times_are_durations_or_none(moments, queue, prefill, decode, ttft, tpot):
    """What a request did not get to is None, not 0; tpot needs a second token; nothing is negative."""
    times = timed_request(moments)
    found = (times.queue_s, times.prefill_s, times.decode_s, times.ttft_s, times.tpot_s)
    assert found == (queue, prefill, decode, ttft, tpot)
    assert all(duration is None or duration >= 0 for duration in found)
    assert times.finish_time - times.arrival_time == timedelta(seconds=moments[-1] - 100)


@pytest.mark.parametrize("reset_after", [0, 1])
def test_a_soft_reset_counts_as_decoding(reset_after):
    """Queue and first token are those of the first time; what the reset costs shows in decode and tpot."""
    moments = [102, 105, 109, 117, 117]
    assert [timed_request(moments, reset_after).decode_s, timed_request(moments, reset_after).tpot_s] == [12, 6]
    assert timed_request(moments, reset_after).queue_s == 2
    assert timed_request(moments, reset_after).ttft_s == 5


def test_the_finish_is_told_by_the_monotonic_clock():
    """Arrival is read from the wall clock once, in UTC; setting that clock back cannot put the finish before it."""
    before = datetime.now(timezone.utc)
    request = new_request()
    request.finish(FinishReason.ERROR, request.timing.arrival_s + 0.25, "refused")
    times = request_times(request)
    assert before <= times.arrival_time <= datetime.now(timezone.utc)
    assert times.arrival_time.utcoffset() == timedelta(0)
    assert times.finish_time - times.arrival_time == timedelta(seconds=0.25)


def test_arriving_again_starts_the_clock_again():
    """The wait before the engine's queue is not counted: the manager calls this when the request enters it."""
    request = new_request()
    first = request.timing
    request.arrive()
    assert request.timing is not first
    assert request.timing.arrival_s >= first.arrival_s


def test_times_of_an_unfinished_request_are_a_mistake():
    """Half a timing is never written out."""
    with pytest.raises(AssertionError):
        request_times(decoding_request())
