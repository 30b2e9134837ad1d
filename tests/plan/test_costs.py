"""What passes cost: fitted to timed ones, and counted as the engine reads them."""

import numpy as np
import pytest
from engine_harness import engine_for, greedy_requests, mixed_prompts, random_ids
from tiny_models import ModelUnderTest

from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.plan.costs import TERMS, fit, size_of


def test_costs_are_found_again() -> None:
    """Of passes whose times are sums of costs, with a third of them held up by other work: in proportion those of the
    others, together those of all."""
    rng = np.random.default_rng(0)
    costs = rng.uniform(0.0, 1e-3, len(TERMS)) * (rng.random(len(TERMS)) < 0.7)
    sizes = [np.array([1, *rng.integers(0, 200, len(TERMS) - 1)], dtype=float) for _ in range(120)]
    for size in sizes[::2]:
        size[TERMS.index("pairs of tokens in prompts")] = 0
    seconds = [
        float(size @ costs) * (rng.uniform(1.5, 4.0) if place % 3 == 0 else 1.0) for place, size in enumerate(sizes)
    ]
    found = fit(sizes, seconds)
    assert (found.coefficients >= 0).all()
    for is_decode in (True, False):
        own = [
            place
            for place, size in enumerate(sizes)
            if (size[TERMS.index("pairs of tokens in prompts")] == 0) == is_decode
        ]
        assert len(own) > 40
        assert sum(found.seconds(sizes[place]) for place in own) == pytest.approx(sum(seconds[place] for place in own))
    ratios = np.array([found.coefficients @ size / (size @ costs) for size in sizes])
    assert np.median(np.abs(ratios / np.median(ratios) - 1)) < 0.1
    assert found.num_passes == 120


def test_costs_of_undisturbed_passes_are_exact() -> None:
    """And one pass alone is explained, whatever its size."""
    rng = np.random.default_rng(1)
    costs = rng.uniform(0.0, 1e-3, len(TERMS))
    sizes = [np.array([1, *rng.integers(0, 200, len(TERMS) - 1)], dtype=float) for _ in range(60)]
    found = fit(sizes, [float(size @ costs) for size in sizes])
    assert found.error < 1e-3
    assert fit(sizes[:1], [0.5]).seconds(sizes[0]) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma3"])
def test_sizes_are_those_of_the_batch(request: pytest.FixtureRequest, name: str) -> None:
    """Counted one by one, over all passes of a run."""
    under_test = request.getfixturevalue(name)
    engine = engine_for(under_test, max_batch_tokens=40, allow_block_sharing=False)
    manager, prompts = engine.manager, mixed_prompts(8, under_test.shape.vocab_size, longest=90, most=9)
    plain, total, largest = manager.passes.buffers.lay_out, np.zeros(len(TERMS)), 0.0

    def watched(batch, cache):
        nonlocal total, largest
        size = size_of(batch, cache)
        total, largest = total + size, max(largest, size[TERMS.index("tokens of KV read")])
        return plain(batch, cache)

    manager.passes.buffers.lay_out = watched
    requests = greedy_requests(prompts)
    list(manager.run(ListSource(requests)))
    found = dict(zip(TERMS, total, strict=True))
    computed = sum(request.num_computed_tokens for request in requests)
    assert found["a pass"] == manager.metrics.num_steps
    assert sum(found[f"query tokens above {bend}"] for bend in (0, 16, 64, 256)) == computed
    assert found["rows of logits"] == manager.metrics.output_tokens
    assert found["requests"] == manager.metrics.num_scheduled_requests
    windows = [
        allocator.group.window for allocator in manager.cache.allocators for _ in range(allocator.group.pages_per_block)
    ]
    pairs = sum(
        min(position + 1, window or position + 1)
        for window in windows
        for request in requests
        for position in range(request.num_computed_tokens)
    )
    assert found["pairs of tokens in prompts"] + found["pairs of tokens in decodes"] == pairs
    assert 0 < largest <= under_test.shape.num_layers * manager.cache.num_blocks * manager.cache.page_size


def test_shared_pages_are_read_once(tiny_llama: ModelUnderTest) -> None:
    """Twenty requests behind one prefix read its pages once in a pass."""
    engine = engine_for(tiny_llama, page_size=16)
    manager, prefix = engine.manager, random_ids(160, seed=1)
    requests = [RequestState(n, [*prefix, 3 + n], SamplingParams(4, ignore_eos=True)) for n in range(20)]
    manager.pull(ListSource(requests))
    while manager.scheduler.num_waiting:
        manager.step()
    batch = manager._plan()
    assert len(batch.scheduled) == 20
    size = dict(zip(TERMS, size_of(batch, manager.cache), strict=True))
    assert size["tokens of KV read"] == tiny_llama.shape.num_layers * 16 * (10 + 20)
