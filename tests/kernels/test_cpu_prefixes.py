"""Groups of requests that begin with the same pages: those that save the most reading, found by trying all."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from cbgen.kernels.cpu.prefixes import shared_prefixes

NUM_REQUESTS, NUM_SPLITS = 6, 5


def partitions(members: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put the members into groups."""
    if not members:
        yield []
        return
    for rest in partitions(members[1:]):
        yield [[members[0]], *rest]
        for number, group in enumerate(rest):
            yield [*rest[:number], [members[0], *group], *rest[number + 1 :]]


def common(tables: np.ndarray, depths: np.ndarray, members: list[int], split_pages: int) -> int:
    """How many splits some requests share."""
    own = tables[members, : min(depths[members]) * split_pages]
    equal = (own == own[0]).all(axis=0)
    return int(np.cumprod(equal).sum()) // split_pages


def random_tables(rng: random.Random, split_pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Paths through a tree that branches anywhere: one page at a place for all that came the same way."""
    numbers: dict[tuple[int, ...], int] = {}
    ways = [rng.choices([0, 1, 2], weights=[6, 1, 1], k=NUM_SPLITS * split_pages) for _ in range(NUM_REQUESTS)]
    tables = [[numbers.setdefault(tuple(way[: n + 1]), len(numbers)) for n in range(len(way))] for way in ways]
    return np.array(tables), np.array([rng.choice([NUM_SPLITS, rng.randint(0, NUM_SPLITS)]) for _ in ways])


@pytest.mark.parametrize("split_pages", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_no_other_groups_save_more(seed: int, split_pages: int) -> None:
    tables, depths = random_tables(random.Random(seed), split_pages)
    best = max(
        sum((len(group) - 1) * common(tables, depths, group, split_pages) for group in groups)
        for groups in partitions(list(range(NUM_REQUESTS)))
    )
    groups = shared_prefixes(tables, depths, split_pages)
    assert sum((len(members) - 1) * splits for members, splits in groups) == best
    for members, splits in groups:
        assert len(members) > 1
        assert 0 < splits <= common(tables, depths, members.tolist(), split_pages)
    grouped = [member for members, _ in groups for member in members.tolist()]
    assert len(grouped) == len(set(grouped))


def test_the_example() -> None:
    """Two groups where one would save less: that of the docstring."""
    tables = np.array([[1, 2, 3], [1, 2, 3], [1, 4, 5], [1, 6, 7]])
    groups = {(tuple(members.tolist()), splits) for members, splits in shared_prefixes(tables, np.full(4, 3), 1)}
    assert groups == {((0, 1), 3), ((2, 3), 1)}


@pytest.mark.parametrize("depths", [[], [0, 0], [3], [3, 0]])
def test_nothing_to_share(depths: list[int]) -> None:
    tables = np.tile(np.arange(3), (len(depths), 1))
    assert shared_prefixes(tables, np.array(depths, dtype=np.int64), 1) == []


def test_a_long_chain_of_prefixes() -> None:
    """Each request shares one split more with the next; there are exponentially many choices, and the best is found."""
    count = 60
    tables = np.array(
        [[*range(row + 1), *range(1000 * (row + 1), 1000 * (row + 1) + count - row)] for row in range(count)]
    )
    groups = shared_prefixes(tables, np.arange(1, count + 1), 1)
    # With groups at depths a < b < ..., a member saves the depth of the last group that it reaches.
    best = [0] * (count + 1)
    for depth in range(count, 0, -1):
        ends = [
            (end - depth) * depth - depth + (best[end] if end < count + 1 else 0) for end in range(depth + 1, count + 1)
        ]
        best[depth] = max([(count + 1 - depth) * depth - depth, *ends])
    assert sum((len(members) - 1) * splits for members, splits in groups) == max(best)
