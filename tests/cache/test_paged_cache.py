"""PagedCache: all-or-nothing over every allocator, what counts as free, and a request's pages."""

import copy
import random

import pytest
from cache.cache_harness import (
    PAGE_SIZE,
    allocator_has_room,
    block_tables,
    cache_of,
    hold,
    layout_of,
    snapshot,
)

from cbgen.cache.paged_cache import NO_MATCH, PagedCache
from cbgen.errors import MemoryPlanError

FULL, SLIDING, HYBRID = layout_of(2), layout_of(0, 2), layout_of(2, 3)  # hybrid: 3 full or 2 sliding blocks a chunk
every_kind = pytest.mark.parametrize(
    ("layout", "sharing"),
    [
        pytest.param(FULL, True, id="full, sharing"),
        pytest.param(FULL, False, id="full"),
        pytest.param(SLIDING, True, id="sliding"),
        pytest.param(HYBRID, True, id="hybrid"),
    ],
)


def filled(cache: PagedCache) -> PagedCache:
    """A request of three pages, and as many of one page as there is room for."""
    hold(cache, 0, list(range(9)))
    request_id = 1
    while cache.admit(request_id, [7], 1):
        request_id += 1
    return cache


def test_only_a_model_of_full_attention_shares_and_only_if_it_may():
    """Law 5, and the option that turns it off."""
    assert cache_of(FULL, 4).shares_blocks
    assert not any(cache_of(layout, 4).shares_blocks for layout in (SLIDING, HYBRID))
    assert not cache_of(FULL, 4, allow_block_sharing=False).shares_blocks


def test_capacity_and_shares_leave_the_reserve_out():
    """Blocks and shares speak of data: an empty cache is wholly free, a full one wholly used."""
    cache = cache_of(FULL, 8)
    assert (cache.num_blocks, cache.free_share, cache.used_share) == (8, 1.0, 0.0)
    assert cache.allocate(0, 6 * PAGE_SIZE)
    assert (cache.free_share, cache.used_share) == (0.25, 0.75)
    assert cache.allocate(1, 2 * PAGE_SIZE)
    assert (cache.num_blocks, cache.free_share, cache.used_share) == (8, 0.0, 1.0)


def test_blocks_whose_content_is_kept_are_free():
    """Initialized or not: what nobody owns can be had."""
    cache = cache_of(FULL, 8)
    hold(cache, 0, list(range(4 * PAGE_SIZE)))
    assert cache.free_share == 0.5
    cache.release(0)
    assert (cache._pool.num_free_chunks, cache.free_share) == (4, 1.0)


def test_the_free_share_of_a_hybrid_counts_parts_of_chunks():
    """Two of three full blocks of one chunk and both sliding blocks of another are owned, of four chunks."""
    cache = cache_of(HYBRID, 4)
    assert cache.num_blocks == 4
    assert cache.allocate(0, 2 * PAGE_SIZE)
    assert cache.free_share == pytest.approx((2 + 1 / 3) / 4)
    assert cache.allocate(0, 3 * PAGE_SIZE), "a full block more, and no sliding one: the ring is whole"
    assert cache.free_share == pytest.approx(2 / 4)


def test_a_cache_of_the_reserve_alone_is_refused():
    """Without a data block nothing could ever be served."""
    with pytest.raises(MemoryPlanError):
        cache_of(FULL, 0)


@every_kind
@pytest.mark.parametrize("num_data_chunks", [1, 2, 3, 5])
def test_fits_empty_is_what_an_empty_cache_grants(layout, sharing, num_data_chunks):
    """The promise made before a request starts is the one that allocation keeps, whoever is in the cache now."""
    busy = cache_of(layout, num_data_chunks, sharing)
    busy.allocate(9, 9)
    for num_tokens in range(1, 40):
        fits = cache_of(layout, num_data_chunks, sharing).allocate(0, num_tokens)
        assert busy.fits_empty(num_tokens) is fits
        assert (busy.max_request_tokens(39) >= num_tokens) is fits


def test_allocation_covers_the_tokens_asked_for_and_no_more():
    """Room is counted from the request's first token: asking again for as many or fewer changes nothing."""
    cache = cache_of(HYBRID, 8)
    assert cache.missing_blocks(0, 13) == (4, 2)
    assert cache.num_pages((4, 2)) == 4 * 2 + 2 * 3
    assert cache.allocate(0, 5)
    before = snapshot(cache)
    for num_tokens in (5, 8, 1, 0):
        assert cache.missing_blocks(0, num_tokens) == (0, 0)
        assert cache.allocate(0, num_tokens)
        assert snapshot(cache) == before
    assert cache.missing_blocks(0, 13) == (2, 0)
    assert cache.allocate(0, 13)
    assert (cache.num_owned_blocks(0), cache.num_owned_blocks(1)) == (6, 0)


@every_kind
def test_what_is_refused_changes_nothing(layout, sharing):
    """Admitted, grown or forked: one block too many is refused whole, to the last field of every part."""
    cache = filled(cache_of(layout, 9, sharing))
    newcomer = list(range(200, 290))
    match = cache.match(70, newcomer)
    before = snapshot(cache)
    assert not cache.admit(70, newcomer, 90, match)
    assert layout is SLIDING or not cache.allocate(0, 90)
    assert cache.fork(0, 71, 9) is None
    assert snapshot(cache) == before
    cache.check_integrity({70})


def test_a_hybrid_is_refused_when_one_of_its_types_finds_no_room():
    """The other type would have found some: it gets nothing either."""
    cache = cache_of(HYBRID, 3)
    assert cache.allocate(0, 2 * PAGE_SIZE)
    assert cache.allocate(1, 1), "a spare full block, and the last chunk for a sliding one"
    before = snapshot(cache)
    assert cache.missing_blocks(2, 1) == (1, 1)
    assert not cache.allocate(2, 1), "a spare sliding block, but no chunk for a full one"
    assert not cache.admit(2, [5], 1)
    assert snapshot(cache) == before
    cache.check_integrity()


def test_matched_blocks_do_not_count_as_free_while_they_are_matched():
    """Law 2: to demote a block for a request that is about to take it over would give it away twice."""
    cache = cache_of(FULL, 4)
    hold(cache, 0, [*range(12)])
    blocks = list(cache.allocators[0].block_table(0))
    cache.release(0)
    hold(cache, 1, [99])
    assert cache.free_share == 0.75
    whole = cache.match(2, [*range(12), 5])
    assert whole.blocks == blocks
    before = snapshot(cache)
    assert not cache.admit(2, [*range(12), 5], 13, whole), "three free blocks, all of them matched; a fourth is missing"
    assert snapshot(cache) == before
    part = cache.match(3, [*range(8), 5])
    assert part.blocks == blocks[:2]
    assert cache.admit(3, [*range(8), 5], 9, part), "the third one is free to be demoted"
    assert cache.allocators[0].block_table(3) == blocks
    cache.check_integrity({2})


class Replay:
    """Random requests on a cache; every answer is worked out anew from the block tables."""

    def __init__(self, cache: PagedCache, seed: int):
        self.rng, self.cache = random.Random(seed), cache
        self.tokens: dict[int, list[int]] = {}
        self.next_id = self.refusals = self.matches = self.shared = 0

    def admit(self) -> None:
        prompt = [self.rng.choice((0, 0, 0, 1)) for _ in range(self.rng.randint(1, 30))]
        match, request_id = self.cache.match(self.next_id, prompt), self.next_id
        self.next_id += 1
        self.matches += bool(match.blocks)
        demand = self.cache.missing_blocks(request_id, len(prompt))
        rehearsal = copy.deepcopy(self.cache)
        if match.blocks:
            rehearsal.allocators[0].adopt(request_id, match.blocks)
            demand = (demand[0] - len(match.blocks),)
        before, expected = snapshot(self.cache), allocator_has_room(rehearsal, demand)
        granted = self.cache.admit(request_id, prompt, len(prompt), match)
        self.compare(granted, expected, before)
        if granted:
            self.cache.register(request_id, prompt, len(prompt))
            self.tokens[request_id] = prompt
        else:
            self.cache.release(request_id)

    def grow(self, request_id: int) -> None:
        tokens = self.tokens[request_id] + [self.rng.randrange(2) for _ in range(self.rng.randint(1, 6))]
        demand = self.cache.missing_blocks(request_id, len(tokens))
        before, expected = snapshot(self.cache), allocator_has_room(self.cache, demand)
        granted = self.cache.allocate(request_id, len(tokens))
        self.compare(granted, expected, before)
        if granted:
            self.cache.register(request_id, tokens, len(tokens))
            self.tokens[request_id] = tokens

    def compare(self, granted: bool, expected: bool, before: object) -> None:
        assert granted is expected
        self.refusals += not granted
        assert granted or snapshot(self.cache) == before

    def step(self) -> None:
        roll = self.rng.random()
        if not self.tokens or roll < 0.3:
            self.admit()
        elif roll < 0.7:
            self.grow(self.rng.choice(list(self.tokens)))
        else:
            request_id = self.rng.choice(list(self.tokens))
            self.cache.release(request_id)
            del self.tokens[request_id]

    def check(self) -> None:
        self.cache.check_integrity(set())
        used = 0.0
        for tables, allocator in zip(block_tables(self.cache), self.cache.allocators, strict=True):
            owned = [block for table in tables.values() for block in table]
            self.shared += len(owned) > len(set(owned))
            used += len(set(owned)) / allocator.group.blocks_per_chunk
        assert self.cache.used_share == pytest.approx(used / self.cache._pool.num_data_chunks)
        assert self.cache.holders == set(self.tokens)

    def check_covers(self) -> None:
        """On a copy, some requests really leave and the rest really grow."""
        leaving = self.rng.sample(list(self.tokens), self.rng.randint(0, len(self.tokens)))
        stalled = {r: len(t) + self.rng.randint(1, 12) for r, t in self.tokens.items() if r not in leaving}
        demands = [self.cache.missing_blocks(r, num_tokens) for r, num_tokens in stalled.items()]
        demand = tuple(map(sum, zip(*demands, strict=True))) if demands else (1,) * len(self.cache.allocators)
        before = snapshot(self.cache)
        foretold = self.cache.covers(demand, leaving)
        assert snapshot(self.cache) == before
        later = copy.deepcopy(self.cache)
        for request_id in leaving:
            later.release(request_id)
        if not demands:
            assert later.allocate(self.next_id, 1) is foretold
            return
        assert all(later.allocate(r, num_tokens) for r, num_tokens in stalled.items()) is foretold


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_random_requests_are_all_or_nothing_and_forecasts_come_true(layout, sharing, seed):
    """Granted exactly when there is room, refused without a trace; `covers` agrees with releasing and allocating."""
    replay = Replay(cache_of(layout, 10, sharing), seed)
    for _ in range(400):
        replay.step()
        replay.check()
        replay.check_covers()
    assert replay.refusals > 10, "the run must have tried the cache's limits"
    assert (replay.matches > 10) is (replay.shared > 10) is replay.cache.shares_blocks
    for request_id in list(replay.tokens):
        replay.cache.release(request_id)
    replay.cache.check_integrity(set())
    assert replay.cache.free_share == 1.0


@pytest.mark.parametrize("sharing", [True, False])
def test_pages_of_a_full_layout_are_in_token_order(sharing):
    """Block after block, layer after layer; whole blocks that a request has already can be left out."""
    cache = cache_of(FULL, 9, sharing)
    hold(cache, 0, list(range(10)))
    first, second, third = cache.allocators[0].block_table(0)
    assert cache.pages_of(0, 10) == [first, first + 1, second, second + 1, third, third + 1]
    assert cache.pages_of(0, 8) == [first, first + 1, second, second + 1]
    assert cache.pages_of(0, 10, num_skipped=8) == [third, third + 1]
    assert cache.pages_of(0, 8, num_skipped=8) == cache.pages_of(0, 0) == []


def test_pages_of_a_hybrid_are_full_blocks_then_the_ring():
    """The order depends on the counts alone: what one request had in its pages, another can have in its own."""
    cache = cache_of(HYBRID, 16)
    hold(cache, 0, list(range(13)))
    hold(cache, 1, list(range(30)))
    full, sliding = (allocator.block_table(0) for allocator in cache.allocators)
    assert (len(full), len(sliding)) == (4, 2)
    assert cache.pages_of(0, 13) == [b + k for b in full for k in range(2)] + [b + k for b in sliding for k in range(3)]
    assert cache.pages_of(0, 4) == [full[0], full[0] + 1, sliding[0], sliding[0] + 1, sliding[0] + 2]
    assert len(cache.pages_of(1, 13)) == len(cache.pages_of(0, 13)) == cache.num_pages((4, 2))
    assert not set(cache.pages_of(0, 13)) & set(cache.pages_of(1, 30))


def test_holders_are_those_who_own_blocks():
    """Waiting requests that were matched hold nothing; released ones neither."""
    cache = cache_of(FULL, 9)
    hold(cache, 3, list(range(9)))
    assert cache.admit(5, list(range(9)), 9, cache.match(5, list(range(9))))
    cache.match(8, list(range(9)))
    assert cache.holders == {3, 5}
    cache.release(3)
    assert cache.holders == {5}
    assert (cache.num_owned_blocks(3), cache.num_owned_blocks(5)) == (0, 3)
    assert NO_MATCH.blocks == [], "the match of those without one is never written to"
