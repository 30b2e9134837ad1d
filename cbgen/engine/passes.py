"""Forward passes as the manager sees them: laid out, launched, chosen from, read. Here one at a time, on any device.

lay_out ──► launch ──► choose ──► read        the tokens are known from here on
            KV is written         next pass may be launched before, where `depth` is 2 (async_batching.py)
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.input_outputs import BatchInputs, InputBuffers
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampled, Sampler
from cbgen.engine.scheduler import ScheduledBatch


class Passes(Protocol):
    """What launches forward passes. depth: how many may be launched and not read, so that one is being computed while
    the next is laid out."""

    depth: int
    max_batch_tokens: int

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> Any:
        """The tensors of a batch whose blocks are allocated. Tokens that are awaited must be of the pass before."""

    def launch(self, inputs: Any) -> Any:
        """Starts the pass. Raises what `failures` names."""

    def choose(self, launched: Any, rows: list[int], requests: list[RequestState]) -> None:
        """Starts to choose a token for each of these requests, from these rows of the pass's logits."""

    def read(self, launched: Any) -> tuple[torch.Tensor, Sampled]:
        """Waits for the pass: its logits [S, vocab], which last until the next `lay_out`, and what was chosen. Raises
        what `failures` names."""

    def logits_of(self, batch: ScheduledBatch, cache: PagedCache) -> torch.Tensor:
        """A pass by itself: the logits [T, vocab] of all its tokens."""

    def watched(self, records: bool) -> AbstractContextManager[None]:
        """Inside, one pass is in flight at a time, and replayed only if `records`: so that its time can be told.
        Nothing may be in flight before and after."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """See KVStorage.copy_pages: after what was launched, and before what will be."""

    def release_memory(self) -> None:
        """What is kept for later goes back to the device."""


@dataclass
class _Launched:
    logits: torch.Tensor
    rows: list[int]
    requests: list[RequestState]


class DirectPasses:
    """The host starts a pass and waits for it: on a CPU, which has nothing else to do meanwhile, and without graphs."""

    depth = 1

    def __init__(self, buffers: InputBuffers, runner: ModelRunner, sampler: Sampler):
        self.buffers, self.runner, self.sampler = buffers, runner, sampler
        self.max_batch_tokens = buffers.max_batch_tokens

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> BatchInputs:
        """See Passes."""
        inputs = self.buffers.lay_out(batch, cache)
        self.buffers.send(inputs)
        return inputs

    def launch(self, inputs: BatchInputs) -> _Launched:
        """See Passes."""
        return _Launched(self.runner.forward(inputs)[: inputs.num_logits], [], [])

    def choose(self, launched: _Launched, rows: list[int], requests: list[RequestState]) -> None:
        """See Passes: done when it is read, since nobody waits for it before."""
        launched.rows, launched.requests = rows, requests

    def read(self, launched: _Launched) -> tuple[torch.Tensor, Sampled]:
        """See Passes."""
        return launched.logits, self.sampler.sample(rows_of(launched.logits, launched.rows), launched.requests)

    def logits_of(self, batch: ScheduledBatch, cache: PagedCache) -> torch.Tensor:
        """See Passes."""
        return all_logits(self.lay_out(batch, cache), batch, self.runner)

    def watched(self, records: bool) -> AbstractContextManager[None]:
        """See Passes: so it is always."""
        return nullcontext()

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """See Passes."""
        self.runner.copy_pages(pairs)

    def release_memory(self) -> None:
        """See Passes."""
        self.runner.release_memory()


def rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows of the logits: themselves, if that is all of them."""
    return logits if rows == list(range(len(logits))) else logits[rows]


def all_logits(inputs: BatchInputs, batch: ScheduledBatch, runner: ModelRunner) -> torch.Tensor:
    """The logits [T, vocab] of every token of a batch that was laid out."""
    every = torch.arange(batch.num_query_tokens, device=inputs.input_ids.device)
    return runner.forward(inputs.with_logits(every))
