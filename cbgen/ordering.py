"""The order in which requests that have been read go to the engine. Results do not hang on it; the time does."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cbgen.duplicates import Recipients
from cbgen.engine.sampling_params import SamplingParams

_ID_TYPE = np.dtype(">u4")
# Below this share of prompt tokens in common, `auto` sees to the lengths alone.
SUBSTANTIAL_SHARE = 0.1


@dataclass
class WaitingRequest:
    """A request that the engine has not been given yet, as small as it can be kept.

    arrival: its number in the order of reading. packed_ids: see pack_ids. members: of each request over this prompt
    (further samples are forks of the first) the parameters and who gets the result.
    """

    arrival: int
    packed_ids: bytes
    members: list[tuple[SamplingParams, Recipients]]

    @property
    def num_tokens(self) -> int:
        return len(self.packed_ids) // _ID_TYPE.itemsize

    @property
    def max_tokens(self) -> int:
        return self.members[0][0].max_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts by the longest output, then by arrival.

        Not by the prompt: where the cache is what bounds the batch, long prompts side by side make small batches, and
        the short ones after them leave the cache half empty.
        """
        return -self.max_tokens, self.arrival


def pack_ids(token_ids: list[int]) -> bytes:
    """Four bytes an id, the highest first: bytes sort as the lists do, at the speed of memcmp."""
    return np.array(token_ids, _ID_TYPE).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    return np.frombuffer(packed, _ID_TYPE).tolist()


def arrange(requests: list[WaitingRequest], order: str, page_tokens: int | None) -> list[WaitingRequest]:
    """The requests, which come by arrival, in one of ORDERS.

    page_tokens: tokens of a page, the unit in which prompts share; None where the engine shares nothing.
    """
    return ORDERS[order](requests, page_tokens)


def _auto(requests: list[WaitingRequest], page_tokens: int | None) -> list[WaitingRequest]:
    """The longest outputs first; where much is shared, who shares a prefix stays together, however long that is.

    Prefixes form a tree. The children of every node go by rank, a subtree by its first request.
    """
    if page_tokens is None or not requests:
        return _by_rank(requests)
    by_ids = _by_prefix(requests, page_tokens)
    pages = [shared_pages(one.packed_ids, other.packed_ids, page_tokens) for one, other in pairwise(by_ids)]
    num_tokens = sum(request.num_tokens for request in requests)
    if sum(pages) * page_tokens < SUBSTANTIAL_SHARE * num_tokens:
        return _by_rank(requests)
    return _grouped(by_ids, [0, *pages])


def _by_rank(requests: list[WaitingRequest]) -> list[WaitingRequest]:
    return sorted(requests, key=lambda request: request.rank)


def _longest_first(requests: list[WaitingRequest], _: int | None) -> list[WaitingRequest]:
    """By what may be generated, then by the prompt, then by arrival."""
    return sorted(requests, key=lambda request: (-request.max_tokens, -len(request.packed_ids), request.arrival))


def _by_prefix(requests: list[WaitingRequest], _: int | None) -> list[WaitingRequest]:
    return sorted(requests, key=lambda request: request.packed_ids)


def shared_pages(one: bytes, other: bytes, page_tokens: int) -> int:
    """Whole pages that two packed prompts begin with in common."""
    most = min(len(one), len(other)) // _ID_TYPE.itemsize
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax())
    return (first if differ[first] else most) // page_tokens


def _grouped(by_ids: list[WaitingRequest], pages: list[int]) -> list[WaitingRequest]:
    """The tree over requests sorted by ids, each sharing so many pages with the one before it, written out in order.

    open_groups: from the root to the group of the request before; each with the pages that its members, lists of
    requests already in order, have in common.
    """
    open_groups: list[tuple[int, list[list[WaitingRequest]]]] = [(0, [])]
    for request, shared in zip(by_ids, pages, strict=True):
        while open_groups[-1][0] > shared:
            _close_group(open_groups, shared)
        if open_groups[-1][0] < shared:  # a group begins, with the request before as its first member
            open_groups.append((shared, [open_groups[-1][1].pop()]))
        open_groups[-1][1].append([request])
    while len(open_groups) > 1:
        _close_group(open_groups, 0)
    return _in_order(open_groups[0][1])


def _close_group(open_groups: list[tuple[int, list[list[WaitingRequest]]]], shared: int) -> None:
    """The innermost group is complete: it becomes one member of the group around it, which has `shared` at least."""
    _, members = open_groups.pop()
    if open_groups[-1][0] < shared:
        open_groups.append((shared, []))
    open_groups[-1][1].append(_in_order(members))


def _in_order(members: list[list[WaitingRequest]]) -> list[WaitingRequest]:
    return [request for member in sorted(members, key=lambda member: member[0].rank) for request in member]


ORDERS: dict[str, Callable[[list[WaitingRequest], int | None], list[WaitingRequest]]] = {
    "auto": _auto,
    "prefix": _by_prefix,
    "longest-first": _longest_first,
    "arrival": lambda requests, _: requests,
}
