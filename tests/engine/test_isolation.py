"""A forward pass that raises: the guilty request ends as an error, all others come out as if nothing had happened."""

import random

import pytest
from engine.fork_harness import assert_as_expected, assert_sample, fork_group, members_of
from engine_harness import (
    POISON,
    Prompt,
    assert_parity,
    engine_for,
    greedy_requests,
    mixed_prompts,
    raising,
    random_ids,
    refusing,
    run_all,
)
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import FinishReason, RequestState

PAGE = 16
ERROR = f"the forward pass failed: RuntimeError: no token {POISON}"
MODELS = ["llama", "mistral", "gemma3"]
WAYS = {
    "roomy": {},
    "small pieces": {"max_batch_tokens": 20},
    "few at once": {"max_requests_per_batch": 3},
    "prompts first": {"max_batch_tokens": 40, "scheduler_type": "prefill_first"},
    "a small cache": {"num_blocks": 13, "safety_margin": 0.0},
    "a small cache, small pieces": {"num_blocks": 12, "safety_margin": 0.3, "max_batch_tokens": 30},
    "a swap pool": {"num_blocks": 13, "safety_margin": 0.0, "cpu_offload_space": 0.01},
    "nothing shared": {"allow_block_sharing": False},
}


def guilty_prompt(number: int, length: int = 40) -> Prompt:
    """Its poisoned token is the last of the prompt."""
    return Prompt([*random_ids(length - 1, seed=1000 + number), POISON], 5)


def prompts_with_guilty(count: int, places: set[int]) -> list[Prompt]:
    prompts = mixed_prompts(count, 320, longest=60, most=8, seed=3)
    return [guilty_prompt(n) if n in places else prompt for n, prompt in enumerate(prompts)]


def assert_outcome(under_test: ModelUnderTest, prompts: list[Prompt], requests: list[RequestState]) -> None:
    """Those with the poisoned token in their prompt failed before they generated anything; all others are right."""
    for prompt, request in zip(prompts, requests, strict=True):
        if POISON in prompt.token_ids:
            assert (request.finish_reason, request.error) == (FinishReason.ERROR, ERROR)
            assert request.generated_ids == []
        else:
            assert_parity(under_test, [prompt], [request])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("places", [{11}, {0, 7, 8, 19}], ids=["one", "several"])
def test_guilty_ones_in_a_crowd(request: pytest.FixtureRequest, name: str, way: str, places: set[int]) -> None:
    """Of 20 rows the guilty ones fail, each by itself, and everybody else has the tokens of a run without them."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = prompts_with_guilty(20, places)
    engine = engine_for(refusing(under_test), **WAYS[way])
    assert_outcome(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert len(places) <= metrics.forward_failures <= 20 * 2
    assert (metrics.budget_shrinks, metrics.requests_ok) == (0, 20 - len(places))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "a small cache"])
def test_all_are_guilty(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Every row fails by itself, and the engine serves the next ones."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(refusing(under_test), **WAYS[way])
    prompts = [guilty_prompt(number, 10 + number) for number in range(9)]
    assert_outcome(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    after = mixed_prompts(5, 320, longest=50, most=5)
    assert_parity(under_test, after, run_all(engine, greedy_requests(after, first_id=100)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", [0, 70, 119])
def test_guilty_in_a_later_piece_of_a_long_prompt(request: pytest.FixtureRequest, name: str, place: int) -> None:
    """The pieces before it went well beside the decodes of others, which go on."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    ids = random_ids(120, seed=5)
    prompts = [
        *mixed_prompts(7, 320, longest=40, most=12, seed=6),
        Prompt([*ids[:place], POISON, *ids[place + 1 :]], 4),
    ]
    engine = engine_for(refusing(under_test), max_batch_tokens=50)
    assert_outcome(under_test, prompts, run_all(engine, greedy_requests(prompts)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "small pieces", "a small cache", "a swap pool"])
def test_guilty_by_a_generated_token(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """A row that comes to a certain token fails there and keeps what it had; the others go on."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = [Prompt(random_ids(20 + number, seed=number), 10) for number in range(12)]
    answers = [under_test.generate(prompt.token_ids, 10) for prompt in prompts]
    bad = next(t for ids in answers for t in ids[3:6] if 0 < sum(t in other[:-1] for other in answers) < 12)
    prompts = [Prompt([t if t != bad else 7 for t in prompt.token_ids], 10) for prompt in prompts]
    requests = run_all(engine_for(refusing(under_test, bad), **WAYS[way]), greedy_requests(prompts))
    num_failed = 0
    for prompt, row in zip(prompts, requests, strict=True):
        expected = under_test.generate(prompt.token_ids, 10)
        if bad in expected[:-1]:
            assert row.error == ERROR.replace(str(POISON), str(bad))
            assert row.generated_ids == expected[: expected.index(bad) + 1]
            num_failed += 1
        else:
            assert_parity(under_test, [prompt], [row])
    assert 0 < num_failed < 12


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 20}, {"max_requests_per_batch": 3}, {"num_blocks": 10}])
def test_a_crowd_over_the_prefix_of_a_guilty_row(tiny_llama: ModelUnderTest, options: dict[str, int]) -> None:
    """Nobody takes over what the failed pass left in the pages of a common prefix, whoever wrote it."""
    prefix = random_ids(4 * PAGE, seed=1)
    guilty = Prompt([*prefix, 5, POISON], 4)
    good = [Prompt([*prefix, 7 + number], 4) for number in range(20)]
    prompts = [guilty, *good[:12], guilty, *good[12:]]
    engine = engine_for(refusing(tiny_llama), **options)
    assert_outcome(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    again = run_all(engine, greedy_requests(good, first_id=100))
    assert_parity(tiny_llama, good, again)
    assert engine.manager.metrics.prefix_hit_tokens > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "small pieces", "few at once", "a swap pool"])
def test_samples_of_a_guilty_prompt(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Each of them fails in its own right; samples of other prompts come out."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    good, guilty = fork_group(random_ids(37, seed=2), 5), fork_group(guilty_prompt(0).token_ids, 5, first_id=10)
    rows = members_of([good, guilty])
    engine = engine_for(refusing(under_test), **WAYS[way])
    run_all(engine, [good, guilty])
    if way == "roomy":  # once together with the good ones, and then each of the five alone
        assert engine.manager.metrics.forward_failures == 6
    assert [row.error for row in rows[5:]] == [ERROR] * 5
    assert_as_expected(under_test, rows[:5])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "few at once", "a small cache", "a swap pool"])
def test_a_sample_that_comes_to_a_bad_token(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """It fails alone: the other samples of its prompt, the first one included, go on."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompt = [t for t in random_ids(37, seed=2) if t < 200]
    plain = members_of([fork_group(prompt, 6)])
    run_all(engine_for(under_test), [plain[0]])
    tails = [row.generated_ids[:-1] for row in plain]
    bad = next(t for ids in tails for t in ids if t >= 200 and sum(t in other for other in tails) == 1)
    leader = fork_group(prompt, 6)
    rows = members_of([leader])
    run_all(engine_for(refusing(under_test, bad), **WAYS[way]), [leader])
    failed = [number for number, row in enumerate(rows) if row.error]
    assert len(failed) == 1
    assert rows[failed[0]].generated_ids[-1] == bad
    for row in rows:
        if row.error is None:
            assert_sample(under_test, row)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "few at once", "a small cache"])
def test_a_sample_that_cannot_be_drawn(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """The pass fails after forks have begun in it: the one that cannot be drawn ends, and the others come out."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    leaders = [fork_group(random_ids(37 + k, seed=2 + k), 5, first_id=10 * k) for k in range(3)]
    rows = members_of(leaders)
    rows[7].params = rows[7].params.with_seed("none")  # type: ignore[arg-type]
    run_all(engine_for(under_test, **WAYS[way]), leaders)
    failed = rows.pop(7)
    assert str(failed.error).startswith("the forward pass failed: TypeError")
    assert failed.generated_ids == []
    assert_as_expected(under_test, rows)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["roomy", "a small cache", "a swap pool"])
@pytest.mark.parametrize("seed", [1, 2])
def test_cancels_during_the_search(request: pytest.FixtureRequest, name: str, way: str, seed: int) -> None:
    """Suspects, guilty ones and others are cancelled while groups are tried: the rest comes out."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    rng = random.Random(seed)
    prompts = prompts_with_guilty(20, {2, 13})
    requests = greedy_requests(prompts)
    cancelled: set[int] = set()

    def cancel(manager: Manager) -> None:
        if manager._recovery.suspects and rng.random() < 0.4:
            turn = manager._recovery.suspects.turn
            suspected = [r for r in manager.scheduler.unfinished if turn is None or r.request_id in turn]
            chosen = rng.choice(suspected if rng.random() < 0.7 else list(manager.scheduler.unfinished))
            cancelled.add(chosen.request_id)
            manager.cancel(chosen)

    run_all(engine_for(refusing(under_test), **WAYS[way]), requests, cancel)
    assert cancelled
    kept = [number for number in range(20) if number not in cancelled]
    assert_outcome(under_test, [prompts[n] for n in kept], [requests[n] for n in kept])


def test_a_cancelled_group_holds_nobody_up(tiny_llama: ModelUnderTest) -> None:
    """All of the group that is being tried are cancelled: the next one has its turn."""
    prompts = prompts_with_guilty(20, {2, 13})
    requests = greedy_requests(prompts)

    def cancel(manager: Manager) -> None:
        turn = manager._recovery.suspects.turn
        if manager.metrics.forward_failures == 2 and turn is not None:
            for request in requests:
                if request.request_id in turn and not request.is_finished:
                    manager.cancel(request)

    run_all(engine_for(refusing(tiny_llama)), requests, cancel)
    kept = [number for number in range(20) if requests[number].error != "cancelled"]
    assert 0 < len(kept) < 20
    assert_outcome(tiny_llama, [prompts[n] for n in kept], [requests[n] for n in kept])


def test_what_is_told(tiny_llama: ModelUnderTest) -> None:
    """One line when a search begins, and none while it goes on."""
    told: list[str] = []
    engine = engine_for(refusing(tiny_llama), told.append, max_batch_tokens=2048)
    run_all(engine, greedy_requests(prompts_with_guilty(20, {2, 13})))
    assert told == [f"{ERROR}: its 20 requests are tried in smaller groups"]


def test_a_failure_of_no_row(tiny_llama: ModelUnderTest) -> None:
    """A pass that fails because of its size and no row's fault: all rows come out, since smaller groups pass."""
    under_test = raising(tiny_llama, lambda ids: ValueError("too many") if ids.shape[1] > 70 else None)
    prompts = mixed_prompts(20, 320, longest=60, most=8, seed=3)
    requests = run_all(engine_for(under_test), greedy_requests(prompts))
    assert_parity(tiny_llama, prompts, requests)
