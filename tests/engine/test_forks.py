"""Forks, the further samples of a prompt: the prompt is computed once, the tokens are those of separate requests."""

import pytest
from engine.fork_harness import NUM_SAMPLES, assert_as_expected, expected_samples, fork_group, members_of, samples
from engine_harness import Prompt, assert_parity, engine_for, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState
from cbgen.engine.sources import ListSource

PAGE = 16
# One token; around one page; exactly two pages; past the window and into a fourth page.
LENGTHS = [1, PAGE - 1, PAGE, 2 * PAGE, 3 * PAGE + 5]
MODELS = ["llama", "mistral", "gemma3"]


@pytest.fixture(params=["llama", "llama without sharing", "mistral", "gemma3"])
def kind(request: pytest.FixtureRequest) -> tuple[ModelUnderTest, dict[str, bool]]:
    """Each type of cache, with the options of the engine that make it."""
    name, *without = request.param.split(" ", 1)
    return request.getfixturevalue(f"tiny_{name}"), {"allow_block_sharing": not without}


def groups(lengths: list[int], max_tokens: int = 8) -> list[RequestState]:
    return [
        fork_group(random_ids(length, seed=length), max_tokens, first_id=10 * number)
        for number, length in enumerate(lengths)
    ]


def test_forks_are_the_samples_of_separate_requests(kind: tuple[ModelUnderTest, dict[str, bool]]) -> None:
    """n larger than 1 with a one-token prompt works, and with prompts of any length around the pages."""
    under_test, options = kind
    leaders = groups(LENGTHS)
    members = members_of(leaders)
    engine = engine_for(under_test, **options)
    run_all(engine, leaders)
    assert_as_expected(under_test, members)
    assert len({tuple(member.generated_ids) for member in members}) > 3 * len(LENGTHS), "samples differ"
    metrics = engine.manager.metrics
    assert metrics.computed_prompt_tokens == sum(LENGTHS), "each prompt is computed once"
    assert metrics.prefix_hit_tokens == (NUM_SAMPLES - 1) * sum(LENGTHS)
    assert metrics.recomputed_tokens == 0


@pytest.mark.parametrize("length", [1, PAGE, 3 * PAGE + 5])
def test_forks_of_one_token(kind: tuple[ModelUnderTest, dict[str, bool]], length: int) -> None:
    """With max_tokens 1 all samples come out of the pass that computes the prompt."""
    under_test, options = kind
    leader = fork_group(random_ids(length, seed=length), max_tokens=1)
    members = members_of([leader])
    engine = engine_for(under_test, **options)
    run_all(engine, [leader])
    assert_as_expected(under_test, members)
    assert engine.manager.metrics.num_steps == 1
    assert engine.manager.metrics.computed_prompt_tokens == length


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_prompts_in_pieces(kind: tuple[ModelUnderTest, dict[str, bool]], scheduler_type: str) -> None:
    """The forks start when the last piece of the prompt is computed."""
    under_test, options = kind
    leaders = groups(LENGTHS)
    members = members_of(leaders)
    engine = engine_for(under_test, max_batch_tokens=7, scheduler_type=scheduler_type, **options)
    run_all(engine, leaders)
    assert_as_expected(under_test, members)
    assert engine.manager.metrics.computed_prompt_tokens == sum(LENGTHS)


def test_more_forks_than_a_batch_takes(kind: tuple[ModelUnderTest, dict[str, bool]]) -> None:
    """Three fit in a batch: the others wait, at the head of the queue, and take what sharing leaves them."""
    under_test, options = kind
    leaders = groups(LENGTHS)
    members = members_of(leaders)
    engine = engine_for(under_test, max_requests_per_batch=3, **options)
    most: list[int] = []
    run_all(engine, leaders, lambda manager: most.append(manager.scheduler.num_active))
    assert_as_expected(under_test, members)
    assert max(most) == 3
    again = [
        length - (length - 1) // PAGE * PAGE if engine.manager.cache.shares_blocks else length for length in LENGTHS
    ]
    computed = engine.manager.metrics.computed_prompt_tokens
    assert sum(LENGTHS) < computed <= sum(LENGTHS) + (NUM_SAMPLES - 1) * sum(again)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01], ids=["soft reset", "swap"])
def test_a_cache_too_small_for_all_forks(
    kind: tuple[ModelUnderTest, dict[str, bool]], cpu_offload_space: float
) -> None:
    """Some start with their leader, some wait, some have to leave again: the samples are the same."""
    under_test, options = kind
    leaders = groups(LENGTHS)
    members = members_of(leaders)
    engine = engine_for(
        under_test, num_blocks=8, safety_margin=0.0, cpu_offload_space=cpu_offload_space, page_size=PAGE, **options
    )
    run_all(engine, leaders)
    assert_as_expected(under_test, members)
    assert engine.manager.metrics.offloads > 0


def test_forks_respect_the_margin(tiny_llama: ModelUnderTest) -> None:
    """Below the margin no fork starts, like any other prompt; it waits for room and is served."""
    leader = fork_group(random_ids(2 * PAGE + 1, seed=1), max_tokens=8)
    members = members_of([leader])
    engine = engine_for(tiny_llama, num_blocks=8, safety_margin=0.5)
    manager = engine.manager
    manager.pull(ListSource([leader]))
    manager.step()
    assert manager.scheduler.active == members[:3], "3 of 8 blocks, then 4, then 5: that is below one half"
    assert manager.scheduler.waiting == members[3:4]
    assert members[3].forks == members[4:]
    while manager.scheduler.has_work:
        manager.step()
        manager.check_integrity()
    assert_as_expected(tiny_llama, members)


@pytest.mark.parametrize(
    ("length", "allow_block_sharing", "num_blocks"), [(33, True, 7), (32, True, 2), (33, False, 15)]
)
def test_forks_share_the_whole_pages_of_the_prompt(
    tiny_llama: ModelUnderTest, length: int, allow_block_sharing: bool, num_blocks: int
) -> None:
    """Only the page that the next token goes to is copied; without sharing all are."""
    leader = fork_group(random_ids(length, seed=length), max_tokens=8)
    engine = engine_for(tiny_llama, num_blocks=100, allow_block_sharing=allow_block_sharing)
    used: list[float] = []
    run_all(engine, [leader], lambda manager: used.append(round(100 * manager.cache.used_share)))
    assert used[:2] == [0, num_blocks]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_forks_are_what_generate_gives(request: pytest.FixtureRequest, name: str) -> None:
    """Without temperature all samples of a prompt are the same, and the right one."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompt = Prompt(random_ids(37, seed=37), 20)
    leader = fork_group(prompt.token_ids, prompt.max_tokens, temperature=0.0)
    members = members_of([leader])
    run_all(engine_for(under_test), [leader])
    assert_parity(under_test, [prompt] * NUM_SAMPLES, members)


def test_forks_beside_other_requests_with_the_same_prompt(tiny_llama: ModelUnderTest) -> None:
    """The same samples asked for in all ways at once: as forks, as requests before and after them."""
    prompt = random_ids(3 * PAGE + 5, seed=3 * PAGE + 5)
    before, after = samples(prompt, 8, first_id=0), samples(prompt, 8, first_id=200)
    leaders = [fork_group(prompt, 8, first_id=100), fork_group(prompt, 8, first_id=110)]
    members = [*before, *members_of(leaders), *after]
    engine = engine_for(tiny_llama, max_batch_tokens=20)
    run_all(engine, [*before, *leaders, *after])
    assert_as_expected(tiny_llama, members)
    tail = len(prompt) % PAGE
    assert engine.manager.metrics.computed_prompt_tokens == len(prompt) + (2 * NUM_SAMPLES + 1) * tail


def test_forks_of_different_lengths(tiny_gemma3: ModelUnderTest) -> None:
    """A leader that ends with its first token leaves its forks at work; each stops at its own max_tokens."""
    prompt = random_ids(30, seed=30)
    leader = fork_group(prompt, max_tokens=1)
    whole = expected_samples(tiny_gemma3, prompt, 10)
    for number, fork in enumerate(leader.forks):
        fork.params = samples(prompt, max_tokens=3 * number + 1)[number + 1].params
    members = members_of([leader])

    def check(manager: Manager) -> None:
        assert leader.is_finished == (manager.metrics.num_steps > 0)
        assert manager.metrics.computed_prompt_tokens == (len(prompt) if leader.is_finished else 0)

    run_all(engine_for(tiny_gemma3), [leader], check)
    assert [len(member.generated_ids) for member in members] == [1, 1, 4, 7, 10]
    for member, expected in zip(members, whole, strict=True):
        assert member.generated_ids == expected[: len(member.generated_ids)]
