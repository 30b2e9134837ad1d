"""Requests that outgrow the cache of a real model: who leaves, when, and that nothing is lost by it."""

import pytest
from engine.outgrown_harness import LENGTHS, PAGE, Choice, options_for, outgrowing_prompts
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager

MODELS = ["llama", "mistral", "gemma3"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("scheduler_type", "options"),
    [
        ("fifo", {}),
        ("prefill_first", {"max_batch_tokens": 10}),
        ("fifo", {"safety_margin": 0.15, "allow_block_sharing": False}),
    ],
)
def test_generation_that_outgrows_the_cache_while_others_run(
    request: pytest.FixtureRequest, name: str, scheduler_type: str, options: dict[str, object]
) -> None:
    """Generation that outgrows the cache while others run: offloaded or reset, finishes, same tokens."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = outgrowing_prompts()
    engine = engine_for(under_test, scheduler_type=scheduler_type, **options_for(name, **options))
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert metrics.soft_resets == metrics.offloads > 0
    assert metrics.computed_prompt_tokens + metrics.prefix_hit_tokens == sum(LENGTHS)
    if not engine.manager.cache.shares_blocks:
        assert metrics.recomputed_tokens > 0
        assert metrics.prefix_hit_tokens == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_the_two_situations_that_make_requests_leave(
    request: pytest.FixtureRequest, name: str, cpu_offload_space: float, choices: list[Choice]
) -> None:
    """With a batch planned stalled requests leave; without one, any but the last, and the same step plans again."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(length, seed=length + n), 12) for n, length in enumerate([PAGE, PAGE, PAGE, PAGE - 1])]
    engine = engine_for(
        under_test, page_size=PAGE, num_blocks=4, safety_margin=0.0, cpu_offload_space=cpu_offload_space
    )
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    ids = [[[r.request_id for r in part] for part in (c.scheduled, c.stalled, c.victims)] for c in choices]
    # One block is free for each that leaves. The newest of the stalled go until the oldest finds room beside the batch.
    assert ids[0] == [[3], [0, 1, 2], [2, 1]]
    # The two that are left reach the end of a page in the same step.
    assert ids[1] == [[], [0, 3], [3]]
    assert engine.manager.metrics.num_steps < 60


@pytest.mark.parametrize("name", MODELS)
def test_who_leaves_is_among_the_newest(request: pytest.FixtureRequest, name: str, choices: list[Choice]) -> None:
    """Whenever the manager asks: of those who may leave the newest do, and one active request stays."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(under_test, **options_for(name))
    run_all(engine, greedy_requests(outgrowing_prompts()))
    assert any(choice.victims for choice in choices)
    for choice in choices:
        candidates = choice.stalled if choice.scheduled else choice.active
        newest = sorted(candidates, key=lambda member: member.request_id, reverse=True)
        assert choice.victims == newest[: len(choice.victims)]
        assert len(choice.victims) < len(choice.active)
    assert engine.manager.metrics.offloads == sum(len(choice.victims) for choice in choices)


def test_scheduled_requests_keep_their_cache(tiny_llama: ModelUnderTest, choices: list[Choice]) -> None:
    """In the step in which somebody leaves, all that were in its batch are active afterwards, or finished."""
    engine = engine_for(tiny_llama, **options_for("llama"))
    checked: list[int] = []

    def check(manager: Manager) -> None:
        if choices and choices[-1].scheduled and choices[-1].victims:
            stayed = [member for member in choices[-1].scheduled if not member.is_finished]
            assert all(member in manager.scheduler.active for member in stayed)
            assert not any(member in manager.scheduler.active for member in choices[-1].victims)
            checked.append(len(stayed))
            choices.clear()

    run_all(engine, greedy_requests(outgrowing_prompts()), check)
    assert sum(checked) > 0


def test_what_finished_in_a_step_is_given_to_the_stalled_first(
    tiny_llama: ModelUnderTest, choices: list[Choice]
) -> None:
    """A stalled request stays if somebody who finished in the same step left enough for it."""
    prompts = [Prompt(random_ids(PAGE, seed=1), 8), Prompt(random_ids(PAGE - 1, seed=2), 2)]
    engine = engine_for(tiny_llama, page_size=PAGE, num_blocks=2, safety_margin=0.0)
    requests = greedy_requests(prompts)
    assert_parity(tiny_llama, prompts, run_all(engine, requests))
    assert [(choice.scheduled, choice.stalled, choice.victims) for choice in choices] == [
        ([requests[1]], [requests[0]], [])
    ]
    assert engine.manager.metrics.offloads == 0


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_fill_the_whole_cache_each(request: pytest.FixtureRequest, name: str) -> None:
    """Each alone takes all there is; they come out one after another, as if they had been alone."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(39 - n, seed=n), 48 + 1 - 39 + n) for n in range(3)]
    engine = engine_for(under_test, page_size=PAGE, num_blocks=48 // PAGE, safety_margin=0.0)
    finished = run_all(engine, greedy_requests(prompts))
    assert_parity(under_test, prompts, finished)


def test_a_soft_reset_takes_its_own_pages_over(tiny_llama: ModelUnderTest) -> None:
    """With sharing, what nobody else needed in between is not computed again."""
    prompts = [Prompt(random_ids(4 * PAGE + 3, seed=n), 8) for n in (1, 2)]
    requests = greedy_requests(prompts)
    engine = engine_for(tiny_llama, page_size=PAGE, num_blocks=64)

    def send_away(manager: Manager) -> None:
        if manager.metrics.num_steps == 3:
            manager._offload([requests[1]])

    run_all(engine, requests, send_away)
    assert_parity(tiny_llama, prompts, requests)
    metrics = engine.manager.metrics
    assert metrics.soft_resets == 1
    assert metrics.recomputed_tokens == (4 * PAGE + 3 + 2) % PAGE
    assert metrics.prefix_hit_tokens == 0, "its prompt was computed by itself, and is counted as such"
