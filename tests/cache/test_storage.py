"""KVStorage: the bytes behind the blocks, seen by each layer from its place on."""

import pytest
import torch
from cache.cache_harness import CPU, CopyCounter, cache_of, layout_of

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, READ_RESERVE_CHUNK
from cbgen.cache.storage import KVStorage, runs_of
from cbgen.kernels.sdpa import SdpaAttention

PAGES = [
    pytest.param(4, 2, 16, torch.float32, id="aligned"),
    pytest.param(1, 1, 5, torch.float32, id="padded page"),
    pytest.param(3, 3, 7, torch.bfloat16, id="odd bfloat16"),
]
LAYOUTS = [
    pytest.param(layout_of(4), id="full"),
    pytest.param(layout_of(0, 3), id="sliding"),
    pytest.param(layout_of(2, 3), id="hybrid"),
    pytest.param(layout_of(3, 20), id="hybrid with idle pages"),
]
every_page = pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim", "dtype"), PAGES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def storage_of(layout: CacheLayout, num_chunks: int, *page: object) -> KVStorage:
    return KVStorage(num_chunks, layout, SdpaAttention(*(page or (4, 1, 2, torch.float32))), CPU)


@every_layout
@every_page
def test_the_read_reserve_is_zero_in_every_layer(layout, page_size, num_kv_heads, head_dim, dtype):
    """Padding reads the page that a layer finds under the reserve's number: uninitialized, it could be NaN (law 8)."""
    storage = storage_of(layout, 6, page_size, num_kv_heads, head_dim, dtype)
    assert len(storage.layers) == sum(len(group.layers) for group in layout.groups)
    for layer in storage.layers:
        for half in layer:
            assert half.shape[1:] == (page_size, num_kv_heads, head_dim)
            assert half.dtype == dtype
            assert not half[READ_RESERVE_CHUNK * layout.pages_per_chunk].any()


@every_layout
def test_pages_do_not_overlap(layout):
    """Each page of each layer, K and V apart, keeps its own value when a whole cache is written; the reserve stays."""
    num_data_chunks = 7
    storage, cache = storage_of(layout, num_data_chunks + NUM_RESERVED_CHUNKS), cache_of(layout, num_data_chunks)
    request_id = 0
    while cache.allocate(request_id, 8):
        request_id += 1
    places = [
        (layer, half, block)
        for allocator in cache.allocators
        for owner in allocator.request_ids
        for block in allocator.block_table(owner)
        for layer in allocator.group.layers
        for half in range(2)
    ]
    assert len(places) > 2 * 5 * layout.pages_per_chunk * 0.9, "the cache must be nearly full"
    for value, (layer, half, block) in enumerate(places, start=1):
        storage.layers[layer][half][block] = value
    for value, (layer, half, block) in enumerate(places, start=1):
        assert (storage.layers[layer][half][block] == value).all(), (layer, half, block)
    assert not storage.pages[: layout.pages_per_chunk].any()


@every_layout
def test_a_layer_finds_its_page_under_the_number_of_the_block(layout):
    """The k-th layer of a type reads the k-th page of a block: what `pages_of` lists is what the layers wrote."""
    storage, cache = storage_of(layout, 9), cache_of(layout, 7)
    assert cache.allocate(0, 5)
    storage.pages.zero_()
    for allocator in cache.allocators:
        for block in allocator.block_table(0):
            for layer in allocator.group.layers:
                storage.layers[layer][0][block] = 1.0
                storage.layers[layer][1][block] = 2.0
    written = torch.nonzero(storage.pages.any(dim=1))[:, 0].tolist()
    assert written == sorted(cache.pages_of(0, 5))


@every_page
def test_a_page_starts_on_64_bytes_and_holds_k_and_v(page_size, num_kv_heads, head_dim, dtype):
    """Kernels read aligned pages: the bytes of a page are K and V, rounded up to 64."""
    backend = SdpaAttention(page_size, num_kv_heads, head_dim, dtype)
    content_bytes = 2 * page_size * num_kv_heads * head_dim * dtype.itemsize
    assert backend.page_bytes % 64 == 0
    assert content_bytes <= backend.page_bytes < content_bytes + 64
    layout = layout_of(2, 3)
    storage = KVStorage(3, layout, backend, CPU)
    assert storage.pages.shape == (3 * layout.pages_per_chunk, backend.page_bytes)
    for keys, _ in storage.layers:
        assert keys.storage_offset() * dtype.itemsize % 64 == 0
        assert keys.stride(0) * dtype.itemsize == backend.page_bytes


def test_copied_pages_are_equal_and_nothing_else_changes():
    """A fork's pages, side by side or not: byte for byte, and the originals stay."""
    storage = storage_of(layout_of(2, 3), 9)
    storage.pages.copy_(torch.randint(0, 256, storage.pages.shape, dtype=torch.uint8))
    before = storage.pages.clone()
    pairs = [(12, 40), (13, 41), (30, 20), (12, 22)]
    storage.copy_pages(pairs)
    for source, target in pairs:
        assert torch.equal(storage.pages[target], before[source])
    untouched = [page for page in range(len(before)) if page not in {target for _, target in pairs}]
    assert torch.equal(storage.pages[untouched], before[untouched])
    storage.copy_pages([])
    assert torch.equal(storage.pages[untouched], before[untouched])


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(5, 9)], [(5, 9, 1)], id="one"),
        pytest.param([(5, 9), (6, 10), (7, 11)], [(5, 9, 3)], id="side by side"),
        pytest.param([(5, 9), (6, 10), (8, 11), (9, 12)], [(5, 9, 2), (8, 11, 2)], id="a gap in the sources"),
        pytest.param([(5, 9), (6, 10), (7, 20), (8, 21)], [(5, 9, 2), (7, 20, 2)], id="a gap in the targets"),
        pytest.param([(5, 9), (5, 10), (4, 11)], [(5, 9, 1), (5, 10, 1), (4, 11, 1)], id="sources not ascending"),
        pytest.param([(5, 9), (6, 9), (7, 8)], [(5, 9, 1), (6, 9, 1), (7, 8, 1)], id="targets not ascending"),
        pytest.param([(0, 1), (1, 2)], [(0, 1, 2)], id="from the first row on"),
    ],
)
def test_rows_side_by_side_on_both_sides_are_one_run(pairs, runs):
    assert runs_of(pairs) == runs
    spelled_out = [(source + n, target + n) for source, target, count in runs for n in range(count)]
    assert spelled_out == pairs


def test_the_pages_of_a_block_are_one_copy():
    """A fork of two full and three sliding layers copies its blocks, not their pages one by one."""
    layout = layout_of(2, 3)
    storage, cache = storage_of(layout, 9), cache_of(layout, 7, allow_block_sharing=False)
    assert cache.allocate(0, 3)
    pairs = cache.fork(0, 1, 3)
    assert pairs is not None
    assert len(pairs) == 5
    with CopyCounter() as counter:
        storage.copy_pages(pairs)
    assert counter.copies == 2


def test_a_fork_reads_what_its_parent_wrote():
    """From block tables to bytes: each layer finds under the child's block what the parent wrote under its own."""
    layout = layout_of(2, 3)
    storage, cache = storage_of(layout, 9), cache_of(layout, 7)
    assert cache.allocate(0, 7)
    for layer, halves in enumerate(storage.layers):
        for half in halves:
            half.copy_(torch.randn(half.shape) + layer)
    pairs = cache.fork(0, 1, 7)
    assert pairs is not None
    storage.copy_pages(pairs)
    for allocator in cache.allocators:
        parent, child = (torch.tensor(allocator.block_table(request)) for request in (0, 1))
        assert not set(parent.tolist()) & set(child.tolist())
        for layer in allocator.group.layers:
            for half in storage.layers[layer]:
                assert torch.equal(half[child], half[parent])
