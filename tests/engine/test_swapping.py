"""Offloading to the CPU swap pool: what comes back is not computed again, what does not fit is."""

import pytest
from engine.outgrown_harness import LENGTHS, PAGE, options_for, outgrowing_prompts
from engine_harness import NAN_BYTE, Prompt, assert_parity, engine_for, greedy_requests, page_bytes, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.build import Engine
from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState, RequestStatus

MODELS = ["llama", "mistral", "gemma3"]
ROOMY = 0.01  # GiB
SMALL_POOL = {"llama": 12, "mistral": 5, "gemma3": 10}  # pages: enough for some of those that leave


class Transfers:
    """Looks on at the swap pool: how many pages of whom each call moves."""

    def __init__(self, engine: Engine):
        self.stored: list[dict[int, int]] = []
        self.restored: list[dict[int, int]] = []
        pool = engine.manager.offloader._swap_pool
        self._store, self._restore = pool.store, pool.restore
        pool.store, pool.restore = self._watched_store, self._watched_restore

    def _watched_store(self, pages_of: dict[int, list[int]]) -> set[int]:
        stored = self._store(pages_of)
        self.stored.append({request_id: len(pages_of[request_id]) for request_id in stored})
        return stored

    def _watched_restore(self, pages_of: dict[int, list[int]]) -> None:
        self.restored.append({request_id: len(pages) for request_id, pages in pages_of.items()})
        self._restore(pages_of)


def gib(under_test: ModelUnderTest, num_pages: float) -> float:
    """cpu_offload_space for so many pages of one layer."""
    return num_pages * page_bytes(under_test, page_size=PAGE) / 2**30


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("scheduler_type", "options"),
    [("fifo", {}), ("prefill_first", {"max_batch_tokens": 10, "allow_block_sharing": False})],
)
def test_swapped_requests_go_on_where_they_were(
    request: pytest.FixtureRequest, name: str, scheduler_type: str, options: dict[str, object]
) -> None:
    """With a large enough pool nothing is computed twice, also of prompts that were left half done."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = outgrowing_prompts()
    engine = engine_for(
        under_test, cpu_offload_space=ROOMY, scheduler_type=scheduler_type, **options_for(name, **options)
    )
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert metrics.swaps == metrics.offloads > 0
    assert metrics.soft_resets == metrics.recomputed_tokens == 0
    pool = engine.manager.offloader._swap_pool
    assert pool.num_free_slots == pool.num_slots


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_is_what_was_stored(request: pytest.FixtureRequest, name: str) -> None:
    """The pages that a swapped request left are NaN until it is back: nothing of it is read from there."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = outgrowing_prompts()
    engine = engine_for(under_test, cpu_offload_space=ROOMY, allow_block_sharing=False, **options_for(name))
    manager, storage = engine.manager, engine.manager.passes.runner._storage
    offload, spoiled = manager.offloader.offload, []

    def offload_and_spoil(victims: list[RequestState]) -> None:
        pages = [page for v in victims for page in manager.cache.pages_of(v.request_id, v.num_computed_tokens)]
        offload(victims)
        storage.pages[pages] = NAN_BYTE
        spoiled.extend(pages)

    manager.offloader.offload = offload_and_spoil
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    assert spoiled
    assert manager.metrics.recomputed_tokens == 0


@pytest.mark.parametrize("name", MODELS)
def test_several_leave_and_return_in_one_transfer(request: pytest.FixtureRequest, name: str) -> None:
    """Four requests fill four blocks and need a fifth to eighth: two leave in one call, and return in one."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(PAGE, seed=PAGE + n), 6) for n in range(4)]
    engine = engine_for(under_test, page_size=PAGE, num_blocks=4, safety_margin=0.0, cpu_offload_space=ROOMY)
    transfers = Transfers(engine)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    pages = under_test.shape.num_layers
    assert transfers.stored == [{3: pages, 2: pages}]
    assert transfers.restored == [{2: pages, 3: pages}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_slots", [3, 5])
def test_who_does_not_fit_in_the_pool_is_soft_reset(request: pytest.FixtureRequest, name: str, num_slots: int) -> None:
    """Room for three pages is room for one of the two that leave: the newer is swapped, the other starts over."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(PAGE, seed=PAGE + n), 6) for n in range(4)]
    engine = engine_for(
        under_test,
        page_size=PAGE,
        num_blocks=4,
        safety_margin=0.0,
        cpu_offload_space=gib(under_test, num_slots),
        allow_block_sharing=False,
    )
    assert engine.manager.offloader._swap_pool.num_slots == num_slots
    requests = greedy_requests(prompts)
    assert_parity(under_test, prompts, run_all(engine, requests))
    assert [(r.num_swaps, r.num_soft_resets) for r in requests] == [(0, 0), (0, 0), (0, 1), (1, 0)]
    metrics = engine.manager.metrics
    assert (metrics.offloads, metrics.swaps, metrics.soft_resets) == (2, 1, 1)
    assert metrics.recomputed_tokens == PAGE


@pytest.mark.parametrize(("name", "num_slots"), [*((name, 0) for name in MODELS), *SMALL_POOL.items()])
def test_a_small_pool_in_a_long_run(request: pytest.FixtureRequest, name: str, num_slots: int) -> None:
    """A pool of no page at all takes nobody; a small one takes some; all of them finish with the same tokens."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = outgrowing_prompts()
    engine = engine_for(
        under_test,
        cpu_offload_space=gib(under_test, num_slots or 0.5),
        allow_block_sharing=False,
        **options_for(name),
    )
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert metrics.soft_resets > 0
    assert (metrics.swaps > 0) == (num_slots > 0)
    assert metrics.recomputed_tokens > 0
    assert metrics.computed_prompt_tokens == sum(LENGTHS)


def test_a_swapped_request_takes_over_what_the_cache_still_has(tiny_llama: ModelUnderTest) -> None:
    """Pages that others share, or that nobody needed, are matched when it returns; only the rest is copied back."""
    prefix = random_ids(3 * PAGE, seed=9)
    prompts = [Prompt([*prefix, *random_ids(3 + n, seed=n)], 8) for n in range(3)]
    requests = greedy_requests(prompts)
    engine = engine_for(tiny_llama, page_size=PAGE, num_blocks=64, cpu_offload_space=ROOMY)
    transfers = Transfers(engine)

    def send_away(manager: Manager) -> None:
        if manager.metrics.num_steps == 3:
            manager._offload(requests[1:])
            assert [r.is_swapped for r in requests] == [False, True, True]

    run_all(engine, requests, send_away)
    assert_parity(tiny_llama, prompts, requests)
    layers = tiny_llama.shape.num_layers
    computed = [len(prompt.token_ids) + 2 for prompt in prompts[1:]]
    assert transfers.stored == [{n + 1: -(-count // PAGE) * layers for n, count in enumerate(computed)}]
    assert transfers.restored == [{1: layers, 2: layers}], "the last page is not full, so nobody could match it"
    assert engine.manager.metrics.recomputed_tokens == 0


def test_a_swapped_request_whose_tokens_another_computed_in_between(tiny_llama: ModelUnderTest) -> None:
    """All of its pages and more are at hand when it returns: nothing is copied, and it goes on past where it was."""
    prompt = Prompt(random_ids(5 * PAGE + 1, seed=9), 3)
    first, second, other = greedy_requests([prompt, prompt, Prompt([7] * 5, 3)])
    engine = engine_for(tiny_llama, page_size=PAGE, num_blocks=64, cpu_offload_space=ROOMY, max_batch_tokens=PAGE + 6)
    transfers = Transfers(engine)

    def send_away(manager: Manager) -> None:
        if manager.metrics.num_steps == 1:
            assert first.status is RequestStatus.PREFILLING
            manager._offload([first])
            manager.scheduler._waiting.rotate(-1)  # the other goes first, as when this one does not fit for a while
            manager.scheduler._admission_held = False

    run_all(engine, [first, second, other], send_away)
    assert_parity(tiny_llama, [prompt, prompt], [first, second])
    assert first.num_swaps == 1
    assert transfers.restored == [{first.request_id: 0}]


@pytest.mark.parametrize("name", MODELS)
def test_cancelling_a_swapped_request(request: pytest.FixtureRequest, name: str) -> None:
    """Its place in the pool is free at once; the other swapped one returns, and all others finish."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(PAGE, seed=PAGE + n), 6) for n in range(4)]
    requests = greedy_requests(prompts)
    engine = engine_for(under_test, page_size=PAGE, num_blocks=4, safety_margin=0.0, cpu_offload_space=ROOMY)
    pool = engine.manager.offloader._swap_pool

    def cancel(manager: Manager) -> None:
        if requests[2].is_swapped and requests[3].is_swapped:
            taken = pool.num_slots - pool.num_free_slots
            manager.cancel(requests[3])
            assert pool.num_slots - pool.num_free_slots == taken // 2

    run_all(engine, requests, cancel)
    assert [r.error for r in requests] == [None, None, None, "cancelled"]
    assert_parity(under_test, prompts[:3], requests[:3])
    assert pool.num_free_slots == pool.num_slots
