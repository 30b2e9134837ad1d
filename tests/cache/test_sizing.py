"""Free memory to chunks and back, and the messages when it does not work out."""

import re
from dataclasses import replace

import pytest
import torch
from cache.cache_harness import cache_of, shape_of

from cbgen.cache.layout import CacheLayout
from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.cache.sizing import (
    CachePlan,
    activation_bytes,
    bytes_from_chunks,
    chunks_from_bytes,
    plan_cache,
    with_memory_utilization,
)
from cbgen.config import ContinuousBatchingConfig, ModelShape, ResolvedConfig
from cbgen.errors import MemoryPlanError, UsageError
from cbgen.kernels.sdpa import SdpaAttention

BACKEND = SdpaAttention(page_size=32, num_kv_heads=4, head_dim=16, dtype=torch.float32)
FULL = shape_of(3)
SLIDING = shape_of(0, 3, window=100)  # a ring of 4 pages
HYBRID = shape_of(2, 3, window=100)  # chunks of 3 full or 2 sliding blocks
GIB = 1 << 30
every_shape = pytest.mark.parametrize(
    "shape", [pytest.param(FULL, id="full"), pytest.param(SLIDING, id="sliding"), pytest.param(HYBRID, id="hybrid")]
)


def config(**options: object) -> ResolvedConfig:
    return ContinuousBatchingConfig(**{"page_size": 32, "max_requests_per_batch": 16, **options}).resolve("cpu")


def plan(resolved: ResolvedConfig, free_bytes: int, shape: ModelShape = FULL, **options: bool) -> CachePlan:
    return plan_cache(shape, resolved, BACKEND, free_bytes, **options)


def chunk_bytes(shape: ModelShape) -> int:
    return CacheLayout.of(shape, 32).pages_per_chunk * BACKEND.page_bytes


def free_for(num_data_chunks: int, resolved: ResolvedConfig, shape: ModelShape = FULL, swap_bytes: int = 0) -> int:
    """The free memory of which the allowed share holds exactly so many chunks for data, and everything else."""
    cache_bytes = (num_data_chunks + NUM_RESERVED_CHUNKS) * chunk_bytes(shape)
    taken = activation_bytes(shape, resolved, BACKEND) + swap_bytes
    return int((cache_bytes + taken) / resolved.max_memory_percent)


@pytest.mark.parametrize("size", [1, 3, 64, 4096, 49152, 5_898_240, (1 << 31) + 64])
def test_bytes_and_chunks_are_exact_inverses(size):
    """n chunks need so many bytes, not one less; and whole chunks never need more than the bytes given."""
    for num_chunks in [*range(1, 300), 4097, 99_991, 1 << 20, (1 << 33) + 1]:
        num_bytes = bytes_from_chunks(num_chunks, size)
        assert chunks_from_bytes(num_bytes, size) == num_chunks
        assert chunks_from_bytes(num_bytes - 1, size) == num_chunks - 1
        assert chunks_from_bytes(num_bytes + size - 1, size) == num_chunks


@pytest.mark.parametrize("option", ["max_batch_tokens", "max_requests_per_batch"])
def test_larger_batches_leave_less_for_the_cache(option):
    """Activations count against the memory: both limits of a batch cost blocks."""
    small, large = config(**{option: 64}), config(**{option: 4096})
    assert 0 < activation_bytes(FULL, small, BACKEND) < activation_bytes(FULL, large, BACKEND)
    shape = replace(FULL, max_model_len=1 << 20)
    free_bytes = free_for(1000, large, shape)
    assert plan(small, free_bytes, shape).num_blocks > plan(large, free_bytes, shape).num_blocks == 1000


def test_the_workspace_of_the_kernel_counts_among_the_activations():
    """What attention takes beside its inputs is the backend's own word, for the longest context."""
    short, long = FULL, replace(FULL, max_model_len=100_000)
    more = BACKEND.workspace_bytes(512, 100_000) - BACKEND.workspace_bytes(512, FULL.max_model_len)
    assert activation_bytes(long, config(), BACKEND) - activation_bytes(short, config(), BACKEND) == more > 0


@every_shape
@pytest.mark.parametrize("percent", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("num_data_chunks", [2, 3, 47])
def test_an_automatic_plan_takes_what_fits_and_no_more(num_data_chunks, percent, shape):
    """Cache and activations stay within the allowed share, and one more chunk would not."""
    resolved = config(max_memory_percent=percent)
    free_bytes = free_for(num_data_chunks, resolved, shape)
    made = plan(resolved, free_bytes, shape)
    assert made.num_chunks == num_data_chunks + NUM_RESERVED_CHUNKS
    assert made.num_blocks == made.layout.blocks_in_chunks(num_data_chunks)
    assert made.cache_bytes == made.num_chunks * chunk_bytes(shape) == made.num_chunks * made.chunk_bytes
    assert made.activation_bytes == activation_bytes(shape, resolved, BACKEND)
    assert made.cache_bytes + made.activation_bytes <= free_bytes * percent
    assert made.cache_bytes + made.chunk_bytes + made.activation_bytes > free_bytes * percent


def test_the_blocks_of_a_hybrid_plan_are_whole_model_blocks():
    """Seven chunks hold nine full blocks in three and eight sliding ones in four: eight of the whole model."""
    made = plan(config(), free_for(7, config(), HYBRID), HYBRID)
    assert (made.num_chunks, made.num_blocks) == (9, 8)
    assert cache_of(made.layout, 7).num_blocks == made.num_blocks


@pytest.mark.parametrize(("max_model_len", "full_blocks"), [(250, 8), (256, 8), (257, 9), (1, 1)])
def test_the_useful_maximum_caps_an_automatic_plan(max_model_len, full_blocks):
    """However much is free, a full batch at the whole context needs no more: of a sliding layer, no more than rings."""
    ring = min(4, full_blocks)
    for shape, useful in (
        (FULL, 16 * full_blocks),
        (SLIDING, 16 * ring),
        (HYBRID, -(-16 * full_blocks // 3) + 16 * ring // 2),
    ):
        made = plan(config(), 1000 * GIB, replace(shape, max_model_len=max_model_len))
        assert made.num_chunks == useful + NUM_RESERVED_CHUNKS
        assert made.num_requests(max_model_len) >= 16


@every_shape
@pytest.mark.parametrize("num_blocks", [1, 5, 129, 4000])
def test_a_pinned_number_of_blocks_is_kept(num_blocks, shape):
    """Neither the memory left over nor the useful maximum changes what the user pinned."""
    resolved = config(num_blocks=num_blocks)
    num_data_chunks = CacheLayout.of(shape, 32).chunks_for_blocks(num_blocks)
    for free_bytes in (free_for(num_data_chunks, resolved, shape), 1000 * GIB):
        made = plan(resolved, free_bytes, shape)
        assert (made.num_blocks, made.num_chunks) == (num_blocks, num_data_chunks + NUM_RESERVED_CHUNKS)


@every_shape
@pytest.mark.parametrize("fitting", [2, 3, 40])
def test_a_refusal_names_the_blocks_that_would_fit(fitting, shape):
    """The number in the message works when it is pinned; one more is refused again."""
    free_bytes = free_for(fitting, config(), shape)
    most = CacheLayout.of(shape, 32).blocks_in_chunks(fitting)
    with pytest.raises(MemoryPlanError) as refused:
        plan(config(num_blocks=most + 1), free_bytes, shape)
    message = str(refused.value)
    assert f"{most + 1} blocks ({(most + 1) * 32} tokens)" in message
    named = int(re.search(r"room for (\d+) blocks", message)[1])
    assert named == most
    assert plan(config(num_blocks=named), free_bytes, shape).num_blocks == named
    assert "--num-blocks" in message
    assert "--max-memory-percent" in message
    assert "--cpu-offload-space" not in message


@pytest.mark.parametrize("pinned", [None, 1])
@pytest.mark.parametrize("free_bytes", [0, 1, 100_000])
def test_memory_that_the_activations_fill_has_room_for_no_block(free_bytes, pinned):
    """Less than the activations need is room for 0 blocks, never for a negative number."""
    with pytest.raises(MemoryPlanError, match="room for 0 blocks"):
        plan(config(num_blocks=pinned), free_bytes)


@pytest.mark.parametrize(("shape", "least"), [(FULL, 1), (SLIDING, 1), (HYBRID, 2)])
def test_reserved_chunks_alone_are_no_cache(shape, least):
    """Every type needs a chunk: with one less than that it is a refusal, with that a plan."""
    with pytest.raises(MemoryPlanError, match="room for 0 blocks"):
        plan(config(), free_for(least - 1, config(), shape), shape)
    assert plan(config(), free_for(least, config(), shape), shape).num_chunks == least + NUM_RESERVED_CHUNKS


def test_the_swap_pool_is_taken_off_where_it_shares_the_memory():
    """On a CPU it is the same memory as the cache's; on a GPU it is not."""
    swapping = config(cpu_offload_space=0.25)
    free_bytes = free_for(20, swapping, swap_bytes=GIB // 4)
    assert plan(swapping, free_bytes, swap_shares_memory=True).num_blocks == 20
    alone = plan(config(), free_bytes).num_blocks
    assert plan(swapping, free_bytes, swap_shares_memory=False).num_blocks == alone > 20
    assert plan(swapping, free_bytes).num_blocks == 20, "shared unless said otherwise"


def test_a_refusal_names_the_swap_pool_where_it_is_in_the_way():
    """A cache that would fit without it is told so; where the memory is not shared it is not to blame."""
    swapping = config(num_blocks=20, cpu_offload_space=0.25)
    free_bytes = free_for(20, swapping)
    with pytest.raises(MemoryPlanError, match="--cpu-offload-space"):
        plan(swapping, free_bytes)
    assert plan(swapping, free_bytes, swap_shares_memory=False).num_blocks == 20
    with pytest.raises(MemoryPlanError) as refused:
        plan(swapping, free_bytes // 2, swap_shares_memory=False)
    assert "--cpu-offload-space" not in str(refused.value)


@every_shape
@pytest.mark.parametrize("num_data_chunks", [2, 5, 24])
def test_the_number_of_requests_agrees_with_admitting_them(shape, num_data_chunks):
    """What `cbgen size` prints is how many a real cache lets in before it refuses one."""
    made = plan(config(), free_for(num_data_chunks, config(), shape), shape)
    for num_tokens in range(1, 250, 7):
        cache = cache_of(made.layout, num_data_chunks, allow_block_sharing=False)
        count = 0
        while cache.allocate(count, num_tokens):
            count += 1
        assert made.num_requests(num_tokens) == count, num_tokens


@pytest.mark.parametrize(("share", "free"), [(0.9, 10 * GIB), (0.5, 7 * GIB), (1.0, 3 * GIB), (0.75, 3 * GIB)])
def test_a_share_of_all_memory_counts_what_is_in_use(share, free):
    """The budget is the share of the total, minus what is in use (the weights); nothing else changes."""
    total, before = 10 * GIB, config()
    after = with_memory_utilization(before, share, total, free)
    budget = share * total - (total - free)
    assert after.max_memory_percent * free == pytest.approx(budget, rel=1e-12)
    assert 0.0 < after.max_memory_percent <= 1.0
    assert replace(after, max_memory_percent=before.max_memory_percent) == before


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, 90.0, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    """A percentage or a negative number is a usage error that names the option, however much is free."""
    for free_bytes in (GIB, 10 * GIB):
        with pytest.raises(UsageError, match="--gpu-memory-utilization"):
            with_memory_utilization(config(), share, 10 * GIB, free_bytes)


@pytest.mark.parametrize(("share", "free"), [(0.5, 5 * GIB), (0.5, GIB), (1.0, 0)])
def test_a_share_already_in_use_leaves_no_cache(share, free):
    """When the weights take the whole share, the message says how much is in use."""
    with pytest.raises(MemoryPlanError, match=r"--gpu-memory-utilization.*in use"):
        with_memory_utilization(config(), share, 10 * GIB, free)
