"""A request's legal transitions, and what each leaves as it was."""

import pytest

from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams

NOW_S = 1e9  # later than any arrival on the monotonic clock
ACTIONS = {
    "admit": lambda request: request.admit(0, NOW_S),
    "advance": lambda request: request.advance(0 if request.is_finished else 1),
    "append_token": lambda request: request.append_token(9, NOW_S),
    "soft_reset": lambda request: request.soft_reset(),
    "swap_out": lambda request: request.swap_out(),
    "start_as_fork": lambda request: request.start_as_fork(request_in(RequestStatus.PREFILLING)),
    "finish": lambda request: request.finish(FinishReason.LENGTH, NOW_S),
}


def new_request(num_prompt_tokens: int = 3, max_tokens: int = 8) -> RequestState:
    return RequestState(0, list(range(num_prompt_tokens)), SamplingParams(max_tokens))


def compute(request: RequestState, query_length: int, token_id: int | None = None, now_s: float = NOW_S) -> None:
    """What the manager does with one request in one pass."""
    if request.status is RequestStatus.PENDING:
        request.admit(0, now_s)
    request.advance(query_length)
    if token_id is not None:
        request.append_token(token_id, now_s)


def request_in(status: RequestStatus) -> RequestState:
    """A request in the given state; the finished one failed with all of its tokens computed."""
    request = new_request()
    if status is not RequestStatus.PENDING:
        request.admit(0, NOW_S)
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
    request.admit(0, NOW_S)
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
        (RequestStatus.PENDING, "swap_out"),
        (RequestStatus.PREFILLING, "admit"),
        (RequestStatus.PREFILLING, "append_token"),
        (RequestStatus.PREFILLING, "swap_out"),
        (RequestStatus.PREFILLING, "start_as_fork"),
        (RequestStatus.DECODING, "admit"),
        (RequestStatus.DECODING, "append_token"),
        (RequestStatus.DECODING, "start_as_fork"),
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


def test_a_swap_keeps_the_kv_too():
    """Of a swapped request nothing is to be computed again, and it comes back with at least what it had."""
    request = request_in(RequestStatus.DECODING)
    assert not request.is_swapped
    request.swap_out()
    assert (request.status, request.num_swaps, request.num_soft_resets) == (RequestStatus.PENDING, 1, 0)
    assert (request.num_computed_tokens, request.num_remaining_tokens) == (3, 1)
    assert request.is_swapped
    assert request.was_offloaded
    with pytest.raises(AssertionError):
        request.admit(2, NOW_S)
    request.admit(3, NOW_S + 5)
    assert (request.status, request.timing.first_scheduled_s) == (RequestStatus.PREFILLING, NOW_S)
    assert not request.is_swapped
    compute(request, 1, token_id=8)
    assert request.generated_ids == [7, 8]


def test_a_request_is_admitted_with_what_the_cache_has_of_it():
    """Matched tokens count as computed, and one is always left to compute."""
    request = new_request(5)
    with pytest.raises(AssertionError):
        request.admit(5, NOW_S)
    request.admit(4, NOW_S)
    assert (request.num_computed_tokens, request.max_computed_tokens, request.num_remaining_tokens) == (4, 4, 1)
    assert not request.was_offloaded


def test_a_fork_starts_where_the_prompt_ends():
    """Its next step is a token of its own; it was scheduled when the one was that computed the prompt."""
    parent, fork = new_request(), new_request()
    parent.admit(0, NOW_S)
    parent.advance(3)
    fork.start_as_fork(parent)
    assert (fork.status, fork.num_computed_tokens, fork.num_remaining_tokens) == (RequestStatus.PREFILLING, 3, 0)
    fork.append_token(9, NOW_S + 1)
    assert (fork.generated_ids, parent.generated_ids) == ([9], [])
    assert (fork.timing.first_scheduled_s, fork.timing.first_token_s) == (NOW_S, NOW_S + 1)
