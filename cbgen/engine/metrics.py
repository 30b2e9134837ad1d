"""What the engine counts while it runs, and the timing of one request."""

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from cbgen.engine.requests import RequestState


@dataclass
class EngineMetrics:
    """Counted since the first forward pass. Durations are of the monotonic clock, in seconds.

    requests_ok, prompt_tokens: of requests that finished without an error. computed_prompt_tokens: prompt tokens
    whose KV was computed for the first time. recomputed_tokens: tokens, of prompts or generated, whose KV was computed
    again after a soft reset. prefix_hit_tokens: prompt tokens whose KV was taken from the cache instead, also by the
    further samples of a prompt. offloads are soft_resets and swaps together. forward_failures: passes that raised;
    budget_shrinks: how often one ran out of memory and later ones were made smaller instead. Neither counts as a step.
    """

    num_steps: int = 0
    num_scheduled_requests: int = 0
    requests_ok: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    offloads: int = 0
    soft_resets: int = 0
    swaps: int = 0
    forward_failures: int = 0
    budget_shrinks: int = 0
    peak_used_share: float = 0.0
    first_forward_s: float | None = None
    last_forward_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """From the start of the first forward pass to the end of the last."""
        if self.first_forward_s is None or self.last_forward_s is None:
            return 0.0
        return self.last_forward_s - self.first_forward_s

    @property
    def mean_batch_requests(self) -> float:
        return self.num_scheduled_requests / self.num_steps if self.num_steps else 0.0

    def count_step(self, start_s: float, end_s: float, num_requests: int, used_share: float) -> None:
        self.first_forward_s = start_s if self.first_forward_s is None else self.first_forward_s
        self.last_forward_s = end_s
        self.num_steps += 1
        self.num_scheduled_requests += num_requests
        self.peak_used_share = max(self.peak_used_share, used_share)

    def count_computed(self, request: RequestState, query_length: int) -> None:
        """To be called before the request advances by `query_length` tokens."""
        first = max(request.num_computed_tokens, request.max_computed_tokens)
        last = request.num_computed_tokens + query_length
        self.recomputed_tokens += min(last, first) - request.num_computed_tokens
        self.computed_prompt_tokens += max(0, min(last, request.num_prompt_tokens) - first)

    def count_taken_over(self, request: RequestState, num_tokens: int) -> None:
        """To be called before the request is admitted with the KV of its first `num_tokens` tokens at hand."""
        self.prefix_hit_tokens += max(0, min(num_tokens, request.num_prompt_tokens) - request.max_computed_tokens)

    def count_finished(self, request: RequestState) -> None:
        if request.error is None:
            self.requests_ok += 1
            self.prompt_tokens += request.num_prompt_tokens


@dataclass(frozen=True)
class RequestTimes:
    """A finished request's timing as it is written out: seconds, and moments in UTC. None: it did not get there."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    arrival_time: datetime
    finish_time: datetime


def request_times(request: RequestState) -> RequestTimes:
    """queue: arrival to first scheduling; prefill: to the first token; decode: to the last; ttft: queue and prefill.

    tpot is decode over the tokens after the first, None for a single token. The finish on the wall clock is the arrival
    plus a monotonic duration, so that a clock set back in between makes nothing negative.
    """
    timing = request.timing
    arrival = datetime.fromtimestamp(timing.arrival_wall_s, timezone.utc)
    assert timing.finish_s is not None, "times are read when the request has finished"
    decode_s = _between(timing.first_token_s, timing.finish_s)
    later_tokens = request.num_generated_tokens - 1
    return RequestTimes(
        queue_s=_between(timing.arrival_s, timing.first_scheduled_s),
        prefill_s=_between(timing.first_scheduled_s, timing.first_token_s),
        decode_s=decode_s,
        ttft_s=_between(timing.arrival_s, timing.first_token_s),
        tpot_s=decode_s / later_tokens if decode_s is not None and later_tokens > 0 else None,
        arrival_time=arrival,
        finish_time=arrival + timedelta(seconds=timing.finish_s - timing.arrival_s),
    )


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
