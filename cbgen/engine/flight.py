"""A forward pass on its way: what was launched, and for whom it still is when it is collected."""

from dataclasses import dataclass
from typing import Any

import torch

from cbgen.engine.failures import named_failures
from cbgen.engine.logprobs import TokenLogprobs, token_logprobs
from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest


@dataclass
class Flight:
    """A pass that was launched and is not collected.

    sampling: who gets a token from it. forks: pairs of a parent and a fork that began. departures,
    sampling_departures: at launch, of those in the batch and of those who sample; who has left since gets nothing from
    the pass.
    """

    batch: ScheduledBatch
    launched: Any
    start_s: float
    sampling: list[RequestState]
    forks: list[tuple[RequestState, RequestState]]
    departures: list[int]
    sampling_departures: list[int]

    @property
    def needs_host(self) -> bool:
        """Whether its tokens are chosen by the host, all of them: nothing can be computed for them before."""
        return any(request.needs_host for request in self.sampling)

    def present(self) -> list[ScheduledRequest]:
        """The entries whose requests have not left since."""
        entries = zip(self.batch.scheduled, self.departures, strict=True)
        return [entry for entry, departures in entries if entry.request.num_departures == departures]

    def receivers(self) -> list[tuple[int, RequestState]]:
        """Of those who sample, with the row of what was sampled, who has not left since."""
        members = enumerate(zip(self.sampling, self.sampling_departures, strict=True))
        return [(row, request) for row, (request, departures) in members if request.num_departures == departures]

    def scored(self, scores: list[tuple[RequestState, TokenLogprobs]]) -> list[tuple[RequestState, TokenLogprobs]]:
        """Of what the pass says of prompts, what somebody wants: also for the forks of one who has left."""
        wanting = {entry.request.request_id for entry in self.present()}
        wanting |= {parent.request_id for parent, _ in self.present_forks()}
        return [(request, own) for request, own in scores if request.request_id in wanting]

    def present_forks(self) -> list[tuple[RequestState, RequestState]]:
        """The forks that have not left since, with their parents; they had never left before they began."""
        return [(parent, fork) for parent, fork in self.forks if not fork.num_departures]


def scores_in(logits: torch.Tensor, batch: ScheduledBatch) -> list[tuple[RequestState, TokenLogprobs]]:
    """What a pass says of tokens of prompts, from the logits of all its rows."""
    scored = []
    row = 0
    for entry in batch.scheduled:
        if entry.scored:
            scored.append((entry.request, _score(logits[row : row + len(entry.scored)], entry)))
        row += len(entry.scored) + entry.samples
    return scored


@named_failures()
@torch.inference_mode()
def _score(logits: torch.Tensor, entry: ScheduledRequest) -> TokenLogprobs:
    """Of the tokens of a prompt that follow those of `entry.scored`, whose logits are [N, vocab]."""
    buffer = entry.request.prompt_logprobs
    assert buffer is not None
    following = entry.request.token_ids[entry.scored.start + 1 : entry.scored.stop + 1]
    return token_logprobs(logits, following, buffer.num_top)
