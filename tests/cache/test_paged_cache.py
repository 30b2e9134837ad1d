"""PagedCache: all-or-nothing admission. KVStorage: the bytes behind the blocks."""

import random

import pytest
import torch

from cbgen.cache.paged_cache import KVStorage, PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, READ_RESERVE_CHUNK
from cbgen.errors import MemoryPlanError
from cbgen.kernels.sdpa import SdpaAttention

PAGE_SIZE = 4
CPU = torch.device("cpu")


def cache_of(num_blocks: int) -> PagedCache:
    return PagedCache(num_blocks + NUM_RESERVED_CHUNKS, PAGE_SIZE)


def snapshot(cache: PagedCache, requests: range) -> tuple[object, ...]:
    """All that can be seen of a cache."""
    cache.check_integrity()
    tables = {r: list(cache.block_table(r)) for r in requests if cache.num_owned_blocks(r)}
    return cache.num_free_blocks, cache.free_share, tables


def test_capacity_and_shares_leave_the_reserve_out():
    """Blocks and shares speak of data: an empty cache is wholly free, a full one wholly used."""
    cache = cache_of(8)
    assert (cache.num_blocks, cache.num_free_blocks, cache.free_share, cache.used_share) == (8, 8, 1.0, 0.0)
    assert cache.allocate(0, 6 * PAGE_SIZE)
    assert (cache.num_free_blocks, cache.free_share, cache.used_share) == (2, 0.25, 0.75)
    assert cache.allocate(1, 2 * PAGE_SIZE)
    assert (cache.num_blocks, cache.num_free_blocks, cache.free_share, cache.used_share) == (8, 0, 0.0, 1.0)


def test_a_cache_of_the_reserve_alone_is_refused():
    """Without a data block nothing could ever be served."""
    with pytest.raises(MemoryPlanError):
        cache_of(0)


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (11, True), (12, True), (13, False), (1000, False)])
def test_fits_empty_is_what_an_empty_cache_grants(num_tokens, fits):
    """The promise made before a request starts is the one that allocation keeps, whoever is in the cache now."""
    busy, empty = cache_of(3), cache_of(3)
    busy.allocate(9, 12)
    assert busy.fits_empty(num_tokens) is empty.fits_empty(num_tokens) is fits
    assert empty.allocate(0, num_tokens) is fits


def test_allocation_covers_the_tokens_asked_for_and_no_more():
    """Room is counted from the request's first token: asking again for as many or fewer changes nothing."""
    cache = cache_of(8)
    assert cache.allocate(0, 5)
    assert cache.num_owned_blocks(0) == cache.num_blocks_for(5) == 2
    before = snapshot(cache, range(1))
    for num_tokens in (5, 8, 1, 0):
        assert cache.num_missing_blocks(0, num_tokens) == 0
        assert cache.allocate(0, num_tokens)
        assert snapshot(cache, range(1)) == before
    assert cache.num_missing_blocks(0, 9) == 1
    assert cache.allocate(0, 9)
    assert cache.block_table(0)[:2] == before[2][0]
    assert cache.num_owned_blocks(0) == 3


@pytest.mark.parametrize(
    ("request_id", "num_tokens"),
    [pytest.param(2, 9, id="new request"), pytest.param(0, 18, id="growing request"), pytest.param(2, 999, id="huge")],
)
def test_a_refused_allocation_changes_nothing(request_id, num_tokens):
    """One block too many is refused whole: no block of it is taken, and nobody else's table moves."""
    cache = cache_of(7)
    assert cache.allocate(0, 2 * PAGE_SIZE)
    assert cache.allocate(1, 3 * PAGE_SIZE)
    before = snapshot(cache, range(3))
    assert cache.num_missing_blocks(request_id, num_tokens) > cache.num_free_blocks
    assert not cache.allocate(request_id, num_tokens)
    assert snapshot(cache, range(3)) == before
    assert cache.allocate(2, 2 * PAGE_SIZE), "what was free before the refusal still is"


def test_release_returns_what_became_free():
    """A request that left holds nothing, and its blocks serve another; one never seen is fine."""
    cache = cache_of(4)
    assert cache.allocate(0, 16)
    assert not cache.allocate(1, 1)
    assert cache.release(0) == 4
    assert cache.release(0) == cache.release(5) == 0
    assert cache.num_owned_blocks(0) == 0
    assert cache.allocate(1, 16)


@pytest.mark.parametrize("seed", range(4))
def test_random_admissions_are_all_or_nothing(seed):
    """Granted exactly when the missing blocks are free, with the laws intact after each step, leaking nothing."""
    rng, cache, refusals = random.Random(seed), cache_of(20), 0
    for _ in range(800):
        request_id, num_tokens = rng.randrange(8), rng.randint(1, 40)
        if rng.random() < 0.25:
            cache.release(request_id)
            cache.check_integrity()
            continue
        before = snapshot(cache, range(8))
        owned = cache.num_owned_blocks(request_id)
        missing = max(0, -(-num_tokens // PAGE_SIZE) - owned)
        granted = cache.allocate(request_id, num_tokens)
        assert granted is (missing <= before[0])
        refusals += not granted
        if granted:
            assert cache.num_owned_blocks(request_id) == owned + missing
        else:
            assert snapshot(cache, range(8)) == before
    assert refusals > 20, "the run must have tried the cache's limits"
    for request_id in range(8):
        cache.release(request_id)
    cache.check_integrity()
    assert cache.num_free_blocks == cache.num_blocks


LAYOUTS = [
    pytest.param(4, 2, 16, torch.float32, id="aligned"),
    pytest.param(1, 1, 5, torch.float32, id="padded page"),
    pytest.param(3, 3, 7, torch.bfloat16, id="odd bfloat16"),
]


@pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim", "dtype"), LAYOUTS)
def test_the_read_reserve_is_zero_in_every_layer(page_size, num_kv_heads, head_dim, dtype):
    """Padding reads it: uninitialized bytes there could be NaN (law 8)."""
    backend = SdpaAttention(page_size, num_kv_heads, head_dim, dtype)
    storage = KVStorage(6, 4, backend, CPU)
    assert len(storage.layers) == 4
    for layer in storage.layers:
        for half in layer:
            assert half.shape == (6, page_size, num_kv_heads, head_dim)
            assert half.dtype == dtype
            assert not half[READ_RESERVE_CHUNK].any()


@pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim", "dtype"), LAYOUTS)
def test_pages_do_not_overlap(page_size, num_kv_heads, head_dim, dtype):
    """Each page of each layer, K and V apart, keeps its own value when all are written; the reserve stays zero."""
    num_chunks, num_layers = 9, 4
    storage = KVStorage(num_chunks, num_layers, SdpaAttention(page_size, num_kv_heads, head_dim, dtype), CPU)
    places = [
        (layer, half, chunk)
        for chunk in range(READ_RESERVE_CHUNK + 1, num_chunks)
        for layer in range(num_layers)
        for half in range(2)
    ]
    for value, (layer, half, chunk) in enumerate(places, start=1):
        storage.layers[layer][half][chunk] = value
    for value, (layer, half, chunk) in enumerate(places, start=1):
        assert (storage.layers[layer][half][chunk] == value).all(), (layer, half, chunk)
    assert not any(half[READ_RESERVE_CHUNK].any() for layer in storage.layers for half in layer)


@pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim", "dtype"), LAYOUTS)
def test_a_page_starts_on_64_bytes_and_holds_k_and_v(page_size, num_kv_heads, head_dim, dtype):
    """Kernels read aligned pages: the bytes of a page are K and V, rounded up to 64."""
    backend = SdpaAttention(page_size, num_kv_heads, head_dim, dtype)
    content_bytes = 2 * page_size * num_kv_heads * head_dim * dtype.itemsize
    assert backend.page_bytes % 64 == 0
    assert content_bytes <= backend.page_bytes < content_bytes + 64
    for keys, _ in KVStorage(3, 2, backend, CPU).layers:
        assert keys.storage_offset() * dtype.itemsize % 64 == 0
        assert keys.stride(0) * dtype.itemsize == 2 * backend.page_bytes
