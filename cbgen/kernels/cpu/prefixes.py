"""Which requests of a batch begin with the same pages, so that they can be attended together there."""

import numpy as np


def shared_prefixes(tables: np.ndarray, depths: np.ndarray, split_pages: int) -> list[tuple[np.ndarray, int]]:
    """Groups of requests and how many splits of `split_pages` pages each group shares: what saves most reading.

    tables: [R, N], pages in token order. depths: [R], how many splits of each request may be shared at most. A page
    stands for all the tokens up to its end, so that two tables with the same page at a place agree before it.

        A a b c        {A, B, C} share 1 split, {A, B} share 3: with one split less for C, 2 x 1 saved against 1 x 3,
        B a b c        so that A and B are a group and C goes alone
        C a d e
    """
    most = int(depths.max(initial=0))
    ends = tables[:, split_pages - 1 : most * split_pages : split_pages]
    members = [request for request in range(len(tables)) if depths[request] > 0]
    groups = _best_groups(ends.tolist(), depths.tolist(), members, 0)[1]
    return [(np.array(own, dtype=np.int64), splits) for own, splits in groups]


def _best_groups(
    ends: list[list[int]], depths: list[int], members: list[int], level: int
) -> tuple[int, list[tuple[list[int], int]]]:
    """The splits saved by the best groups among members who agree on all before `level`, and those groups."""
    if len(members) < 2:
        return 0, []
    depth, common = min(depths[member] for member in members), level
    first = ends[members[0]]
    while common < depth and all(ends[member][common] == first[common] for member in members):
        common += 1
    branches: dict[int, list[int]] = {}
    for member in members:
        if depths[member] > common:
            branches.setdefault(ends[member][common], []).append(member)
    saved, groups = 0, []
    for branch in branches.values():
        more, own = _best_groups(ends, depths, branch, common + 1)
        saved += more
        groups += own
    together = (len(members) - 1) * common
    return (together, [(members, common)]) if common and together >= saved else (saved, groups)
