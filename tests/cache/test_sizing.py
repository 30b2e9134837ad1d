"""Free memory to chunks and back, and the messages when it does not work out."""

import re
from dataclasses import replace

import pytest

from cbgen.cache.pool import NUM_RESERVED_CHUNKS
from cbgen.cache.sizing import (
    activation_bytes,
    bytes_from_chunks,
    chunks_from_bytes,
    plan_cache,
    with_memory_utilization,
)
from cbgen.config import ContinuousBatchingConfig, ModelShape, ResolvedConfig
from cbgen.errors import MemoryPlanError, UsageError

SHAPE = ModelShape(
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    hidden_size=128,
    vocab_size=1000,
    max_model_len=250,
    dtype_bytes=4,
)
CHUNK_BYTES = 3 * 32 * 2 * 4 * 16 * 4
GIB = 1 << 30


def config(**options: object) -> ResolvedConfig:
    return ContinuousBatchingConfig(**{"page_size": 32, "max_requests_per_batch": 16, **options}).resolve("cpu")


def free_for(num_blocks: int, resolved: ResolvedConfig) -> int:
    """The free memory of which the allowed share holds exactly `num_blocks` blocks and the activations."""
    needed = (num_blocks + NUM_RESERVED_CHUNKS) * CHUNK_BYTES + activation_bytes(SHAPE, resolved)
    return int(needed / resolved.max_memory_percent)


@pytest.mark.parametrize("chunk_bytes", [1, 3, 64, 4096, 49152, 5_898_240, (1 << 31) + 64])
def test_bytes_and_chunks_are_exact_inverses(chunk_bytes):
    """n chunks need so many bytes, not one less; and whole chunks never need more than the bytes given."""
    for num_chunks in [*range(1, 300), 4097, 99_991, 1 << 20, (1 << 33) + 1]:
        num_bytes = bytes_from_chunks(num_chunks, chunk_bytes)
        assert chunks_from_bytes(num_bytes, chunk_bytes) == num_chunks
        assert chunks_from_bytes(num_bytes - 1, chunk_bytes) == num_chunks - 1
        assert chunks_from_bytes(num_bytes + chunk_bytes - 1, chunk_bytes) == num_chunks


@pytest.mark.parametrize("option", ["max_batch_tokens", "max_requests_per_batch"])
def test_larger_batches_leave_less_for_the_cache(option):
    """Activations count against the memory: both limits of a batch cost blocks."""
    small, large = config(**{option: 64}), config(**{option: 4096})
    assert 0 < activation_bytes(SHAPE, small) < activation_bytes(SHAPE, large)
    shape = replace(SHAPE, max_model_len=1 << 20)
    assert plan_cache(shape, small, CHUNK_BYTES, GIB).num_blocks > plan_cache(shape, large, CHUNK_BYTES, GIB).num_blocks


@pytest.mark.parametrize("percent", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [1, 2, 77])
def test_an_automatic_plan_takes_what_fits_and_no_more(num_blocks, percent):
    """Cache and activations stay within the allowed share, and one more block would not."""
    resolved = config(max_memory_percent=percent)
    free_bytes = free_for(num_blocks, resolved)
    plan = plan_cache(SHAPE, resolved, CHUNK_BYTES, free_bytes)
    assert (plan.num_blocks, plan.num_chunks) == (num_blocks, num_blocks + NUM_RESERVED_CHUNKS)
    assert plan.cache_bytes == plan.num_chunks * CHUNK_BYTES
    assert plan.activation_bytes == activation_bytes(SHAPE, resolved)
    assert plan.cache_bytes + plan.activation_bytes <= free_bytes * percent
    assert plan.cache_bytes + CHUNK_BYTES + plan.activation_bytes > free_bytes * percent


@pytest.mark.parametrize(("max_model_len", "blocks_per_request"), [(250, 8), (256, 8), (257, 9), (1, 1)])
def test_the_useful_maximum_caps_an_automatic_plan(max_model_len, blocks_per_request):
    """However much is free, a full batch at the whole context needs no more than this."""
    shape = replace(SHAPE, max_model_len=max_model_len)
    plan = plan_cache(shape, config(), CHUNK_BYTES, 1000 * GIB)
    assert plan.num_blocks == 16 * blocks_per_request


@pytest.mark.parametrize("num_blocks", [1, 5, 129, 4000])
def test_a_pinned_number_of_blocks_is_kept(num_blocks):
    """Neither the memory left over nor the useful maximum (128 here) changes what the user pinned."""
    resolved = config(num_blocks=num_blocks)
    for free_bytes in (free_for(num_blocks, resolved), 1000 * GIB):
        plan = plan_cache(SHAPE, resolved, CHUNK_BYTES, free_bytes)
        assert (plan.num_blocks, plan.num_chunks) == (num_blocks, num_blocks + NUM_RESERVED_CHUNKS)


@pytest.mark.parametrize("fitting", [1, 40])
def test_a_refusal_names_the_blocks_that_would_fit(fitting):
    """The number in the message works when it is pinned; one more is refused again."""
    free_bytes = free_for(fitting, config())
    with pytest.raises(MemoryPlanError) as refused:
        plan_cache(SHAPE, config(num_blocks=fitting + 1), CHUNK_BYTES, free_bytes)
    message = str(refused.value)
    assert f"{fitting + 1} blocks ({(fitting + 1) * 32} tokens)" in message
    named = int(re.search(r"room for (\d+) blocks", message)[1])
    assert named == fitting
    assert plan_cache(SHAPE, config(num_blocks=named), CHUNK_BYTES, free_bytes).num_blocks == named
    assert "--num-blocks" in message
    assert "--max-memory-percent" in message


@pytest.mark.parametrize("pinned", [None, 1])
@pytest.mark.parametrize("free_bytes", [0, 1, 100_000])
def test_memory_that_the_activations_fill_has_room_for_no_block(free_bytes, pinned):
    """Less than the activations need is room for 0 blocks, never for a negative number."""
    with pytest.raises(MemoryPlanError, match="room for 0 blocks"):
        plan_cache(SHAPE, config(num_blocks=pinned), CHUNK_BYTES, free_bytes)


def test_reserved_chunks_alone_are_no_cache():
    """Room for the reserve only is a refusal too, one block further it is a plan."""
    with pytest.raises(MemoryPlanError, match="room for 0 blocks"):
        plan_cache(SHAPE, config(), CHUNK_BYTES, free_for(0, config()))
    assert plan_cache(SHAPE, config(), CHUNK_BYTES, free_for(1, config())).num_blocks == 1


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
