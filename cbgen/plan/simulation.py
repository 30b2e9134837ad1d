"""The engine without its model: scheduler, cache and offloading are real, and time is what the costs say."""

from dataclasses import dataclass
from typing import Any

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.build import Engine
from cbgen.engine.endings import Endings
from cbgen.engine.manager import Manager
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampled
from cbgen.engine.scheduler import SCHEDULERS, ScheduledBatch
from cbgen.engine.sources import ListSource
from cbgen.ordering import WaitingRequest, unpack_ids
from cbgen.plan.calibration import never_ending
from cbgen.plan.costs import CostModel, size_of

_TOKEN = 0  # whatever is generated


@dataclass(frozen=True)
class Simulated:
    """seconds: of all passes together."""

    seconds: float
    metrics: EngineMetrics


class _Clock:
    """In the place of the passes: each takes the time that it costs, and samples any token."""

    depth = 1

    def __init__(self, max_batch_tokens: int, vocab_size: int, costs: CostModel):
        self.max_batch_tokens = max_batch_tokens
        self.seconds = 0.0
        self._vocab_size = vocab_size
        self._costs = costs

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> int:
        self.seconds += self._costs.seconds(size_of(batch, cache))
        return sum(len(entry.scored) + entry.samples for entry in batch.scheduled)

    def launch(self, num_logits: int) -> list[int]:
        return [num_logits]

    def choose(self, launched: list[int], rows: list[int], requests: list[RequestState]) -> None:
        launched.append(len(requests))

    def read(self, launched: list[int]) -> tuple[torch.Tensor, Sampled]:
        num_logits, num_requests = launched
        logits = torch.zeros(1, 1).expand(num_logits, self._vocab_size)  # prompts may be scored
        return logits, Sampled([_TOKEN] * num_requests)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        pass


def simulate(engine: Engine, rows: list[WaitingRequest], costs: CostModel) -> Simulated:
    """Every row generates all that it may. A swap pool is left out: who must leave the cache is computed again.

    rows: none too large for the cache.
    """
    config, plan = engine.config, engine.plan
    cache = PagedCache(plan.layout, plan.num_chunks, config.allow_block_sharing)
    requests = _requests(rows)
    vocab_size = 1 + max(max(request.token_ids) for request in requests)
    clock: Any = _Clock(config.max_batch_tokens, vocab_size, costs)
    manager = Manager(
        cache=cache,
        scheduler=SCHEDULERS[config.scheduler_type](cache, config),
        passes=clock,
        swap_pool=None,
        endings=Endings(frozenset(), None, lambda _: False),
        max_model_len=engine.manager.max_model_len,
        max_waiting=2 * config.max_requests_per_batch,
        balance_tail=config.balance_tail,
    )
    for request in manager.run(ListSource(requests)):
        assert request.error is None, request.error
    return Simulated(clock.seconds, manager.metrics)


def _requests(rows: list[WaitingRequest]) -> list[RequestState]:
    requests, number = [], 0
    for row in rows:
        ids = unpack_ids(row.packed_ids)
        members = []
        for params, _ in row.members:
            number += 1
            members.append(
                RequestState(number, list(ids), never_ending(params, params.max_tokens).updated(logprobs=None))
            )
        first, *first.forks = members
        requests.append(first)
    return requests
