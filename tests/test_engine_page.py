"""docs/engine.md names modules that exist, and its traces over steps are what the real scheduler and cache do."""

import re

import pytest
from engine.integer_world import World
from job_harness import REPOSITORY

from cbgen.engine.scheduler import MAX_OVERTAKEN, MAX_SKIPPED_PER_STEP
from cbgen.engine.step_log import MAX_BINS, SERIES
from cbgen.engine.tail import MIN_ACTIVE_AT_END
from cbgen.row_window import WindowLimits

PAGE = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in PAGE.split("\n## ")[1:]}
NOT_IN_PASS = "·"


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_section_names_modules_that_exist(heading: str) -> None:
    (told,) = re.findall(r"^Modules: (.+?)\.$", SECTIONS[heading], re.MULTILINE | re.DOTALL)
    modules = re.findall(r"`([\w/]+\.py)`", told)
    assert modules
    for module in modules:
        assert (REPOSITORY / "cbgen" / module).is_file(), module


def trace(name: str) -> dict[str, list[str]]:
    """A trace of the page: for each request, in the order of their names, what it computes in each step."""
    (block,) = re.findall(rf"^```\n({name} +step .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    head, *rows = [line.split() for line in block.splitlines()]
    assert head[2:] == [str(step) for step in range(1, len(head) - 1)]
    assert all(len(row) == len(head) - 1 for row in rows)
    return {row[0]: row[1:] for row in rows}


def run_trace(world: World, num_steps: int) -> dict[str, list[str]]:
    """The same of a world, whose requests are A, B, C by number."""
    names = [chr(ord("A") + request.request_id) for request in world.requests]
    plans = [dict(world.step()) for _ in range(num_steps)]
    return {name: [str(plan.get(number, NOT_IN_PASS)) for plan in plans] for number, name in enumerate(names)}


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_prompts_in_pieces(scheduler_type: str) -> None:
    world = World(100, scheduler_type=scheduler_type)
    world.add(3, 3)
    world.step()  # both generate from now on
    world.add(40)
    assert run_trace(world, 5) == trace(scheduler_type)


def test_prefix_sharing() -> None:
    world = World(100)
    world.add(24, 26, 24, prefix=20)
    assert run_trace(world, 4) == trace("sharing")


def test_offloading() -> None:
    """As the page tells it: B leaves once, with two tokens, and is soft-reset."""
    world = World(7, allow_block_sharing=False)
    world.add(7, 7, 7, max_tokens=6)
    assert run_trace(world, 10) == trace("offloading")
    assert [request.num_soft_resets for request in world.requests] == [0, 1, 0]
    assert not world.scheduler.has_work


def test_numbers_of_the_page() -> None:
    """Limits that the page gives are those of the code."""
    for section, number in {
        "Who goes first": f"by {MAX_OVERTAKEN} later ones",
        "The end of a job": f"{MIN_ACTIVE_AT_END} at least",
        "What is measured": f"at most {MAX_BINS:,} stretches",
        "The order of rows": f"up to {WindowLimits().max_requests:,} requests or {WindowLimits().max_prompt_tokens:,} ",
    }.items():
        assert number in " ".join(SECTIONS[section].split())
    assert f"looks at {MAX_SKIPPED_PER_STEP} that do not" in " ".join(SECTIONS["Who goes first"].split())


def test_what_is_measured_is_the_step_log() -> None:
    rows = [line for line in SECTIONS["What is measured"].splitlines() if line.startswith("| ")][2:]
    assert ["steps", *(name for row in rows for name in re.findall(r"`(\w+)`", row))] == list(SERIES)
