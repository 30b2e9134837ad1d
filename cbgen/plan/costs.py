"""How long a forward pass takes, as a function of what is in it, fitted to passes that were timed."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from cbgen.bench.work import visible_tokens
from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.scheduler import ScheduledBatch

# The more query tokens, the better a matrix product uses the machine: the slope changes at these numbers of them.
_BENDS = (0, 16, 64, 256)
TERMS = (
    "a pass",
    *(f"query tokens above {bend}" for bend in _BENDS),
    "rows of logits",
    "requests",
    "tokens of KV read",
    "pairs of tokens in prompts",
    "pairs of tokens in decodes",
)
_PROMPTS = TERMS.index("pairs of tokens in prompts")
_ITERATIONS, _REWEIGHTINGS = 4000, 4
_LEAST_S = 1e-6


def size_of(batch: ScheduledBatch, cache: PagedCache) -> np.ndarray:
    """What is in a pass whose blocks are allocated, as float64 [len(TERMS)].

    A page that several requests share is read once; of a window, what lies in it.
    """
    query_tokens = batch.num_query_tokens
    bends = [
        min(query_tokens, end) - min(query_tokens, start)
        for start, end in zip(_BENDS, (*_BENDS[1:], math.inf), strict=True)
    ]
    prompts = decodes = 0.0
    for entry in batch.scheduled:
        for allocator in cache.allocators:
            seen = (
                visible_tokens(entry.start, entry.kv_length, allocator.group.window) * allocator.group.pages_per_block
            )
            prompts += seen if entry.query_length > 1 else 0
            decodes += seen if entry.query_length == 1 else 0
    num_logits = sum(len(entry.scored) + entry.samples for entry in batch.scheduled)
    kv_tokens = sum(_pages_read(batch, allocator) for allocator in cache.allocators) * cache.page_size
    return np.array([1, *bends, num_logits, len(batch.scheduled), kv_tokens, prompts, decodes], dtype=np.float64)


def _pages_read(batch: ScheduledBatch, allocator: Any) -> int:
    tables = (allocator.block_table(entry.request.request_id) for entry in batch.scheduled)
    return len(set(chain.from_iterable(tables))) * allocator.group.pages_per_block


@dataclass(frozen=True)
class CostModel:
    """Seconds for each of TERMS, none of them negative.

    held_up: what passes without and with prompts take, over what their terms say. error: median share by which timed
    passes differ from it all.
    """

    coefficients: np.ndarray
    num_passes: int = 0
    error: float = 0.0
    held_up: tuple[float, float] = (1.0, 1.0)

    def seconds(self, size: np.ndarray) -> float:
        return float(self.coefficients @ size) * self.held_up[int(size[_PROMPTS] > 0)]


def fit(sizes: list[np.ndarray], seconds: list[float]) -> CostModel:
    """The costs that explain timed passes best, by their relative error.

    What a term costs is told by the passes that nothing held up. Decodes, and passes with prompts, then cost what they
    took altogether, since those of the run will be held up as often.
    """
    matrix, target = np.array(sizes), np.maximum(np.array(seconds), _LEAST_S)
    relative = matrix / target[:, None]
    weights = np.ones(len(target))
    for _ in range(_REWEIGHTINGS):
        coefficients = _non_negative_fit(relative * weights[:, None], weights)
        misses = np.abs(relative @ coefficients - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(misses, 0.02))  # towards the least absolute error
    costs, has_prompts = matrix @ coefficients, matrix[:, _PROMPTS] > 0
    groups = (~has_prompts, has_prompts)
    held_up = tuple(target[own].sum() / max(costs[own].sum(), _LEAST_S) if own.any() else 1.0 for own in groups)
    misses = np.abs(costs * np.where(has_prompts, held_up[1], held_up[0]) / target - 1.0)
    return CostModel(coefficients, len(target), float(np.median(misses)), (float(held_up[0]), float(held_up[1])))


def _non_negative_fit(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Non-negative least squares, one coordinate after the other: few unknowns, and no start is a bad one."""
    scale = np.maximum(np.sqrt((matrix**2).sum(axis=0)), 1e-300)
    gram, right = (matrix / scale).T @ (matrix / scale), (matrix / scale).T @ target
    found = np.zeros(len(right))
    for _ in range(_ITERATIONS):
        before = found.copy()
        for place in range(len(found)):
            if gram[place, place] > 0:
                found[place] = max(0.0, found[place] + (right[place] - gram[place] @ found) / gram[place, place])
        if np.abs(found - before).max() < 1e-12:
            break
    return found / scale
