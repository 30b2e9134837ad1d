"""PrefixCache: which block holds which tokens, who waits for whom, and what is forgotten first."""

import pytest
from cache.cache_harness import PAGE_SIZE, cache_of, hold, layout_of

from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.prefix_cache import PrefixCache


def sharing_cache(num_blocks: int) -> PagedCache:
    return cache_of(layout_of(2), num_blocks)


def pages(*tokens: int) -> list[int]:
    """Whole pages of one token each."""
    return [token for token in tokens for _ in range(PAGE_SIZE)]


def table(cache: PagedCache, request_id: int) -> list[int]:
    return cache.allocators[0].block_table(request_id)


def known(cache: PagedCache) -> PrefixCache:
    assert cache._prefix_cache is not None
    return cache._prefix_cache


def matched(cache: PagedCache, token_ids: list[int]) -> list[int]:
    """What a request that comes and goes again would find."""
    match = cache.match(999, token_ids)
    cache.release(999)
    assert not match.must_wait
    return match.blocks


def test_the_same_tokens_after_another_prefix_do_not_match():
    """A hash names everything from position 0 on: KV depends on all tokens before."""
    cache = sharing_cache(12)
    hold(cache, 0, pages(1, 2, 3))
    assert matched(cache, [*pages(1, 2, 3), 0]) == table(cache, 0)
    assert matched(cache, [*pages(1, 2, 4), 0]) == table(cache, 0)[:2]
    assert matched(cache, [*pages(4, 2, 3), 0]) == matched(cache, [*pages(2, 3), 0]) == []
    assert matched(cache, [1, *pages(1, 2, 3)]) == table(cache, 0)[:1], "the same tokens one place later"


@pytest.mark.parametrize("num_tokens", range(1, 15))
def test_at_least_one_token_is_left_to_compute(num_tokens):
    """Law 3: of a prompt that is all there, (length - 1) // page_size blocks match, so that its last token is run."""
    cache, prompt = sharing_cache(12), list(range(100, 112))
    hold(cache, 0, prompt)
    blocks = matched(cache, [*prompt, 7, 7][:num_tokens])
    assert blocks == table(cache, 0)[: min(3, (num_tokens - 1) // PAGE_SIZE)]


def test_blocks_are_named_as_they_fill():
    """A long prompt in pieces, then generated tokens: each block may be shared from the pass on that fills it."""
    cache, tokens = sharing_cache(12), list(range(20))
    assert cache.admit(0, tokens[:11], 6)
    for num_tokens in (0, 3, 4, 6, 8, 11, 12, 15, 16):
        assert cache.allocate(0, num_tokens)
        cache.register(0, tokens[: max(11, num_tokens)], num_tokens)
        match = cache.match(1, tokens)
        assert match.blocks == table(cache, 0)[: num_tokens // PAGE_SIZE]
        assert match.must_wait == (num_tokens < 8), "two whole blocks of the prompt were promised"
        cache.check_integrity({1})


def test_a_request_that_leaves_in_its_first_pass_leaves_its_blocks():
    """Law 4: with max_tokens 1 a prompt is registered and released in one step, and the next one finds it."""
    cache, prompt = sharing_cache(12), list(range(10))
    hold(cache, 0, prompt)
    blocks = table(cache, 0)[:2]
    cache.release(0)
    assert cache.free_share == 1.0
    assert matched(cache, prompt) == known(cache).initialized_blocks == blocks


def test_a_request_that_fails_before_its_pass_leaves_nothing():
    """Without a registration nothing was written: its blocks have no content."""
    cache, prompt = sharing_cache(12), list(range(10))
    assert cache.admit(0, prompt, 10)
    cache.release(0)
    assert matched(cache, prompt) == known(cache).initialized_blocks == []
    assert cache._pool.num_free_chunks == 12
    cache.check_integrity(set())


class TestWaiting:
    """A shared prefix is computed once, by the first who was admitted."""

    PROMPT = (*range(14),)

    def admit_first_block(self) -> PagedCache:
        """Request 0 has computed one block of three that it promised."""
        cache = sharing_cache(20)
        assert cache.admit(0, list(self.PROMPT), 4)
        cache.register(0, list(self.PROMPT), 4)
        return cache

    def test_who_shares_what_is_on_its_way_waits(self):
        """The blocks at hand are named, and more are coming; as soon as they are written there is no wait."""
        cache, prompt = self.admit_first_block(), list(self.PROMPT)
        match = cache.match(1, prompt)
        assert (match.blocks, match.must_wait) == (table(cache, 0), True)
        assert cache.allocate(0, 14)
        cache.register(0, prompt, 14)
        match = cache.match(1, prompt)
        assert (match.blocks, match.must_wait) == (table(cache, 0)[:3], False)

    def test_who_needs_no_more_than_is_there_does_not_wait(self):
        """Promises beyond what two prompts have in common concern nobody."""
        cache = self.admit_first_block()
        assert matched(cache, [0, 1, 2, 3, 4]) == matched(cache, [*range(7), 0, 0]) == table(cache, 0)
        assert matched(cache, [9, *self.PROMPT]) == []

    @pytest.mark.parametrize("registered", [True, False])
    def test_who_waits_is_released_when_the_other_leaves(self, registered):
        """Finished, failed or offloaded: the promise goes with the request, and what it wrote stays."""
        cache = sharing_cache(20)
        assert cache.admit(0, list(self.PROMPT), 4)
        if registered:
            cache.register(0, list(self.PROMPT), 4)
        blocks = list(table(cache, 0))
        assert cache.match(1, list(self.PROMPT)).must_wait
        cache.release(0)
        match = cache.match(1, list(self.PROMPT))
        assert (match.blocks, match.must_wait) == (blocks if registered else [], False)

    def test_nobody_waits_for_those_who_wait(self):
        """A promise comes with the admission: two new prompts do not wait for each other, nor one for itself."""
        cache, prompt = sharing_cache(20), list(self.PROMPT)
        assert not cache.match(0, prompt).must_wait
        assert not cache.match(1, prompt).must_wait
        assert cache.admit(0, prompt, 2)
        assert not cache.match(0, prompt).must_wait
        assert cache.match(1, prompt).must_wait
        cache.check_integrity({1})

    def test_who_was_let_in_takes_over_the_promise_of_the_rest(self):
        """Request 1 goes on from the shared block on its own way, and a third prompt like it waits for that."""
        cache, longer = self.admit_first_block(), [*range(4), *range(50, 60)]
        match = cache.match(1, longer)
        assert not match.must_wait
        assert cache.admit(1, longer, 6, match)
        cache.register(1, longer, 6)
        third = cache.match(2, longer)
        assert (third.blocks, third.must_wait) == (table(cache, 0), True)
        cache.release(1)
        assert not cache.match(2, longer).must_wait
        cache.check_integrity({2})

    def test_a_promise_is_dropped_only_by_who_gave_it(self):
        """Request 1 needs the second page too, all of it its own; when it fails, request 0 is still about to write."""
        cache, prompt = self.admit_first_block(), list(self.PROMPT)
        match = cache.match(1, prompt[:8])
        assert (match.blocks, match.must_wait) == (table(cache, 0), False)
        assert cache.admit(1, prompt[:8], 7, match)
        cache.register(1, prompt[:8], 7)
        cache.release(1)
        assert cache.match(2, prompt).must_wait
        cache.check_integrity({2})


def fill_one_by_one(cache: PagedCache, request_id: int, count: int) -> list[list[int]]:
    """A request grows block by block; the initialized ones after each."""
    left = []
    for number in range(1, count + 1):
        assert cache.allocate(request_id, number * PAGE_SIZE)
        cache.check_integrity()
        left.append(known(cache).initialized_blocks)
    return left


def test_initialized_blocks_are_demoted_one_by_one_and_only_when_the_pool_is_empty():
    """Law 6: unused memory goes first, then the most recently released request, its tail before its head."""
    cache = sharing_cache(9)
    hold(cache, 0, [*pages(1, 2, 3), 0])
    hold(cache, 1, pages(4, 5))
    first, second = table(cache, 0)[:3], list(table(cache, 1))
    cache.release(0)
    cache.release(1)
    initialized = first + second
    assert known(cache).initialized_blocks == initialized
    assert fill_one_by_one(cache, 9, 9) == [initialized] * 4 + [initialized[:n] for n in (4, 3, 2, 1, 0)]
    assert not cache.allocate(9, 10 * PAGE_SIZE)


def test_a_demoted_tail_leaves_its_head_to_be_matched():
    """The other way round, the tail would be unreachable and of no use."""
    cache, prompt = sharing_cache(4), [*pages(1, 2, 3), 0]
    hold(cache, 0, pages(1, 2, 3))
    blocks = list(table(cache, 0))
    cache.release(0)
    for num_taken in range(5):
        assert cache.allocate(9, num_taken * PAGE_SIZE)
        assert matched(cache, prompt) == blocks[: max(0, min(3, 4 - num_taken))]


def test_blocks_used_again_count_as_released_last():
    """A match takes blocks out of the initialized ones, a release puts them back at the end."""
    cache = sharing_cache(8)
    for request_id, token in enumerate((1, 2, 3)):
        hold(cache, request_id, pages(token))
        cache.release(request_id)
    first, second, third = known(cache).initialized_blocks
    match = cache.match(7, [*pages(1), 0])
    assert cache.admit(7, [*pages(1), 0], 5, match)
    assert known(cache).initialized_blocks == [second, third]
    cache.release(7)
    assert known(cache).initialized_blocks == [second, third, first]
    assert fill_one_by_one(cache, 9, 6)[-1] == [second, third]


def test_of_two_blocks_with_the_same_tokens_one_is_named():
    """Two requests that computed the same: the second one's block is of no use when it leaves."""
    cache = sharing_cache(8)
    hold(cache, 0, pages(1, 2))
    hold(cache, 1, pages(1, 2))
    named = list(table(cache, 0))
    assert matched(cache, [*pages(1, 2), 0]) == named
    cache.release(1)
    assert known(cache).initialized_blocks == []
    cache.release(0)
    assert known(cache).initialized_blocks == matched(cache, [*pages(1, 2), 0]) == named
    cache.check_integrity(set())


def test_a_block_is_found_again_once_its_demoted_parent_is_computed_again():
    """The chain is of hashes, not of blocks: a child outlives its parent and is reconnected to the next one."""
    cache = sharing_cache(7)
    hold(cache, 0, pages(1, 2))
    hold(cache, 1, pages(1, 2, 3))
    cache.release(0)
    child = table(cache, 1)[2]
    assert matched(cache, [*pages(1, 2, 3), 0]) == [*known(cache).initialized_blocks, child]
    fill_one_by_one(cache, 9, 4)
    assert matched(cache, [*pages(1, 2, 3), 0]) == [], "the parents are demoted"
    cache.release(9)
    hold(cache, 2, pages(1, 2))
    assert matched(cache, [*pages(1, 2, 3), 0]) == [*table(cache, 2), child]
    cache.check_integrity(set())


def test_nothing_is_remembered_of_those_who_left():
    """Admitted or not, forked or not: only the content of blocks stays."""
    cache = sharing_cache(12)
    hold(cache, 0, list(range(10)))
    cache.match(1, list(range(10)))
    cache.match(2, [5, 6])
    assert cache.fork(0, 3, 10) is not None
    assert known(cache).known_ids == {0, 1, 2, 3}
    with pytest.raises(AssertionError, match="remembered"):
        cache.check_integrity({1})
    for request_id in (2, 0, 3, 1):
        cache.release(request_id)
    assert known(cache).known_ids == set()
    cache.check_integrity(set())
