"""A request and its legal transitions. The manager alone calls what changes one.

PENDING ──► PREFILLING ──► DECODING ──► FINISHED
   ▲            │              │           ▲
   └────────────┴── offloaded ─┘           │  stop, length or error, from any state
                    (soft reset, or swapped out)
"""

import enum
import time
from dataclasses import dataclass, field
from typing import Any

from cbgen.engine.generated_text import TextTail
from cbgen.engine.grammars import GrammarMatcher
from cbgen.engine.logprobs import LogprobBuffer
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.token_history import TokenHistory


class RequestStatus(enum.Enum):
    PENDING = "pending"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass
class RequestTiming:
    """Moments on the monotonic clock, in seconds; the wall clock is read once, at arrival in the queue."""

    arrival_wall_s: float
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None


@dataclass
class RequestState:
    """One prompt on its way through the engine.

    token_ids are the prompt and what was generated since. The first num_computed_tokens of them have their KV in the
    cache, or in the swap pool while the request is pending; max_computed_tokens is the most that ever had, so that what
    is computed again can be told. Passes that were launched and not collected yet compute num_flying_tokens more and
    sample num_awaited_tokens, whose ids are not known. num_departures: how often it left the cache, at its end too:
    what was launched for it before is nothing to it then. num_matched_tokens of the computed ones were written by
    others; a request that computes_alone takes over no more of these. `forks` are further samples of the same prompt,
    which start where it ends. `tag` is the caller's and comes back untouched.

    stop_reason: the stop text or token that ended it; num_hidden_tokens: of the generated ones at the end, how many are
    none of the text. logprobs, prompt_logprobs: of the tokens generated, and of the prompt's from the second on; forks
    have their parent's. needs_host: whether its next token is chosen by what the host knows of those before. history,
    matcher and tail are worked out from token_ids, whoever needs them, and kept.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    tag: Any = None
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    max_computed_tokens: int = 0
    num_flying_tokens: int = 0
    num_awaited_tokens: int = 0
    num_soft_resets: int = 0
    num_swaps: int = 0
    num_departures: int = 0
    num_matched_tokens: int = 0
    computes_alone: bool = False
    forks: list["RequestState"] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    num_hidden_tokens: int = 0
    logprobs: LogprobBuffer | None = None
    prompt_logprobs: LogprobBuffer | None = None
    history: TokenHistory | None = None
    matcher: GrammarMatcher | None = None
    tail: TextTail | None = None
    timing: RequestTiming = field(init=False)
    needs_host: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a request has at least one token"
        self.needs_host = self.params.changes_logits
        self.num_prompt_tokens = len(self.token_ids)
        if self.params.logprobs is not None:
            self.logprobs = LogprobBuffer(self.params.logprobs)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobBuffer(self.params.prompt_logprobs)
        self.arrive()

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV is still to be computed; the last of them gives the next token."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens whose KV is in the cache once all that was launched is done: where the next pass goes on."""
        return self.num_computed_tokens + self.num_flying_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Tokens that it has by then."""
        return len(self.token_ids) + self.num_awaited_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a pass was launched for it that is not collected."""
        return self.num_flying_tokens + self.num_awaited_tokens > 0

    @property
    def is_ending(self) -> bool:
        """Whether the tokens that are awaited are all that it may generate."""
        awaited = self.num_awaited_tokens
        return awaited > 0 and self.num_generated_tokens + awaited >= self.params.max_tokens

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text_ids(self) -> list[int]:
        """The generated tokens that make the text: those that ended it are not among them, unless asked for."""
        return self.token_ids[self.num_prompt_tokens : len(self.token_ids) - self.num_hidden_tokens]

    @property
    def first_unscored(self) -> int | None:
        """The place of the first token of the prompt whose successor's log-probability is wanted and not known yet."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1:
            return None
        return len(self.prompt_logprobs)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it has its first token, or is about to get it from a pass that was launched."""
        return self.status is RequestStatus.DECODING or self.num_awaited_tokens > 0

    @property
    def is_swapped(self) -> bool:
        """Whether its KV waits in the swap pool."""
        return self.status is RequestStatus.PENDING and self.num_computed_tokens > 0

    @property
    def was_offloaded(self) -> bool:
        return self.num_soft_resets + self.num_swaps > 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def arrive(self) -> None:
        """Starts the clock: called when the request enters the engine's queue."""
        self.timing = RequestTiming(arrival_wall_s=time.time(), arrival_s=time.perf_counter())

    def admit(self, num_computed_tokens: int, now_s: float, num_matched_tokens: int = 0) -> None:
        """Leaves the queue, with so many of its tokens in the cache already, some of them matched."""
        assert self.status is RequestStatus.PENDING, self.status
        assert self.num_computed_tokens <= num_computed_tokens < len(self.token_ids)
        self.status = RequestStatus.PREFILLING
        self.num_computed_tokens = num_computed_tokens
        self.num_matched_tokens = max(num_matched_tokens, self.num_matched_tokens)
        self.max_computed_tokens = max(self.max_computed_tokens, num_computed_tokens)
        if self.timing.first_scheduled_s is None:
            self.timing.first_scheduled_s = now_s

    def start_as_fork(self, parent: "RequestState") -> None:
        """Leaves the queue with the parent's whole prompt in the cache: the next token is to be sampled."""
        assert self.status is RequestStatus.PENDING, self.status
        self.status = RequestStatus.PREFILLING
        self.num_computed_tokens = self.max_computed_tokens = len(self.token_ids)
        self.num_matched_tokens = parent.num_matched_tokens
        self.timing.first_scheduled_s = parent.timing.first_scheduled_s

    def launch(self, query_length: int, num_sampled: int) -> None:
        """A pass was launched that computes the next `query_length` tokens and samples `num_sampled`."""
        self.num_flying_tokens += query_length
        self.num_awaited_tokens += num_sampled

    def land(self, query_length: int, num_sampled: int) -> None:
        """That pass is done, and what came of it is known: `append_token` says it."""
        self.num_flying_tokens -= query_length
        self.num_awaited_tokens -= num_sampled
        self.advance(query_length)

    @property
    def is_new_ground(self) -> bool:
        """Whether the next token computed was generated, and is computed for the first time: nothing to count."""
        return (
            self.num_computed_tokens >= self.num_prompt_tokens and self.num_computed_tokens == self.max_computed_tokens
        )

    def advance(self, query_length: int) -> None:
        """The KV of the next `query_length` tokens is in the cache."""
        assert self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING), self.status
        assert query_length <= self.num_remaining_tokens
        self.num_computed_tokens += query_length
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_computed_tokens)

    def append_token(self, token_id: int, now_s: float) -> None:
        assert self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING), self.status
        assert self.num_remaining_tokens == 0, "a token is sampled only after all before it were computed"
        self.token_ids.append(token_id)
        self.status = RequestStatus.DECODING
        if self.timing.first_token_s is None:
            self.timing.first_token_s = now_s

    def soft_reset(self) -> None:
        """Back to the queue: generated tokens join the prompt, their KV and the prompt's is to be computed again."""
        assert self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING), self.status
        self.status = RequestStatus.PENDING
        self.num_computed_tokens = self.num_matched_tokens = 0
        self.num_flying_tokens = self.num_awaited_tokens = 0
        self.num_soft_resets += 1
        self.num_departures += 1

    def swap_out(self) -> None:
        """Back to the queue, with its KV in the swap pool."""
        assert self.status in (RequestStatus.PREFILLING, RequestStatus.DECODING), self.status
        assert self.num_computed_tokens > 0
        assert not self.is_in_flight, "what a pass still computes is not swapped out"
        self.status = RequestStatus.PENDING
        self.num_swaps += 1
        self.num_departures += 1

    def finish(
        self,
        reason: FinishReason,
        now_s: float,
        error: str | None = None,
        stop_reason: str | int | None = None,
        num_hidden_tokens: int = 0,
    ) -> None:
        assert not self.is_finished
        assert (reason is FinishReason.ERROR) == (error is not None)
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.error = error
        self.stop_reason = stop_reason
        self.num_hidden_tokens = num_hidden_tokens
        self.timing.finish_s = now_s
        self.num_departures += 1


def heir_of(forks: list[RequestState]) -> RequestState | None:
    """Of forks whose parent is gone, the first, which now waits with the others as its own; None without any."""
    if not forks:
        return None
    heir, *heir.forks = forks
    return heir
