"""The real manager, scheduler and cache on integers: no model and no storage, every token that comes out is a 0."""

from dataclasses import dataclass
from itertools import zip_longest

import torch

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ContinuousBatchingConfig, ModelShape
from cbgen.engine.endings import Endings
from cbgen.engine.input_outputs import BatchInputs, InputBuffers
from cbgen.engine.manager import Manager
from cbgen.engine.passes import DirectPasses
from cbgen.engine.requests import RequestState, RequestStatus
from cbgen.engine.sampler import Sampler
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import SCHEDULERS, ScheduledBatch
from cbgen.engine.sources import ListSource
from cbgen.streams import InOrderStreams

PAGE = 4
CONTEXT = 4096
CPU = torch.device("cpu")


class NoModel:
    """In the place of ModelRunner."""

    def forward(self, inputs: BatchInputs) -> torch.Tensor:
        return torch.zeros(len(inputs.logits_indices), 2)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def release_memory(self) -> None:
        pass


def layout_of(num_full: int = 1, num_sliding: int = 0, window: int = 2 * PAGE) -> CacheLayout:
    """Layers of both types in turn."""
    pairs = zip_longest([FULL_ATTENTION] * num_full, [SLIDING_ATTENTION] * num_sliding)
    layer_types = tuple(layer_type for pair in pairs for layer_type in pair if layer_type)
    return CacheLayout.of(ModelShape(layer_types, window if num_sliding else None, 4, 2, 16, 64, 320, CONTEXT, 4), PAGE)


@dataclass(frozen=True)
class Pass:
    """A forward pass as it was planned: who, with how many tokens, in which state, and the pages they own by then."""

    plan: list[tuple[int, int]]
    statuses: list[RequestStatus]
    pages: set[int]
    stalled: list[int]


class World:
    """An engine without a model. `passes` are those planned so far, the empty ones too."""

    def __init__(
        self,
        num_chunks: int,
        layout: CacheLayout | None = None,
        cache_budget_pages: int | None = None,
        cache_type: type[PagedCache] = PagedCache,
        **options: object,
    ):
        """num_chunks: of data. A chunk of a model with one type of attention is a block of PAGE tokens."""
        layout = layout or layout_of()
        values = {"max_batch_tokens": 16, "max_requests_per_batch": 8, "safety_margin": 0.0, **options}
        self.config = ContinuousBatchingConfig(page_size=PAGE, **values).resolve("cpu")
        self.cache = cache_type(layout, num_chunks + NUM_RESERVED_CHUNKS, self.config.allow_block_sharing)
        self.scheduler = SCHEDULERS[self.config.scheduler_type](self.cache, self.config, cache_budget_pages)
        buffers = InputBuffers(
            self.config.max_batch_tokens, self.config.max_requests_per_batch, layout, CONTEXT, InOrderStreams(CPU)
        )
        sampler = Sampler()
        endings = Endings(frozenset(), None, sampler.processors.is_complete)
        self.manager = Manager(
            self.cache,
            self.scheduler,
            DirectPasses(buffers, NoModel(), sampler),
            None,
            endings,
            CONTEXT,
            max_waiting=1 << 30,
        )
        self.requests: list[RequestState] = []
        self.passes: list[Pass] = []
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._recorded_schedule

    def _recorded_schedule(self) -> ScheduledBatch:
        batch = self._schedule()
        entries = batch.scheduled
        tables = [a.block_table(e.request.request_id) for e in entries for a in self.cache.allocators]
        sizes = [a.group.pages_per_block for _ in entries for a in self.cache.allocators]
        self.passes.append(
            Pass(
                [(entry.request.request_id, entry.query_length) for entry in entries],
                [entry.request.status for entry in entries],
                {
                    block + page
                    for table, size in zip(tables, sizes, strict=True)
                    for block in table
                    for page in range(size)
                },
                [request.request_id for request, _ in batch.stalled],
            )
        )
        return batch

    def add(self, *lengths: int, max_tokens: int = 20, prefix: int = 0) -> list[RequestState]:
        """Requests with prompts of so many tokens, of which they share the first `prefix` and no other."""
        first = len(self.requests)
        added = [
            RequestState(number, prompt_ids(number, length, prefix), SamplingParams(max_tokens))
            for number, length in enumerate(lengths, start=first)
        ]
        self.requests += added
        assert not self.manager.pull(ListSource(added)), "a request of the test can never fit"
        return added

    def step(self) -> list[tuple[int, int]]:
        """One pass: who was in it, with how many tokens."""
        self.manager.step()
        self.manager.check_integrity()
        return self.passes[-1].plan

    def run(self, most_steps: int = 50_000) -> list[int]:
        """To completion; the ids in the order of finishing."""
        finished: list[int] = []
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                assert self.cache.free_share == 1.0
                return finished
            finished += [request.request_id for request in self.manager.step()]
            self.manager.check_integrity()
        raise AssertionError(f"not finished after {most_steps} steps")


def prompt_ids(request_id: int, length: int, prefix: int = 0) -> list[int]:
    """`prefix` tokens that all have, then the request's own."""
    first = (request_id + 1) * CONTEXT
    return [*range(min(prefix, length)), *range(first, first + length - prefix)]
