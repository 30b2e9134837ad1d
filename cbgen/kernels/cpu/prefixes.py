"""Which requests of a batch begin with the same pages, so that they can be attended together there."""

from dataclasses import dataclass

import numpy as np


def shared_prefixes(tables: np.ndarray, depths: np.ndarray, split_pages: int) -> list[tuple[np.ndarray, int]]:
    """Groups of requests and how many splits of `split_pages` pages each group shares: what saves most reading.

    tables: [R, N], pages in token order. depths: [R], how many splits of each request may be shared at most. A page
    stands for all the tokens up to its end, so that two tables with the same page at a place agree before it.

        A a b c        {A, B, C, D} share 1 split, {A, B} share 3: with one split for all, 3 x 1 is saved; with two
        B a b c        groups, {A, B} and {C, D}, it is 1 x 3 and 1 x 1
        C a d e
        D a f g
    """
    members = [request for request in range(len(tables)) if depths[request] > 0]
    if len(members) < 2:
        return []
    ends = tables[:, split_pages - 1 : int(depths.max()) * split_pages : split_pages]
    groups: list[tuple[list[int], int]] = []
    root = _tree(ends.tolist(), depths.tolist(), members, 0)
    _collect(root, 0, _choose(root, 0, {}), groups)
    return [(np.array(own, dtype=np.int64), splits) for own, splits in groups]


@dataclass(eq=False)
class _Node:
    """Requests that agree on `splits` splits and no more: those that end there, and those that go on."""

    splits: int
    ending: list[int]
    branches: list["_Node"]


def _tree(ends: list[list[int]], depths: list[int], members: list[int], level: int) -> _Node:
    """Of members who agree on all before `level`."""
    depth, common = min(depths[member] for member in members), level
    first = ends[members[0]]
    while common < depth and all(ends[member][common] == first[common] for member in members):
        common += 1
    branches: dict[int, list[int]] = {}
    for member in members:
        if depths[member] > common:
            branches.setdefault(ends[member][common], []).append(member)
    ending = [member for member in members if depths[member] == common]
    return _Node(common, ending, [_tree(ends, depths, branch, common + 1) for branch in branches.values()])


# By node and the splits of the group above it: what is saved, less the groups it takes (for ties), and whether the node
# is a group itself.
_Choices = dict[tuple[_Node, int], tuple[int, int, bool]]


def _choose(node: _Node, above: int, choices: _Choices) -> _Choices:
    """A member saves the splits of the closest group that it is below; a group costs those it reads itself."""
    if (node, above) not in choices:
        outcomes = []
        for splits in {above, node.splits}:
            is_group = splits > above
            saved, groups = splits * (len(node.ending) - is_group), -int(is_group)
            for branch in node.branches:
                more = _choose(branch, splits, choices)[branch, splits]
                saved, groups = saved + more[0], groups + more[1]
            outcomes.append((saved, groups, is_group))
        choices[node, above] = max(outcomes)
    return choices


def _collect(node: _Node, above: int, choices: _Choices, groups: list[tuple[list[int], int]]) -> list[int]:
    """Appends the groups at and below a node; returns those who join the one above it."""
    is_group = choices[node, above][2]
    splits = node.splits if is_group else above
    members = node.ending + [m for branch in node.branches for m in _collect(branch, splits, choices, groups)]
    if not is_group:
        return members
    groups.append((members, splits))
    return []
