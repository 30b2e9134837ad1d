"""Random engines, random requests: prefixes, forks, cancels, swaps, soft resets and NaN, all at once."""

import random

import pytest
from engine.fork_harness import assert_sample, fork_group, members_of
from engine_harness import POISON, engine_for, poisoned, random_ids, run_all

from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState

MAX_TOKENS = 9
PREFIXES = [random_ids(length, seed=length) for length in (0, 5, 16, 23)]
FEW, MANY = range(1), [pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40)]


def random_options(rng: random.Random) -> dict[str, object]:
    return {
        "page_size": (page_size := rng.choice([4, 5, 8])),
        "num_blocks": rng.choice([60, 60, 75, 600]) // page_size,
        "max_batch_tokens": rng.choice([3, 8, 20, 200]),
        "max_requests_per_batch": rng.choice([3, 8, 64]),
        "scheduler_type": rng.choice(["fifo", "prefill_first"]),
        "safety_margin": rng.choice([None, 0.0, 0.0, 0.4]),
        "allow_block_sharing": rng.random() < 0.7,
        "cpu_offload_space": rng.choice([0.0, 0.0, 0.00001, 0.01]),
    }


def random_groups(rng: random.Random, share_failing: float) -> list[RequestState]:
    """One or five samples of each of a few prompts, which may share a prefix and may be poisoned."""
    groups = []
    for number in range(7):
        prompt = [*rng.choice(PREFIXES), *random_ids(rng.randint(1, 20), seed=rng.randrange(30))]
        if rng.random() < share_failing:
            prompt.insert(rng.randint(len(prompt) // 2, len(prompt)), POISON)
        leader = fork_group(prompt, MAX_TOKENS, first_id=10 * number)
        if rng.random() < 0.6:
            leader.forks = []
        groups.append(leader)
    return groups


@pytest.mark.parametrize("seed", [*FEW, *MANY])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mistral", "tiny_gemma3", "tiny_coarse"])
def test_everything_at_once(request: pytest.FixtureRequest, name: str, seed: int) -> None:
    """Laws and accounts hold after every step, nobody is lost, and each sample is what it is on its own."""
    under_test = poisoned(request.getfixturevalue(name))
    rng = random.Random(seed * 4 + len(name))
    share_cancelled = rng.choice([0.0, 0.05])
    leaders = random_groups(rng, share_failing=rng.choice([0.0, 0.3]))
    members = members_of(leaders)
    cancelled: list[RequestState] = []

    def cancel(manager: Manager) -> None:
        present = members_of([*manager.scheduler.active, *manager.scheduler.waiting])
        if present and rng.random() < share_cancelled:
            cancelled.append(rng.choice(present))
            manager.cancel(cancelled[-1])

    run_all(engine_for(under_test, **random_options(rng)), leaders, cancel)
    for member in members:
        if member not in cancelled:
            assert_sample(under_test, member)
            failed = POISON in member.token_ids[: member.num_prompt_tokens + MAX_TOKENS - 1]
            assert (member.error is not None) == failed
