"""The order of waiting requests: by arrival, by length, by common prefix, and both."""

import random
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.duplicates import Recipients
from cbgen.engine.sampling_params import SamplingParams
from cbgen.jobspec import JobSpec
from cbgen.ordering import ORDERS, WaitingRequest, arrange, pack_ids, shared_pages, unpack_ids

PAGE = 4
ID = st.integers(0, 3) | st.sampled_from([255, 256, 65_535, 65_536, 2**31])
PROMPT = st.lists(ID, min_size=1, max_size=20)


def waiting(prompts: list[list[int]], max_tokens: list[int] | None = None) -> list[WaitingRequest]:
    lengths = max_tokens or [8] * len(prompts)
    return [
        WaitingRequest(arrival, pack_ids(ids), [(SamplingParams(length), Recipients([]))])
        for arrival, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def arrivals(requests: list[WaitingRequest]) -> list[int]:
    return [request.arrival for request in requests]


def prompts_of(requests: list[WaitingRequest]) -> list[list[int]]:
    return [unpack_ids(request.packed_ids) for request in requests]


def test_orders_are_those_of_the_option() -> None:
    """What a job may ask for is what there is."""
    assert set(get_args(JobSpec.model_fields["order"].annotation)) == set(ORDERS)


@given(st.lists(PROMPT))
def test_packed_ids_sort_as_the_ids_do(prompts: list[list[int]]) -> None:
    """And come back as they were."""
    assert [unpack_ids(packed) for packed in sorted(map(pack_ids, prompts))] == sorted(prompts)


@given(PROMPT, PROMPT, PROMPT)
def test_shared_pages_are_whole_and_from_the_start(common: list[int], one: list[int], other: list[int]) -> None:
    """As counted one by one."""
    one, other = common + one, common + other
    equal = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    equal = min(len(one), len(other)) if equal is None else equal
    assert shared_pages(pack_ids(one), pack_ids(other), PAGE) == equal // PAGE


@given(st.lists(st.tuples(PROMPT, st.integers(1, 4))), st.sampled_from(list(ORDERS)), st.sampled_from([None, 1, PAGE]))
def test_every_order_keeps_everyone(rows: list[tuple[list[int], int]], order: str, page_tokens: int | None) -> None:
    """Nobody is lost or doubled, and the requests themselves are not touched."""
    requests = waiting([prompt for prompt, _ in rows], [length for _, length in rows])
    before = list(requests)
    arranged = arrange(requests, order, page_tokens)
    assert requests == before
    assert sorted(arrivals(arranged)) == list(range(len(rows)))


def test_arrival_is_as_read() -> None:
    """Whatever the lengths."""
    assert arrivals(arrange(waiting([[3], [1, 1], [2]], [1, 9, 5]), "arrival", PAGE)) == [0, 1, 2]


def test_longest_first() -> None:
    """By max_tokens, then by the prompt, then by arrival."""
    requests = waiting([[1], [1, 2], [2], [1, 2, 3], [7]], [4, 4, 9, 4, 4])
    assert arrivals(arrange(requests, "longest-first", PAGE)) == [2, 3, 1, 0, 4]


def test_prefix_puts_common_prefixes_side_by_side() -> None:
    """Sorted by token ids."""
    requests = waiting([[9, 9, 1], [1, 2, 3], [9, 9], [1, 2], [9, 9, 0]])
    assert prompts_of(arrange(requests, "prefix", PAGE)) == [[1, 2], [1, 2, 3], [9, 9], [9, 9, 0], [9, 9, 1]]


def test_auto_keeps_groups_together_longest_first() -> None:
    """Three documents, one within a longer prefix: groups by their longest member, members by length."""
    long, short, other = [1] * 8, [1] * 4 + [2] * 4, [3] * 8
    requests = waiting(
        [[*long, 5], [*other, 5], [*short, 5], [*long, 6], [*short, 6], [*other, 6], [*long, 7]],
        [10, 20, 30, 40, 50, 60, 70],
    )
    # `long` and `short` have their first page in common: one tree, whose longest request is the longest of all.
    assert arrivals(arrange(requests, "auto", PAGE)) == [6, 3, 0, 4, 2, 5, 1]


def test_auto_leaves_equal_lengths_as_they_came() -> None:
    """Prompts of all lengths side by side fill a small cache better than the long ones together."""
    requests = waiting([[n] * (1 + n * 7 % 11) for n in range(20)])
    assert arrivals(arrange(requests, "auto", PAGE)) == list(range(20))


@pytest.mark.parametrize("page_tokens", [PAGE, None])
def test_auto_is_longest_first_where_little_is_shared(page_tokens: int | None) -> None:
    """Too few tokens in common to be worth a shorter request before a longer one; so too where nothing is shared."""
    shared = [[7] * 4 + [1], [7] * 4 + [2]]
    prompts = [*shared, *([n + 100] * 30 for n in range(20))] if page_tokens else [[7] * 30 + [n] for n in range(20)]
    requests = waiting(prompts, list(range(1, len(prompts) + 1)))
    assert arrivals(arrange(requests, "auto", page_tokens)) == list(range(len(prompts)))[::-1]


@pytest.mark.parametrize("seed", range(20))
def test_auto_shares_as_many_pages_as_prefix(seed: int) -> None:
    """Whoever has k pages in common with others is beside them, for every k."""
    rng = random.Random(seed)
    prompts = [
        [page for _ in range(rng.randint(0, 4)) for page in [rng.randint(1, 2)] * PAGE] + [n] * rng.randint(1, 9)
        for n in range(10, 50)
    ]
    requests = waiting(prompts, [rng.randint(1, 50) for _ in prompts])

    def num_shared(order: str) -> int:
        return sum(
            shared_pages(one.packed_ids, other.packed_ids, PAGE)
            for one, other in pairwise(arrange(requests, order, PAGE))
        )

    assert num_shared("auto") == num_shared("prefix") > num_shared("arrival")
    longest = min(requests, key=lambda request: request.rank)
    assert arrange(requests, "auto", PAGE)[0] is longest


def test_a_deep_chain_of_prefixes() -> None:
    """1,000 prompts, each the one before and a page more: no recursion, and the longest outputs first."""
    lengths = list(range(1, 1001))
    prompts = [[1] * PAGE * length for length in lengths]
    assert arrivals(arrange(waiting(prompts, lengths), "auto", PAGE)) == list(range(1000))[::-1]
