"""The laws of the cache under random steps, beside a plain model of what lies where."""

from collections import Counter
from itertools import count

import hypothesis.strategies as st
import pytest
from cache.cache_harness import allocator_has_room, cache_of, layout_of, snapshot
from cache.cache_model import Memory, Request, Sharing
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from cbgen.cache.layout import CacheLayout
from cbgen.cache.paged_cache import PagedCache

PAGE_SIZE = 2
# Few tokens, short pages and zeros at the beginning: prefixes often coincide.
tokens = st.integers(0, 1)
prompts = st.builds(lambda zeros, tail: [0] * zeros + tail, st.integers(0, 8), st.lists(tokens, min_size=1, max_size=5))
choices = st.integers(0, 255)

has_active = precondition(lambda machine: machine.active)
has_waiting = precondition(lambda machine: machine.waiting)


class Laws(RuleBasedStateMachine):
    """Requests come, wait, are admitted, grow, fork, fail, finish and are offloaded, in any order."""

    def __init__(self, layout: CacheLayout, num_data_chunks: int, allow_block_sharing: bool, seen: Counter[str]):
        super().__init__()
        self.cache: PagedCache = cache_of(layout, num_data_chunks, allow_block_sharing)
        self.memory = Memory(self.cache)
        self.sharing = Sharing(self.cache) if self.cache.shares_blocks else None
        self.waiting: dict[int, Request] = {}
        self.active: dict[int, Request] = {}
        self.ids = count()
        self.seen = seen

    def pick(self, among: dict[int, Request], choice: int) -> tuple[int, Request]:
        request_id = sorted(among)[choice % len(among)]
        return request_id, among[request_id]

    def write(self, request_id: int, request: Request, num_tokens: int, is_new: bool = False) -> None:
        """A pass for tokens up to num_tokens, none of them in a block that somebody else reads."""
        full = self.cache.allocators[0]
        mine = set(full.block_table(request_id)[request.num_written // PAGE_SIZE :])
        for other in self.active:
            assert other == request_id or not mine & set(full.block_table(other)) or not self.sharing, "shared"
        self.cache.register(request_id, request.token_ids, num_tokens)
        if self.sharing is not None:
            self.sharing.name(request_id, request, 0 if is_new else request.num_written, num_tokens)
        self.memory.write(request_id, request, num_tokens)
        request.num_written = num_tokens

    def release(self, request_id: int) -> None:
        table = list(self.cache.allocators[0].block_table(request_id)) if request_id in self.cache.holders else []
        self.cache.release(request_id)
        if self.sharing is not None:
            self.sharing.leave(table)

    @initialize(prompt=prompts)
    def first(self, prompt: list[int]) -> None:
        """Somebody is there from the start."""
        self.arrive(prompt, 2)

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(prompt=prompts, times=st.integers(1, 2))
    def arrive(self, prompt: list[int], times: int) -> None:
        """A new request queues, or the same one twice."""
        self.waiting.update({next(self.ids): Request(list(prompt)) for _ in range(times)})

    @has_waiting
    @rule(choice=choices, length=choices, fails=st.integers(0, 7))
    def admit(self, choice: int, length: int, fails: int) -> None:
        """A waiting request gets what is at hand and room for its next tokens; or it waits; or nothing changes."""
        request_id, request = self.pick(self.waiting, choice)
        match = self.cache.match(request_id, request.token_ids)
        assert match.blocks == (self.sharing.match(request) if self.sharing else [])
        if match.must_wait:
            self.check_wait(request, len(match.blocks))
            return
        num_matched = len(match.blocks) * PAGE_SIZE
        start = max(request.num_written, num_matched)
        num_tokens = start + 1 + length % (len(request.token_ids) - start)
        demand = list(self.cache.missing_blocks(request_id, num_tokens))
        num_missing = demand[0] - len(match.blocks)
        # Matched blocks that nobody owns yet need room like those that are missing (law 2).
        demand[0] = num_missing + len(set(match.blocks) - (self.sharing.owned() if self.sharing else set()))
        has_room = allocator_has_room(self.cache, tuple(demand))
        before = None if has_room else snapshot(self.cache)
        if has_room and self.sharing:
            self.sharing.take(match.blocks, num_missing)
        assert self.cache.admit(request_id, request.token_ids, num_tokens, match) is has_room
        if not has_room:
            self.seen["refused admissions"] += 1
            assert snapshot(self.cache) == before
            return
        self.seen["matched blocks"] += len(match.blocks)
        del self.waiting[request_id]
        if fails == 0:  # before its first pass
            self.release(request_id)
            return
        pages = self.cache.pages_of(request_id, request.num_written, num_matched) if request.swapped else []
        self.memory.paste(pages, request.swapped[len(request.swapped) - len(pages) :])
        self.seen["restored pages"] += len(pages)
        request.num_written, request.num_promised, request.swapped = start, len(request.token_ids), []
        self.active[request_id] = request
        self.write(request_id, request, num_tokens, is_new=True)

    def check_wait(self, request: Request, num_matched_blocks: int) -> None:
        """Nobody waits in vain: an active request is still to write the very block that is missing."""
        self.seen["waits"] += 1
        awaited = request.prefix((num_matched_blocks + 1) * PAGE_SIZE)
        assert any(
            other.num_written < len(awaited) <= other.num_promised and other.prefix(len(awaited)) == awaited
            for other in self.active.values()
        )

    @has_active
    @rule(choice=choices, length=choices, token=tokens)
    def grow(self, choice: int, length: int, token: int) -> None:
        """The next piece of a prompt, or a generated token; who finds no room is as before."""
        request_id, request = self.pick(self.active, choice)
        self.sample(request, token)
        num_tokens = request.num_written + 1 + length % request.num_remaining
        demand = self.cache.missing_blocks(request_id, num_tokens)
        has_room = allocator_has_room(self.cache, demand)
        before = None if has_room else snapshot(self.cache)
        assert self.cache.covers(demand) is has_room
        if has_room and self.sharing:
            self.sharing.take([], demand[0])
        assert self.cache.allocate(request_id, num_tokens) is has_room
        if has_room:
            self.write(request_id, request, num_tokens)
        else:
            self.seen["stalls"] += 1
            assert snapshot(self.cache) == before

    def sample(self, request: Request, token: int) -> None:
        """A request that has computed all its tokens has got one more."""
        if not request.num_remaining:
            request.token_ids.append(token)

    @precondition(lambda self: any(not request.num_remaining for request in self.active.values()))
    @rule(choice=choices)
    def fork(self, choice: int) -> None:
        """A request that has computed all its tokens is sampled once more."""
        ready = {request_id: request for request_id, request in self.active.items() if not request.num_remaining}
        parent_id, parent = self.pick(ready, choice)
        child_id, num_tokens = next(self.ids), parent.num_written
        num_shared = num_tokens // PAGE_SIZE if self.sharing else 0
        demand = list(self.cache.missing_blocks(child_id, num_tokens))
        demand[0] -= num_shared
        has_room = allocator_has_room(self.cache, tuple(demand))
        before = None if has_room else snapshot(self.cache)
        if has_room and self.sharing:
            self.sharing.take([], demand[0])
        pairs = self.cache.fork(parent_id, child_id, num_tokens)
        assert (pairs is not None) is has_room
        if pairs is None:
            self.seen["refused forks"] += 1
            assert snapshot(self.cache) == before
            return
        assert len(pairs) == self.cache.num_pages(tuple(demand))
        self.memory.paste([copy for _, copy in pairs], self.memory.copies([original for original, _ in pairs]))
        self.active[child_id] = Request(list(parent.token_ids), num_tokens)
        self.seen["forks"] += 1

    @has_active
    @rule(choice=choices)
    def finish(self, choice: int) -> None:
        """Finished or cancelled: it leaves for good."""
        request_id, _ = self.pick(self.active, choice)
        del self.active[request_id]
        self.release(request_id)

    @has_waiting
    @rule(choice=choices)
    def cancel(self, choice: int) -> None:
        """It leaves without being in."""
        request_id, _ = self.pick(self.waiting, choice)
        del self.waiting[request_id]
        self.release(request_id)

    @has_active
    @rule(choice=choices, token=tokens, demand=st.integers(0, 9), swap=st.booleans())
    def offload(self, choice: int, token: int, demand: int, swap: bool) -> None:
        """Back to the queue with its pages, or with its tokens alone; what that frees was foretold."""
        request_id, request = self.pick(self.active, choice)
        self.sample(request, token)
        if swap:
            request.swapped = self.memory.copies(self.cache.pages_of(request_id, request.num_written))
        else:
            request.num_written = 0
        wanted = (demand,) * len(self.cache.allocators)
        foretold = self.cache.covers(wanted, [request_id])
        self.waiting[request_id] = self.active.pop(request_id)
        self.release(request_id)
        assert foretold is allocator_has_room(self.cache, wanted) is self.cache.covers(wanted)
        self.seen["offloads"] += 1

    @invariant()
    def laws_hold(self) -> None:
        """After every step."""
        self.seen["steps"] += 1
        self.check_books()
        for request_id, request in self.active.items():
            self.memory.check_reads(request_id, request)

    def check_books(self) -> None:
        """The cache's own check, who holds what, and that the same block means the same tokens up to its end."""
        self.cache.check_integrity(set(self.waiting))
        assert self.cache.holders == set(self.active)
        if self.sharing is None:
            return
        assert self.cache._prefix_cache.initialized_blocks == self.sharing.initialized
        prefixes: dict[int, tuple[int, ...]] = {}
        for request_id, request in self.active.items():
            for number, block in enumerate(self.cache.allocators[0].block_table(request_id)):
                prefix = request.prefix((number + 1) * PAGE_SIZE)
                assert prefixes.setdefault(block, prefix) == prefix

    def teardown(self) -> None:
        """When all have left, everything is free and nobody is remembered."""
        for request_id in [*self.active, *self.waiting]:
            self.release(request_id)
        self.cache.check_integrity(set())
        assert self.cache.free_share == 1.0
        if self.sharing is not None:
            assert not self.cache._prefix_cache.known_ids
            assert not self.cache._prefix_cache._promised_by
            self.seen["demoted blocks"] += self.sharing.num_demoted


KINDS = [
    pytest.param(layout_of(2, page_size=PAGE_SIZE), 11, True, id="full, sharing"),
    pytest.param(layout_of(2, page_size=PAGE_SIZE), 10, False, id="full"),
    pytest.param(layout_of(2, 3, window=3, page_size=PAGE_SIZE), 6, True, id="hybrid, several blocks a chunk"),
    pytest.param(layout_of(0, 2, window=9, page_size=PAGE_SIZE), 9, True, id="sliding"),
]
EVERYWHERE = {"refused admissions", "stalls", "forks", "refused forks", "offloads", "restored pages"}


def run(num_runs: int, num_steps: int, *kind: object) -> Counter[str]:
    """Random steps, the same in every run of the test; how often what happened."""
    seen: Counter[str] = Counter()
    options = settings(
        max_examples=num_runs, stateful_step_count=num_steps, derandomize=True, deadline=None, print_blob=True
    )
    run_machine(lambda: Laws(*kind, seen), settings=options)
    print(seen)
    return seen


def check_variety(seen: Counter[str], layout: CacheLayout, sharing: bool, num_steps: int) -> None:
    """A run that met no limit and shared nothing would prove little."""
    expected = EVERYWHERE | (
        {"matched blocks", "demoted blocks", "waits"} if layout.supports_sharing and sharing else set()
    )
    assert all(seen[event] >= 5 for event in expected), seen
    assert seen["steps"] >= num_steps, seen


@pytest.mark.parametrize(("layout", "num_data_chunks", "sharing"), KINDS)
def test_random_steps_keep_the_laws(layout, num_data_chunks, sharing):
    """All that a cache does, in any order; after each step the laws hold and every token reads its own past."""
    check_variety(run(90, 120, layout, num_data_chunks, sharing), layout, sharing, 2_000)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "num_data_chunks", "sharing"), KINDS)
def test_very_many_random_steps_keep_the_laws(layout, num_data_chunks, sharing):
    """The same for longer lives."""
    check_variety(run(1_000, 120, layout, num_data_chunks, sharing), layout, sharing, 60_000)
