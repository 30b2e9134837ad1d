"""A request's legal transitions, and what is counted and timed along them."""

import random
from datetime import datetime, timedelta, timezone

import pytest

from cbgen.engine.metrics import EngineMetrics, RequestTimes, request_times
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus, SamplingParams

NOW_S = 1e9  # later than any arrival on the monotonic clock
ACTIONS = {
    "schedule_first": lambda request: request.schedule_first(NOW_S),
    "advance": lambda request: request.advance(0 if request.is_finished else 1),
    "append_token": lambda request: request.append_token(9, NOW_S),
    "soft_reset": lambda request: request.soft_reset(),
    "finish": lambda request: request.finish(FinishReason.LENGTH, NOW_S),
}


def new_request(num_prompt_tokens: int = 3, max_tokens: int = 8) -> RequestState:
    return RequestState(0, list(range(num_prompt_tokens)), SamplingParams(max_tokens))


def compute(request: RequestState, query_length: int, token_id: int | None = None, now_s: float = NOW_S) -> None:
    """What the manager does with one request in one pass."""
    if request.status is RequestStatus.PENDING:
        request.schedule_first(now_s)
    request.advance(query_length)
    if token_id is not None:
        request.append_token(token_id, now_s)


def request_in(status: RequestStatus) -> RequestState:
    """A request in the given state; the finished one failed with all of its tokens computed."""
    request = new_request()
    if status is not RequestStatus.PENDING:
        request.schedule_first(NOW_S)
    if status in (RequestStatus.DECODING, RequestStatus.FINISHED):
        compute(request, 3, token_id=7)
    if status is RequestStatus.FINISHED:
        request.advance(1)
        request.finish(FinishReason.ERROR, NOW_S, "not finite")
    assert request.status is status
    return request


def test_a_request_walks_from_pending_to_finished():
    """Chunked prompt, first token, decode, end: each step in its state, with tokens and moments kept."""
    request = new_request(5)
    assert (request.status, request.num_remaining_tokens, request.generated_ids) == (RequestStatus.PENDING, 5, [])
    request.schedule_first(NOW_S)
    assert request.status is RequestStatus.PREFILLING
    request.advance(2)
    assert (request.status, request.num_remaining_tokens) == (RequestStatus.PREFILLING, 3)
    compute(request, 3, token_id=70, now_s=NOW_S + 1)
    assert (request.status, request.num_remaining_tokens) == (RequestStatus.DECODING, 1)
    compute(request, 1, token_id=71, now_s=NOW_S + 2)
    assert (request.num_prompt_tokens, request.num_generated_tokens) == (5, 2)
    assert request.generated_ids == [70, 71]
    assert not request.is_finished
    request.finish(FinishReason.STOP, NOW_S + 2)
    assert request.is_finished
    assert (request.finish_reason, request.error) == (FinishReason.STOP, None)
    timing = request.timing
    assert (timing.first_scheduled_s, timing.first_token_s, timing.finish_s) == (NOW_S, NOW_S + 1, NOW_S + 2)


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (RequestStatus.PENDING, "advance"),
        (RequestStatus.PENDING, "append_token"),
        (RequestStatus.PENDING, "soft_reset"),
        (RequestStatus.PREFILLING, "schedule_first"),
        (RequestStatus.PREFILLING, "append_token"),
        (RequestStatus.DECODING, "schedule_first"),
        (RequestStatus.DECODING, "append_token"),
        *((RequestStatus.FINISHED, action) for action in ACTIONS),
    ],
)
def test_an_illegal_transition_is_asserted(status, action):
    """The engine's own mistakes end at once: what the diagram does not draw cannot be done."""
    request = request_in(status)
    before = (request.status, list(request.token_ids), request.num_computed_tokens, request.finish_reason)
    with pytest.raises(AssertionError):
        ACTIONS[action](request)
    assert (request.status, request.token_ids, request.num_computed_tokens, request.finish_reason) == before


@pytest.mark.parametrize("status", [RequestStatus.PENDING, RequestStatus.PREFILLING, RequestStatus.DECODING])
def test_a_request_can_finish_from_any_state(status):
    """A refused, a failed and a finished request all end the same way."""
    request = request_in(status)
    request.finish(FinishReason.ERROR, NOW_S, "too long")
    assert (request.status, request.finish_reason, request.error) == (
        RequestStatus.FINISHED,
        FinishReason.ERROR,
        "too long",
    )


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.ERROR, None), (FinishReason.STOP, "text"), (FinishReason.LENGTH, "text")]
)
def test_an_error_has_a_message_and_nothing_else_has(reason, error):
    """Reason and message agree, so that readers need to look at one of them only."""
    with pytest.raises(AssertionError):
        request_in(RequestStatus.DECODING).finish(reason, NOW_S, error)


def test_no_more_is_computed_than_there_is():
    """KV past the last token would be KV of nothing."""
    request = request_in(RequestStatus.PREFILLING)
    with pytest.raises(AssertionError):
        request.advance(4)
    request.advance(3)
    with pytest.raises(AssertionError):
        request.advance(1)


@pytest.mark.parametrize("status", [RequestStatus.PREFILLING, RequestStatus.DECODING])
def test_a_soft_reset_loses_nothing(status):
    """Tokens, the number of the next draw and the first moments stay; only the KV is to be computed again."""
    request = request_in(status)
    tokens, generated, timing = list(request.token_ids), request.num_generated_tokens, request.timing
    arrival_s, first_token_s = timing.arrival_s, timing.first_token_s
    request.soft_reset()
    assert (request.status, request.num_soft_resets, request.num_computed_tokens) == (RequestStatus.PENDING, 1, 0)
    assert (request.token_ids, request.num_generated_tokens, request.num_prompt_tokens) == (tokens, generated, 3)
    assert request.num_remaining_tokens == len(tokens)
    compute(request, len(tokens), token_id=8, now_s=NOW_S + 5)
    assert request.status is RequestStatus.DECODING
    assert request.generated_ids == [*tokens[3:], 8]
    assert (timing.arrival_s, timing.first_scheduled_s) == (arrival_s, NOW_S)
    assert timing.first_token_s == (first_token_s or NOW_S + 5), "the first token is timed once"


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


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_an_account_of_every_token(seed):
    """Random pieces and soft resets, also in the middle of a prompt, against a list of what was computed when."""
    rng, metrics, request = random.Random(seed), EngineMetrics(), new_request(15)
    computed: list[int] = []
    resets = 0
    while request.num_generated_tokens < 8:
        query_length = rng.randint(1, request.num_remaining_tokens)
        computed += range(request.num_computed_tokens, request.num_computed_tokens + query_length)
        count(metrics, request, query_length, 60 if query_length == request.num_remaining_tokens else None)
        distinct = set(computed)
        assert metrics.recomputed_tokens == len(computed) - len(distinct)
        assert metrics.computed_prompt_tokens == sum(token < 15 for token in distinct)
        if resets < 3 and rng.random() < 0.3:
            request.soft_reset()
            resets += 1


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
    metrics, request = EngineMetrics(), request_in(RequestStatus.DECODING)
    request.finish(reason, NOW_S, error)
    metrics.count_finished(request)
    assert (metrics.requests_ok, metrics.prompt_tokens) == (ok, 3 * ok)


def timed_request(moments: list[float], reset_after: int | None = None) -> RequestTimes:
    """A request that arrives at 100 s and gets there: scheduled, each token, finished, at the moments given."""
    request = new_request()
    request.timing.arrival_s = 100.0
    if moments[:-1]:
        request.schedule_first(moments[0])
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
        request_times(request_in(RequestStatus.DECODING))
