"""A few requests that outgrow a small cache, the same ones for every test, and who had to leave it and why."""

from dataclasses import dataclass

from engine_harness import Prompt, random_ids

from cbgen.engine.requests import RequestState

PAGE = 8
LENGTHS = [20, 1, 33, 9, 16, 40, 5, 24, 2, 30]
# Blocks of a cache that holds two or three of these at once, whatever the model keeps of them.
NUM_BLOCKS = {"llama": 12, "mistral": 8, "gemma3": 12}


def outgrowing_prompts(prefix: list[int] | None = None) -> list[Prompt]:
    """They ask for 10 to 26 tokens; `prefix` goes in front of every other one."""
    return [
        Prompt([*((prefix or []) if number % 2 else []), *random_ids(length, seed=50 + number)], 10 + number * 7 % 17)
        for number, length in enumerate(LENGTHS)
    ]


def options_for(name: str, **options: object) -> dict[str, object]:
    return {"page_size": PAGE, "num_blocks": NUM_BLOCKS[name], "safety_margin": 0.0, **options}


@dataclass(frozen=True)
class Choice:
    """One answer of choose_victims."""

    scheduled: list[RequestState]
    stalled: list[RequestState]
    active: list[RequestState]
    victims: list[RequestState]
