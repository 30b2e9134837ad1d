"""Answers of a backend's process: what is right is understood, and everything else is refused in one way."""

from typing import Any

import pytest

from cbgen.bench.answers import NoAnswerError, failure_in, parsed, profile_in, run_in, versions_in
from cbgen.bench.engine_run import ENGINE_FIGURES
from cbgen.bench.profile import PARTS
from cbgen.errors import ModelError

RUN: dict[str, Any] = {
    "tokens": [[7, 8], [9]],
    "wall_s": 0.5,
    "peak_rss_bytes": 123,
    "latencies": [{"ttft_s": 0.1, "e2e_s": 0.2}, None],
    "warm_cache": False,
    "figures": {},
}
LENGTHS = [2, 1]
PROFILE: dict[str, Any] = {
    "seconds": dict.fromkeys(PARTS, 0.25),
    "wall_s": 2.0,
    "work": {"layers": [[None, 2]], "num_steps": 3, "query_tokens": 9},
    "flops": 1e6,
    "weight_bytes": 1e3,
    "kv_bytes": 0,
    "ceilings": {"dtype": "float32", "matrix_flops_per_s": 1e9, "read_bytes_per_s": 1e9},
    "attention_backend": "sdpa",
    "num_blocks": 4,
}


def test_what_is_right() -> None:
    """Times may be told in part, and figures of the engine or none."""
    run = run_in(RUN, LENGTHS)
    assert (run.token_ids, run.wall_s, run.peak_rss_bytes) == (RUN["tokens"], 0.5, 123)
    first, second = run.latencies
    assert first is not None
    assert (first.ttft_s, first.e2e_s, first.output_tokens) == (0.1, 0.2, 2)
    assert second is None
    assert run_in(RUN | {"figures": dict.fromkeys(ENGINE_FIGURES, 1)}, LENGTHS).figures["num_steps"] == 1
    assert profile_in({"profile": PROFILE}).share("linear") == pytest.approx(1 / len(PARTS))
    assert versions_in({"versions": {"torch": "2"}}) == {"torch": "2"}
    failure = failure_in({"error": "no room", "missing": None, "expected": True})
    assert failure is not None
    assert (failure.text, failure.missing, failure.expected) == ("no room", None, True)
    assert failure_in(RUN) is None


@pytest.mark.parametrize("name", list(RUN))
def test_nothing_of_a_run_may_lack(name: str) -> None:
    """Each of its values is needed."""
    with pytest.raises(NoAnswerError):
        run_in({key: value for key, value in RUN.items() if key != name}, LENGTHS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 5},
        {"tokens": [5, 6]},
        {"tokens": [["a", "b"], [1]]},
        {"tokens": [[True, False], [1]]},
        {"wall_s": 0},
        {"wall_s": -1.0},
        {"wall_s": True},
        {"wall_s": "1"},
        {"wall_s": float("nan")},
        {"wall_s": float("inf")},
        {"wall_s": 10**400},
        {"peak_rss_bytes": 10**400},
        {"peak_rss_bytes": -1},
        {"latencies": [None]},
        {"latencies": [1, None]},
        {"latencies": [{"ttft_s": 0.1}, None]},
        {"latencies": [{"ttft_s": "soon", "e2e_s": 0.2}, None]},
        {"warm_cache": "no"},
        {"figures": [1]},
        {"figures": {"num_steps": 3}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_of_a_run_have_their_types(wrong: dict[str, Any]) -> None:
    """And are such that figures can be worked out from them."""
    with pytest.raises(NoAnswerError):
        run_in(RUN | wrong, LENGTHS)


def test_other_lengths_are_other_work() -> None:
    """That is no nonsense, and is told otherwise."""
    with pytest.raises(ModelError, match="as many tokens"):
        run_in(RUN, [2, 2])


@pytest.mark.parametrize("line", ["", "hello", "[1]", "[" * 100_000, "1" * 10_000], ids=lambda line: line[:8])
def test_lines_that_are_no_object(line: str) -> None:
    """Also those that the reader of JSON gives up on."""
    with pytest.raises(NoAnswerError):
        parsed(line)


@pytest.mark.parametrize(
    "wrong", [{"error": 5}, {"error": "a", "missing": 5}, {"error": None}, {"error": "a", "expected": "b"}]
)
def test_wrong_errors(wrong: dict[str, Any]) -> None:
    """Texts, and a truth value."""
    with pytest.raises(NoAnswerError):
        failure_in(wrong)


@pytest.mark.parametrize("wrong", [{}, {"versions": ["torch"]}, {"versions": {"torch": 2}}])
def test_wrong_versions(wrong: dict[str, Any]) -> None:
    """A text for each name."""
    with pytest.raises(NoAnswerError):
        versions_in(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        {},
        PROFILE | {"more": 1},
        PROFILE | {"seconds": {}},
        PROFILE | {"seconds": dict.fromkeys(PARTS, 0)},
        PROFILE | {"seconds": dict.fromkeys(PARTS, "1")},
        PROFILE | {"wall_s": 0},
        PROFILE | {"work": 5},
        PROFILE | {"work": PROFILE["work"] | {"num_steps": 0}},
        PROFILE | {"ceilings": PROFILE["ceilings"] | {"read_bytes_per_s": 0}},
        PROFILE | {"flops": None},
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_profiles(wrong: Any) -> None:
    """Nothing may lack that is divided by, or is zero."""
    with pytest.raises(NoAnswerError):
        profile_in({"profile": wrong})
