"""Forks whose leader does not get to the end of its prompt, or not in one go."""

import pytest
from engine.fork_harness import NUM_SAMPLES, assert_as_expected, fork_group, members_of
from engine.integer_world import World
from engine_harness import POISON, engine_for, poisoned, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource

PAGE = 16
PROMPT = random_ids(3 * PAGE + 5, seed=3 * PAGE + 5)
OTHER = random_ids(20, seed=1)


@pytest.mark.parametrize(("length", "max_tokens", "words"), [(600, 4, "600 tokens"), (100, 40, "the whole cache")])
def test_a_refused_leader_takes_its_forks_along(
    tiny_llama: ModelUnderTest, length: int, max_tokens: int, words: str
) -> None:
    """All samples of a prompt that can never fit fail before they start, with the same reason; others complete."""
    leaders = [fork_group(random_ids(length, seed=2), max_tokens), fork_group(OTHER, 4, first_id=10)]
    members = members_of(leaders)
    engine = engine_for(tiny_llama, num_blocks=8)
    run_all(engine, leaders)
    refused = members[:NUM_SAMPLES]
    assert {(member.finish_reason, member.error) for member in refused} == {(FinishReason.ERROR, refused[0].error)}
    assert words in str(refused[0].error)
    assert all(member.timing.first_scheduled_s is None for member in refused)
    assert_as_expected(tiny_llama, members[NUM_SAMPLES:])
    assert engine.manager.metrics.computed_prompt_tokens == len(OTHER)


def test_the_longest_fork_decides_whether_all_fit(tiny_llama: ModelUnderTest) -> None:
    """A group is refused when one of its samples could outgrow the cache."""
    leader = fork_group(PROMPT, 4)
    leader.forks[2].params = SamplingParams(100)
    members = members_of([leader])
    run_all(engine_for(tiny_llama, num_blocks=8), [leader])
    assert len({member.error for member in members}) == 1
    assert "max_tokens (100)" in str(leader.error)


@pytest.mark.parametrize("options", [{}, {"max_requests_per_batch": 2}, {"max_batch_tokens": 20}])
def test_a_failed_leader_takes_its_forks_along(tiny_llama: ModelUnderTest, options: dict[str, int]) -> None:
    """Logits of the prompt that are not finite fail all its samples with the same reason, and nobody else."""
    under_test = poisoned(tiny_llama)
    leaders = [fork_group([*PROMPT, POISON], 4), fork_group(OTHER, 4, first_id=10)]
    members = members_of(leaders)
    engine = engine_for(under_test, **options)
    run_all(engine, leaders)
    assert {member.finish_reason for member in members[:NUM_SAMPLES]} == {FinishReason.ERROR}
    (reason,) = {member.error for member in members[:NUM_SAMPLES]}
    assert "not finite" in str(reason)
    assert_as_expected(under_test, members[NUM_SAMPLES:])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("after_steps", [0, 1, 2], ids=["waiting", "in its prompt", "further in its prompt"])
@pytest.mark.parametrize("num_cancelled", [1, 2, NUM_SAMPLES])
def test_cancelling_the_leader_leaves_the_others(
    request: pytest.FixtureRequest, name: str, after_steps: int, num_cancelled: int
) -> None:
    """Before the prompt is done the leader is cancelled, then who follows it: the rest run, as if they came alone."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    leader, other = fork_group(PROMPT, 6), fork_group(OTHER, 4, first_id=10)
    members, others = members_of([leader]), members_of([other])
    engine = engine_for(under_test, max_batch_tokens=20)

    def cancel(manager: Manager) -> None:
        if manager.metrics.num_steps != after_steps or leader.is_finished:
            return
        for member in members[:num_cancelled]:
            manager.cancel(member)
            manager.check_integrity()
            assert (member.finish_reason, member.error, member.forks) == (FinishReason.ERROR, "cancelled", [])

    run_all(engine, [leader, other], cancel)
    assert_as_expected(under_test, [*members[num_cancelled:], *others])
    assert all(member.generated_ids == [] for member in members[:num_cancelled])
    if num_cancelled < NUM_SAMPLES:
        again = after_steps * 20 % PAGE if engine.manager.cache.shares_blocks else after_steps * 20
        assert engine.manager.metrics.computed_prompt_tokens == len(PROMPT) + len(OTHER) + again


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_cancelling_an_offloaded_leader(tiny_gemma3: ModelUnderTest, cpu_offload_space: float) -> None:
    """It left the cache within its prompt and does not come back; its forks do not miss it."""
    leader = fork_group(PROMPT, 6)
    members = members_of([leader])
    engine = engine_for(tiny_gemma3, max_batch_tokens=20, cpu_offload_space=cpu_offload_space)

    def send_away_and_cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == 2 and not leader.is_finished:
            manager._offload([leader])
            assert leader.is_swapped == (cpu_offload_space > 0)
            manager.cancel(leader)

    run_all(engine, [leader], send_away_and_cancel)
    assert_as_expected(tiny_gemma3, members[1:])
    assert engine.manager.metrics.computed_prompt_tokens == len(PROMPT) + 40


def test_cancelling_a_leader_whose_forks_have_started(tiny_llama: ModelUnderTest) -> None:
    """They own their pages together: the leader's share goes, theirs stay."""
    leader = fork_group(PROMPT, 8)
    members = members_of([leader])

    def cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == 3:
            manager.cancel(leader)

    run_all(engine_for(tiny_llama), [leader], cancel)
    assert leader.num_generated_tokens == 3
    assert_as_expected(tiny_llama, members[1:])


def test_cancelling_forks_that_have_started(tiny_llama: ModelUnderTest) -> None:
    """A fork that runs, and one that waits for room, are cancelled like anybody."""
    leader = fork_group(PROMPT, 8)
    members = members_of([leader])

    def cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == 2:
            assert manager.scheduler.waiting == [members[3]]
            assert members[3].forks == [members[4]]
            for member in (members[1], members[4]):
                manager.cancel(member)

    run_all(engine_for(tiny_llama, max_requests_per_batch=3), [leader], cancel)
    assert [member.error for member in members] == [None, "cancelled", None, None, "cancelled"]
    assert_as_expected(tiny_llama, [members[0], *members[2:4]])


def test_cancelling_a_fork_before_its_leader_is_done(tiny_llama: ModelUnderTest) -> None:
    """It is waiting like others, though not in the queue; the rest of the group goes on without it."""
    leader = fork_group(PROMPT, 8)
    members = members_of([leader])

    def cancel(manager: Manager) -> None:
        if manager.metrics.num_steps == 1:
            manager.cancel(members[2])

    run_all(engine_for(tiny_llama, max_batch_tokens=20), [leader], cancel)
    assert_as_expected(tiny_llama, [*members[:2], *members[3:]])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_a_leader_offloaded_within_its_prompt_keeps_its_forks(
    request: pytest.FixtureRequest, name: str, cpu_offload_space: float
) -> None:
    """It comes back with all of them and runs alone; they start when it has finished, from what is there of it."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    leader = fork_group(PROMPT, 6)
    members = members_of([leader])
    engine = engine_for(under_test, max_batch_tokens=20, cpu_offload_space=cpu_offload_space)

    def send_away(manager: Manager) -> None:
        if manager.metrics.num_steps == 2 and not leader.was_offloaded:
            assert leader.status is RequestStatus.PREFILLING
            manager._offload([leader])
            assert leader.forks == members[1:]

    run_all(engine, [leader], send_away)
    assert_as_expected(under_test, members)
    metrics = engine.manager.metrics
    assert metrics.computed_prompt_tokens + metrics.prefix_hit_tokens == NUM_SAMPLES * len(PROMPT)
    again = len(PROMPT) % PAGE if engine.manager.cache.shares_blocks else len(PROMPT)
    assert metrics.computed_prompt_tokens == len(PROMPT) + again, "the first fork computes for the others"
    kept = 40 if cpu_offload_space else 40 // PAGE * PAGE if engine.manager.cache.shares_blocks else 0
    assert metrics.recomputed_tokens == 40 - kept


def test_no_fork_comes_before_offloaded_requests() -> None:
    """A fork is a new request: it is not let in before the offloaded ones are back or something has finished."""
    world = World(20, max_requests_per_batch=3)
    first, _ = world.add(8, 4)
    leader, *leader.forks = forks = [RequestState(number, [7] * 20, SamplingParams(20)) for number in (2, 3, 4)]
    world.manager.pull(ListSource([leader]))
    world.step()
    world.manager._offload([first])
    while leader.status is not RequestStatus.DECODING:
        world.step()
    assert world.scheduler.waiting == [first, forks[1]]
    assert forks[1].forks == forks[2:]
