"""Around the edge of the sliding window and of its ring of pages: tokens that leave it, in pieces of any size."""

import pytest
import torch
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, model_of, random_ids, run_all
from tiny_models import CONFIGS, WINDOW, ModelUnderTest

from cbgen.cache.pool import READ_RESERVE_CHUNK
from cbgen.engine.manager import Manager

# Around the window of 24 tokens; around one, two and three pages of 16, two of which are the ring; past both.
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17, 31, 32, 33, 48, 49, 70]
MODELS = ["mistral", "gemma3"]


def edge_prompts(lengths: list[int] | None = None) -> list[Prompt]:
    return [Prompt(random_ids(length, seed=length), 10) for length in lengths or LENGTHS]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("page_size", [1, 8, 16, WINDOW, 64])
def test_prompts_around_the_window(request: pytest.FixtureRequest, name: str, page_size: int) -> None:
    """Sliding window edge: a page may divide the window, be the window, or be longer than it."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = edge_prompts()
    engine = engine_for(under_test, page_size=page_size, num_blocks=4096 // page_size)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_batch_tokens", [7, WINDOW - 1, WINDOW, WINDOW + 1, 33])
def test_pieces_around_the_window(request: pytest.FixtureRequest, name: str, max_batch_tokens: int) -> None:
    """Pieces as long as the window, just shorter and just longer, and longer than the ring."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = edge_prompts([23, 24, 48, 49, 70])
    engine = engine_for(under_test, max_batch_tokens=max_batch_tokens)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("page_size", [5, 16])
def test_single_tokens_across_the_edge(request: pytest.FixtureRequest, name: str, page_size: int) -> None:
    """A prompt computed token by token: the ring wraps within the prompt, then within the output."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = edge_prompts([WINDOW + 1, 33])
    engine = engine_for(under_test, page_size=page_size, max_batch_tokens=1)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))


@pytest.mark.parametrize("window", [2, 16, 17])
def test_narrow_windows(window: int) -> None:
    """A window of one token before the own one, of one page, and of a page and a token."""
    under_test = model_of(f"mistral, window {window}", CONFIGS["mistral"], sliding_window=window)
    prompts = edge_prompts([1, 2, 16, 17, 40])
    for max_batch_tokens in (5, 512):
        engine = engine_for(under_test, max_batch_tokens=max_batch_tokens)
        assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))


@pytest.mark.parametrize("name", MODELS)
def test_a_ring_keeps_its_blocks(request: pytest.FixtureRequest, name: str) -> None:
    """However long a request gets, its sliding layers hold the window's pages and no more."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    most: list[int] = []

    def check(manager: Manager) -> None:
        sliding = manager.cache.allocators[-1]
        assert sliding.group.window == WINDOW
        most.extend(sliding.num_owned_blocks(r.request_id) for r in manager.scheduler.active)

    run_all(engine_for(under_test, page_size=5), greedy_requests(edge_prompts([70, 3])), check)
    assert max(most) == -(-WINDOW // 5)


@pytest.mark.parametrize("name", ["llama", *MODELS])
@pytest.mark.parametrize("max_batch_tokens", [20, 512])
def test_uninitialized_memory_is_never_read(request: pytest.FixtureRequest, name: str, max_batch_tokens: int) -> None:
    """Every page that belongs to nobody is NaN, before the first step and again after each: no row notices (law 8)."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = edge_prompts([1, 15, 16, 25, 48, 70])
    engine = engine_for(
        under_test, num_blocks=8, safety_margin=0.0, allow_block_sharing=False, max_batch_tokens=max_batch_tokens
    )
    layout, pages = engine.plan.layout, engine.manager.passes.runner._storage.pages
    read_reserve = slice(READ_RESERVE_CHUNK * layout.pages_per_chunk, (READ_RESERVE_CHUNK + 1) * layout.pages_per_chunk)
    poisoned = torch.isnan(pages.view(torch.float32)).all(dim=1)
    assert poisoned.sum() == len(pages) - layout.pages_per_chunk
    assert (pages[read_reserve] == 0).all()

    def poison(manager: Manager) -> None:
        owned = {
            block + page
            for allocator in manager.cache.allocators
            for request_id in allocator.request_ids
            for block in allocator.block_table(request_id)
            for page in range(allocator.group.pages_per_block)
        }
        reserved = range(read_reserve.start, read_reserve.stop)
        pages[[page for page in range(len(pages)) if page not in owned and page not in reserved]] = 0xFF

    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts), poison))
    assert (pages[read_reserve] == 0).all(), "nobody writes there"
