"""The prefix cache when two sequences of tokens have one hash, and whether its own check finds damage."""

import hashlib

import pytest
from cache.cache_harness import cache_of, hold, layout_of

from cbgen.cache import prefix_cache
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.prefix_cache import BlockContent

SEVENS, EIGHTS, ONES, TWOS = ([token] * 4 for token in (7, 8, 1, 2))


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> PagedCache:
    """A cache whose hash takes tokens 7 and 8 for the same."""

    def blake2b(data: bytes, digest_size: int) -> "hashlib.blake2b":
        return hashlib.blake2b(data.replace(b"\x08\0\0\0", b"\x07\0\0\0"), digest_size=digest_size)

    monkeypatch.setattr(prefix_cache, "blake2b", blake2b)
    return cache_of(layout_of(2), 16)


def test_equal_hashes_of_other_tokens_do_not_match(colliding):
    """Law 3: equal hash, equal tokens: they are compared, and the second content of a hash is not shared."""
    hold(colliding, 0, [*SEVENS, *ONES, 0])
    for token_ids in ([*EIGHTS, 0], [*EIGHTS, *ONES, 0]):
        match = colliding.match(1, token_ids)
        assert (match.blocks, match.must_wait) == ([], False)
        colliding.release(1)
    hold(colliding, 1, [*EIGHTS, *ONES, 0])
    colliding.check_integrity()
    assert colliding.match(2, [*SEVENS, *ONES, 0]).blocks == colliding.allocators[0].block_table(0)[:2]
    assert colliding.match(3, [*EIGHTS, *ONES, 0]).blocks == []
    for request_id in range(4):
        colliding.release(request_id)
        colliding.check_integrity()


def test_blocks_after_a_collision_do_not_match_either(colliding):
    """The hash of a child is the same under both parents, but its KV was computed after the eights."""
    hold(colliding, 0, [*SEVENS, *ONES, 0])
    hold(colliding, 1, [*EIGHTS, *TWOS, 0])
    sevens = colliding.allocators[0].block_table(0)[:1]
    assert colliding.match(2, [*SEVENS, *TWOS, 0]).blocks == sevens


def test_each_block_is_hashed_once_for_a_request(monkeypatch):
    """Who waits is looked at in every step: that costs look-ups, not hashes."""
    num_hashed = 0

    def counting(data: bytes, digest_size: int) -> "hashlib.blake2b":
        nonlocal num_hashed
        num_hashed += 1
        return hashlib.blake2b(data, digest_size=digest_size)

    monkeypatch.setattr(prefix_cache, "blake2b", counting)
    cache, tokens = cache_of(layout_of(2), 16), list(range(30))
    for _ in range(5):
        cache.match(0, tokens)
    assert num_hashed == 7
    assert cache.admit(0, tokens, 20, cache.match(0, tokens))
    for num_tokens in range(20, 31):
        assert cache.allocate(0, num_tokens)
        cache.register(0, tokens, num_tokens)
    assert num_hashed == 7
    assert cache.fork(0, 1, 30) is not None
    cache.register(1, [*tokens, 1, 2], 32)
    assert num_hashed == 8, "a fork knows its parent's"


def owned_twice(cache: PagedCache) -> None:
    cache._prefix_cache._num_owners[cache.allocators[0].block_table(0)[0]] += 1


def owned_and_initialized(cache: PagedCache) -> None:
    cache._prefix_cache._initialized[cache.allocators[0].block_table(0)[0]] = None


def content_of_a_free_block(cache: PagedCache) -> None:
    content = BlockContent(b"hash", b"tokens")
    cache._prefix_cache._content_of[99] = content
    cache._prefix_cache._block_of[content.hash] = 99


def hash_without_block(cache: PagedCache) -> None:
    cache._prefix_cache._block_of[b"hash"] = cache.allocators[0].block_table(0)[0]


def promise_of_nobody(cache: PagedCache) -> None:
    cache._prefix_cache._promised_by[b"hash"] = 77


def promise_kept_already(cache: PagedCache) -> None:
    cache._prefix_cache._promised_by[next(iter(cache._prefix_cache._block_of))] = 0


def names_exchanged(cache: PagedCache) -> None:
    parts = cache._prefix_cache
    first, second = cache.allocators[0].block_table(0)[:2]
    contents = parts._content_of
    contents[first], contents[second] = contents[second], contents[first]
    parts._block_of.update({content.hash: block for block, content in contents.items()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (owned_twice, "reference counts"),
        (owned_and_initialized, "owned and initialized"),
        (content_of_a_free_block, "content of a freed block"),
        (hash_without_block, None),
        (promise_of_nobody, "holds nothing"),
        (promise_kept_already, "kept already"),
        (names_exchanged, "another's content"),
    ],
)
def test_integrity_check_finds_damaged_books(damage, message):
    """Each assertion of the prefix cache can fail, and says why."""
    cache = cache_of(layout_of(2), 8)
    hold(cache, 0, list(range(10)))
    cache.check_integrity(set())
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity(set())
