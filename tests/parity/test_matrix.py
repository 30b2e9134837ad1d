"""The differential matrix: every way of serving a request gives the tokens of `model.generate` for it alone (law 9).

models {full, sliding, hybrid} x scheduler x {whole, chunked} prompts x sharing x {roomy, tiny} cache x {no swap, swap};
models x cache x {one pass at a time, two} where passes are recorded
"""

import itertools

import pytest
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, mixed_prompts, run_all
from staged_harness import staged_engine
from tiny_models import ModelUnderTest

from cbgen.engine.build import Engine

# Page size, and blocks of the tiny cache that requests outgrow. A ring of larger pages would hardly grow.
CACHES = {"llama": (16, 11), "mistral": (5, 13), "gemma3": (16, 8)}
COMMON_PREFIX = [7 + number % 50 for number in range(40)]
MATRIX = list(
    itertools.product(CACHES, ["fifo", "prefill_first"], [512, 24], [True, False], [False, True], [0.0, 0.01])
)


def prompts() -> list[Prompt]:
    """From one token to past the window and the page; then short ones that grow; then some with a common prefix."""
    own = [*mixed_prompts(7, 320, longest=90, seed=11), *mixed_prompts(5, 320, longest=9, seed=12)]
    shared = [Prompt([*COMMON_PREFIX, *prompt.token_ids[:number]], 1) for number, prompt in enumerate(own[1:6])]
    return [Prompt(prompt.token_ids, 4 + number * 11 % 27) for number, prompt in enumerate([*own, *shared])]


@pytest.mark.parametrize(
    ("name", "scheduler_type", "max_batch_tokens", "allow_block_sharing", "is_tiny", "cpu_offload_space"), MATRIX
)
def test_cell(
    request: pytest.FixtureRequest,
    name: str,
    scheduler_type: str,
    max_batch_tokens: int,
    allow_block_sharing: bool,
    is_tiny: bool,
    cpu_offload_space: float,
) -> None:
    """One cell, the laws of the cache asserted after every step; and what the cell is about did happen."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    page_size, tiny_blocks = CACHES[name]
    engine = engine_for(
        under_test,
        page_size=page_size,
        scheduler_type=scheduler_type,
        max_batch_tokens=max_batch_tokens,
        allow_block_sharing=allow_block_sharing,
        num_blocks=tiny_blocks if is_tiny else 512,
        cpu_offload_space=cpu_offload_space,
        safety_margin=0.0,
    )
    check(under_test, engine, is_tiny, cpu_offload_space > 0)
    shares = allow_block_sharing and name == "llama"
    assert (engine.manager.metrics.prefix_hit_tokens > 0) == shares


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("is_tiny", "cpu_offload_space"), [(False, 0.0), (True, 0.0), (True, 0.01)])
@pytest.mark.parametrize("name", CACHES)
def test_recorded_passes(
    request: pytest.FixtureRequest, name: str, is_tiny: bool, cpu_offload_space: float, depth: int
) -> None:
    """The same where passes are padded, recorded and replayed, one at a time or two in flight."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    page_size, tiny_blocks = CACHES[name]
    engine = staged_engine(
        under_test,
        depth,
        page_size=page_size,
        max_batch_tokens=48,
        num_blocks=tiny_blocks if is_tiny else 512,
        cpu_offload_space=cpu_offload_space,
        safety_margin=0.0,
    )
    check(under_test, engine, is_tiny, cpu_offload_space > 0)
    assert engine.manager.passes.graphs.num_replayed > 0


def check(under_test: ModelUnderTest, engine: Engine, is_tiny: bool, swaps: bool) -> None:
    """Law 9; every prompt token was computed or taken over once; who had to leave went where there was room."""
    wanted, metrics = prompts(), engine.manager.metrics
    assert_parity(under_test, wanted, run_all(engine, greedy_requests(wanted)))
    assert metrics.computed_prompt_tokens + metrics.prefix_hit_tokens == sum(len(p.token_ids) for p in wanted)
    assert metrics.offloads == metrics.swaps + metrics.soft_resets
    assert (metrics.offloads > 0) == is_tiny
    assert (metrics.swaps > 0) == (is_tiny and swaps)
    assert (metrics.recomputed_tokens > 0) == (is_tiny and not swaps)
