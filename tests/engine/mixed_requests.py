"""Requests of every kind side by side, and ways to serve them, for comparing one way of running passes with another."""

import random
from dataclasses import dataclass

from engine_harness import random_ids

from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams

# Page size, and blocks of a cache that the requests below outgrow.
TINY_CACHES = {"llama": (16, 12), "mistral": (5, 14), "gemma3": (16, 9)}
COMMON_PREFIX = [7 + number % 50 for number in range(40)]


@dataclass
class Mix:
    """leaders: what the engine is given. members: those and their forks."""

    leaders: list[RequestState]
    members: list[RequestState]

    def canceller(self, seed: int):
        """Cancels somebody who is unfinished before some of the steps: see run_all."""
        rng = random.Random(seed)

        def between(manager: Manager) -> None:
            unfinished = [one for leader in manager.scheduler.unfinished for one in (leader, *leader.forks)]
            if unfinished and rng.random() < 0.2:
                manager.cancel(rng.choice(unfinished))

        return between


def mixed_requests(seed: int, count: int = 11, with_processors: bool = False) -> Mix:
    """Greedy and drawn rows, some that stop at many tokens, with log-probabilities, scored prompts, forks, and common
    prefixes; with_processors: some whose next token hangs on those before."""
    rng = random.Random(seed)
    mix = Mix([], [])
    for number in range(count):
        ids = random_ids(rng.choice([1, 5, 16, 40, 90]), seed * 100 + number)
        ids = COMMON_PREFIX + ids[:10] if number % 4 == 3 else ids
        params = SamplingParams(rng.randint(1, 24), **_options(rng, with_processors and number % 3 == 0))
        samples = rng.choice([1, 1, 1, 3])
        own = [
            RequestState(len(mix.members) + place, list(ids), params.with_seed(seed + place) if params.seed else params)
            for place in range(samples)
        ]
        mix.members += own
        leader, *leader.forks = own
        mix.leaders.append(leader)
    return mix


def _options(rng: random.Random, with_processors: bool) -> dict[str, object]:
    options: dict[str, object] = {}
    kind = rng.random()
    if kind < 0.25:
        options = {
            "temperature": 1.0,
            "seed": rng.randrange(1, 1 << 30),
            "top_k": rng.choice([0, 5]),
            "top_p": rng.choice([1.0, 0.9]),
        }
    elif kind < 0.45:
        options = {"stop_token_ids": rng.sample(range(3, 320), 60)}
    if with_processors:
        options["repetition_penalty"] = 1.3
    if rng.random() < 0.2:
        options["logprobs"] = 2
    if rng.random() < 0.15:
        options["prompt_logprobs"] = 1
    return options
