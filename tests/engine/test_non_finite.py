"""A row whose logits are not finite, and those that shared pages with it: it alone fails, whatever it left behind."""

import pytest
from engine.fork_harness import assert_as_expected, fork_group, members_of
from engine_harness import POISON, Prompt, assert_parity, engine_for, greedy_requests, poisoned, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.build import Engine
from cbgen.engine.manager import Manager
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus

PAGE = 16
PREFIX = random_ids(6 * PAGE, seed=1)
FAILING = Prompt([*PREFIX, POISON, 5], 4)


@pytest.fixture(scope="module")
def llama(tiny_llama: ModelUnderTest) -> ModelUnderTest:
    return poisoned(tiny_llama)


def sharing_prompts(count: int) -> list[Prompt]:
    return [Prompt([*PREFIX, 7 + number], 4) for number in range(count)]


def assert_failed(request: RequestState) -> None:
    assert request.finish_reason is FinishReason.ERROR
    assert "not finite" in str(request.error)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 12, "num_blocks": 8, "safety_margin": 0.0}])
def test_a_generated_token_that_turns_the_row_to_nan(
    request: pytest.FixtureRequest, name: str, options: dict[str, object]
) -> None:
    """Rows that come to a certain token fail one token later and keep what they had; the others go on as ever."""
    healthy: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(20 + number, seed=number), 10) for number in range(8)]
    answers = [healthy.generate(prompt.token_ids, 10) for prompt in prompts]
    bad = next(t for ids in answers for t in ids[3:6] if 0 < sum(t in other[:-1] for other in answers) < 8)
    prompts = [Prompt([t if t != bad else 7 for t in prompt.token_ids], 10) for prompt in prompts]
    under_test = poisoned(healthy, token_id=bad)
    num_failed = 0
    for prompt, row in zip(prompts, run_all(engine_for(under_test, **options), greedy_requests(prompts)), strict=True):
        expected = under_test.generate(prompt.token_ids, 10)
        if bad in expected[:-1]:
            assert_failed(row)
            assert row.generated_ids == expected[: expected.index(bad) + 1]
            num_failed += 1
        else:
            assert_parity(under_test, [prompt], [row])
    assert 0 < num_failed < 8


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 20}, {"max_requests_per_batch": 1}, {"max_requests_per_batch": 3}]
)
def test_a_crowd_over_the_prefix_of_a_failing_row(llama: ModelUnderTest, options: dict[str, int]) -> None:
    """The first of many rows with a common prefix fails: all others come out right, and share the prefix again."""
    prompts = [FAILING, *sharing_prompts(20), FAILING, *sharing_prompts(30)[20:]]
    engine = engine_for(llama, **options)
    finished = run_all(engine, greedy_requests(prompts))
    good = [number for number, prompt in enumerate(prompts) if prompt != FAILING]
    assert_failed(finished[0])
    assert_failed(finished[21])
    assert_parity(llama, [prompts[n] for n in good], [finished[n] for n in good])
    assert engine.manager.metrics.computed_prompt_tokens < 10 * len(PREFIX)
    again = greedy_requests(sharing_prompts(40)[30:], first_id=100)
    before = engine.manager.metrics.computed_prompt_tokens
    assert_parity(llama, sharing_prompts(40)[30:], run_all(engine, again))
    # Its pages bear no name since the failure; where nobody had to compute the prefix anew since, one row does now.
    assert engine.manager.metrics.computed_prompt_tokens in (before + 10, before + 10 + len(PREFIX))


def test_pages_of_a_failed_row_are_not_taken_over(llama: ModelUnderTest) -> None:
    """A row that comes after it computes the prefix itself, at once and not after a failure of its own."""
    engine = engine_for(llama)
    run_all(engine, greedy_requests([FAILING]))
    prompts = sharing_prompts(5)
    assert_parity(llama, prompts, run_all(engine, greedy_requests(prompts, first_id=1)))
    assert engine.manager.metrics.soft_resets == 0
    assert engine.manager.metrics.computed_prompt_tokens == len(FAILING.token_ids) + len(PREFIX) + 5


def run_with(engine: Engine, requests: list[RequestState], at_step: int, act) -> list[RequestState]:
    """Acts once, after so many steps."""

    def between_steps(manager: Manager) -> None:
        if manager.metrics.num_steps == at_step and act is not None:
            act(manager)

    return run_all(engine, requests, between_steps)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_a_row_that_took_bad_pages_over_and_was_offloaded(llama: ModelUnderTest, cpu_offload_space: float) -> None:
    """What it got before it left may be bad, also when it comes back with nothing but its own copy."""
    prompts = [FAILING, Prompt([*PREFIX, *random_ids(50, seed=3)], 4)]
    failing, other = greedy_requests(prompts)
    engine = engine_for(llama, max_batch_tokens=110, cpu_offload_space=cpu_offload_space)

    def send_away(manager: Manager) -> None:
        assert failing.is_finished
        assert other.status is RequestStatus.PREFILLING
        assert other.num_computed_tokens > len(PREFIX)
        manager._offload([other])

    run_with(engine, [failing, other], 1, send_away)
    assert_failed(failing)
    assert_parity(llama, prompts[1:], [other])


def test_bad_pages_that_nobody_found_out(llama: ModelUnderTest) -> None:
    """A row writes pages of its own over bad ones and is cancelled before its logits show it; later rows take them."""
    longer = [*PREFIX, *random_ids(3 * PAGE, seed=3)]
    prompts = [FAILING, Prompt([*longer, 9], 4), *(Prompt([*longer, 10 + number], 4) for number in range(3))]
    failing, cancelled, *others = requests = greedy_requests(prompts)
    engine = engine_for(llama, max_batch_tokens=140)

    def cancel(manager: Manager) -> None:
        assert failing.is_finished
        assert cancelled.num_computed_tokens >= len(PREFIX) + PAGE
        assert cancelled.status is RequestStatus.PREFILLING
        manager.cancel(cancelled)

    run_with(engine, requests, 1, cancel)
    assert_failed(failing)
    assert_parity(llama, prompts[2:], others)


def test_forks_over_the_prefix_of_a_failing_row(llama: ModelUnderTest) -> None:
    """All samples of a good prompt come out, though its pages were bad at first."""
    prompt = [*PREFIX, 7, 8]
    leader = fork_group(prompt, 5, first_id=10)
    members = members_of([leader])
    (failing,) = greedy_requests([FAILING])
    run_all(engine_for(llama), [failing, leader])
    assert_failed(failing)
    assert_as_expected(llama, members)
