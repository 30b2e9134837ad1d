"""Common prefixes through the real engine: each is computed once, whoever comes when, and the tokens stay the same."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, model_of, random_ids, run_all
from tiny_models import CONFIGS, ModelUnderTest

from cbgen.engine.build import Engine

PAGE = 16
PREFIX = random_ids(6 * PAGE, seed=1)


def prompts_over(prefix: list[int], count: int, longest: int = 5, max_tokens: int = 1) -> list[Prompt]:
    """The prefix, and 1 to `longest` tokens that nobody else has after it."""
    own = [[3 + number % 300, *random_ids(number % longest, seed=number)] for number in range(count)]
    return [Prompt([*prefix, *ids], max_tokens) for ids in own]


def num_own_tokens(prompts: list[Prompt], prefix: list[int]) -> int:
    return sum(len(prompt.token_ids) - len(prefix) for prompt in prompts)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_requests_per_batch": 1}, id="one in a batch"),
        pytest.param({"max_requests_per_batch": 3, "max_batch_tokens": 40}, id="chunked"),
        pytest.param({"max_batch_tokens": 7, "scheduler_type": "prefill_first"}, id="in pieces below a page"),
    ],
)
def test_jobs_with_max_tokens_1_over_a_long_common_prefix(tiny_llama: ModelUnderTest, options: dict[str, int]) -> None:
    """Jobs with max_tokens 1 over a long common prefix: the prefix is computed once."""
    prompts = prompts_over(PREFIX, 40)
    engine = engine_for(tiny_llama, **options)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert metrics.computed_prompt_tokens == len(PREFIX) + num_own_tokens(prompts, PREFIX)
    assert metrics.prefix_hit_tokens == 39 * len(PREFIX)
    assert metrics.recomputed_tokens == 0


def passes_of(engine: Engine) -> list[list[tuple[int, int]]]:
    """Filled while the engine runs: who is in each pass, with how many tokens."""
    schedule, passes = engine.manager.scheduler.schedule, []

    def recorded():
        batch = schedule()
        passes.append([(entry.request.request_id, entry.query_length) for entry in batch.scheduled])
        return batch

    engine.manager.scheduler.schedule = recorded
    return passes


def test_hundreds_of_prompts_with_a_common_prefix_admitted_in_one_step(tiny_llama: ModelUnderTest) -> None:
    """Hundreds of prompts with a common prefix admitted in one step: the prefix is computed once, in that step."""
    prompts = prompts_over(PREFIX, 250, longest=2)
    engine = engine_for(tiny_llama, max_batch_tokens=4096, max_requests_per_batch=300)
    passes = passes_of(engine)
    finished = run_all(engine, greedy_requests(prompts))
    assert_parity(tiny_llama, prompts[::5], finished[::5])
    own = [len(prompt.token_ids) - len(PREFIX) for prompt in prompts]
    assert passes == [[(0, len(PREFIX) + own[0]), *enumerate(own[1:], start=1)]]


def test_hundreds_wait_for_a_prefix_that_is_computed_in_pieces(tiny_llama: ModelUnderTest) -> None:
    """The first one's prompt takes three passes; until its prefix is there nobody else computes a token of it."""
    prompts = prompts_over(PREFIX, 250, longest=2)
    engine = engine_for(tiny_llama, max_batch_tokens=44, max_requests_per_batch=300)
    passes = passes_of(engine)
    finished = run_all(engine, greedy_requests(prompts))
    assert_parity(tiny_llama, prompts[::5], finished[::5])
    assert passes[:2] == [[(0, 44)], [(0, 44)]]
    assert passes[2][:3] == [(0, 9), (1, 2), (2, 1)], "released in the pass that writes the last of it"
    metrics = engine.manager.metrics
    assert metrics.computed_prompt_tokens == len(PREFIX) + num_own_tokens(prompts, PREFIX)


@pytest.mark.parametrize("max_batch_tokens", [512, 200])
def test_a_system_prompt_of_512_tokens(max_batch_tokens: int, show: Callable[[str], None]) -> None:
    """128 prompts with it compute, within 3 %, its 512 tokens and what each has of its own."""
    under_test = model_of("llama of 768 tokens", CONFIGS["llama"], max_position_embeddings=768)
    system = random_ids(512, seed=2)
    prompts = prompts_over(system, 128, longest=60, max_tokens=4)
    engine = engine_for(under_test, page_size=32, max_batch_tokens=max_batch_tokens, num_blocks=None)
    finished = run_all(engine, greedy_requests(prompts))
    assert_parity(under_test, prompts[::16], finished[::16])
    computed = engine.manager.metrics.computed_prompt_tokens
    least = len(system) + num_own_tokens(prompts, system)
    total = sum(len(prompt.token_ids) for prompt in prompts)
    show(f"{computed:,} prompt tokens computed; system prompt once and the rest: {least:,}; all prompts: {total:,}")
    assert least <= computed <= 1.03 * least


def conversations(count: int, seed: int) -> list[list[int]]:
    """Random prompts that grow out of each other, so that their prefixes branch like a tree; none ends with a page."""
    rng = random.Random(seed)
    nodes: list[list[int]] = [[]]
    while len(nodes) <= count:
        parent = rng.choice(nodes)[: rng.randint(0, 200)]
        node = [*parent, *random_ids(rng.randint(1, 60), seed=rng.randrange(1 << 30))][:220]
        if len(node) % PAGE:
            nodes.append(node)
    return nodes[1:]


@pytest.mark.parametrize("max_batch_tokens", [30, 700])
@pytest.mark.parametrize("max_requests_per_batch", [1, 5, 64])
def test_every_block_of_a_tree_of_prompts_is_computed_once(
    tiny_llama: ModelUnderTest, max_batch_tokens: int, max_requests_per_batch: int
) -> None:
    """However prompts branch, a block that several have is computed by one of them, in any batch and order."""
    prompts = [Prompt(token_ids, 1) for token_ids in conversations(60, seed=3)]
    engine = engine_for(
        tiny_llama, max_batch_tokens=max_batch_tokens, max_requests_per_batch=max_requests_per_batch, num_blocks=900
    )
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    owners = Counter(
        tuple(prompt.token_ids[:end]) for prompt in prompts for end in range(PAGE, len(prompt.token_ids), PAGE)
    )
    metrics = engine.manager.metrics
    assert metrics.prefix_hit_tokens == PAGE * sum(count - 1 for count in owners.values()) > 0


def test_the_last_token_of_a_prompt_is_always_computed(tiny_llama: ModelUnderTest) -> None:
    """Identical prompts of whole pages take over all but the last page, which gives the logits."""
    prompts = [Prompt(PREFIX, 3)] * 5
    engine = engine_for(tiny_llama)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    assert engine.manager.metrics.computed_prompt_tokens == len(PREFIX) + 4 * PAGE


def test_the_answer_of_one_request_is_the_prefix_of_the_next(tiny_llama: ModelUnderTest) -> None:
    """A second turn takes over what the first one generated, up to the block that its last pass filled."""
    first = Prompt(random_ids(25, seed=4), 24)
    engine = engine_for(tiny_llama)
    (answered,) = run_all(engine, greedy_requests([first]))
    assert answered.num_generated_tokens == 24, "its last KV is that of token 48, which fills the third page"
    second = Prompt([*answered.token_ids, *random_ids(9, seed=5)], 5)
    assert_parity(tiny_llama, [first, second], [answered, *run_all(engine, greedy_requests([second], first_id=1))])
    assert engine.manager.metrics.prefix_hit_tokens == 3 * PAGE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_models_and_configs_without_sharing(request: pytest.FixtureRequest, name: str) -> None:
    """Sliding and hybrid models, and allow_block_sharing=False: nothing is taken over, everything is computed."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(under_test, allow_block_sharing=name != "llama", max_batch_tokens=300)
    assert not engine.manager.cache.shares_blocks
    prompts = prompts_over(PREFIX, 6)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
    assert engine.manager.metrics.prefix_hit_tokens == 0
    assert engine.manager.metrics.computed_prompt_tokens == sum(len(prompt.token_ids) for prompt in prompts)


@pytest.mark.parametrize("num_blocks", [9, 13])
def test_prefixes_that_come_and_go_in_a_small_cache(tiny_llama: ModelUnderTest, num_blocks: int) -> None:
    """Blocks are taken over, evicted and computed again, some requests leave in between: the tokens stay the same."""
    shared = [random_ids(3 * PAGE, seed=seed) for seed in range(6, 12)]
    prompts = [
        Prompt([*shared[number * 5 % 6], *random_ids(1 + number % 5, seed=number)], 4 + number % 20)
        for number in range(24)
    ]
    engine = engine_for(tiny_llama, num_blocks=num_blocks, safety_margin=0.0, max_requests_per_batch=4)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts)))
    metrics = engine.manager.metrics
    assert metrics.prefix_hit_tokens > 0
    assert metrics.computed_prompt_tokens > 6 * 3 * PAGE + num_own_tokens(prompts, shared[0]), "some were evicted"
