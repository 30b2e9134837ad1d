"""What the process of a backend answers, checked: a wrong interpreter may answer anything."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from cbgen.bench.engine_run import ENGINE_FIGURES
from cbgen.bench.latency import Latency
from cbgen.bench.profile import PARTS, Profile
from cbgen.errors import ModelError

LARGEST, POSITIVE = sys.float_info.max, sys.float_info.min


class NoAnswerError(Exception):
    """A line that is none of the answers of peers/serve.py."""


@dataclass(frozen=True)
class Run:
    """One timed run. token_ids, latencies: of each sample; those of a request stand together.

    peak_rss_bytes: the largest resident set of the backend's processes during it. warm_cache: its prefix cache could
    not be emptied before. figures: what the engine said of the run.
    """

    token_ids: list[list[int]]
    wall_s: float
    peak_rss_bytes: int
    latencies: list[Latency | None]
    warm_cache: bool
    figures: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """What a backend could not do. missing: a module that is not installed. expected: its log has nothing to add."""

    text: str
    missing: str | None
    expected: bool


def parsed(line: str) -> dict[str, Any]:
    """All functions here raise NoAnswerError."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NoAnswerError from error
    return _checked(answer, dict)


def failure_in(answer: dict[str, Any]) -> Failure | None:
    if "error" not in answer:
        return None
    missing = answer.get("missing")
    if missing is not None:
        _checked(missing, str)
    return Failure(_checked(answer["error"], str), missing or None, _checked(answer.get("expected", False), bool))


def versions_in(answer: dict[str, Any]) -> dict[str, str]:
    versions = _checked(answer.get("versions"), dict)
    return {name: _checked(version, str) for name, version in versions.items()}


def run_in(answer: dict[str, Any], lengths: list[int]) -> Run:
    """lengths: the tokens of each sample that were asked for. Raises ModelError where others were generated."""
    token_ids = _checked(answer.get("tokens"), list)
    for ids in token_ids:
        if not all(type(token_id) is int for token_id in _checked(ids, list)):
            raise NoAnswerError
    if [len(ids) for ids in token_ids] != lengths:
        raise ModelError("it did not generate as many tokens as it was asked for")
    latencies = _checked(answer.get("latencies"), list)
    if len(latencies) != len(lengths):
        raise NoAnswerError
    return Run(
        token_ids,
        _number(answer.get("wall_s"), POSITIVE),
        int(_number(answer.get("peak_rss_bytes"), 0)),
        [_latency(own, length) for own, length in zip(latencies, lengths, strict=True)],
        _checked(answer.get("warm_cache"), bool),
        _engine_figures(answer.get("figures")),
    )


def profile_in(answer: dict[str, Any]) -> Profile:
    """With all that figures are worked out from."""
    try:
        profile = Profile.from_json(answer["profile"])
    except (KeyError, TypeError) as error:
        raise NoAnswerError from error
    if set(_checked(profile.seconds, dict)) != set(PARTS):
        raise NoAnswerError
    _number(sum(map(_number, profile.seconds.values())), POSITIVE)
    ceilings, work = profile.ceilings, profile.work
    for value in (profile.wall_s, work.num_steps, ceilings.matrix_flops_per_s, ceilings.read_bytes_per_s):
        _number(value, POSITIVE)
    for value in (profile.flops, profile.weight_bytes, profile.kv_bytes, work.query_tokens):
        _number(value, 0)
    return profile


def _latency(own: Any, length: int) -> Latency | None:
    if own is None:
        return None
    first_s = _checked(own, dict).get("ttft_s")
    return Latency(None if first_s is None else _number(first_s), _number(own.get("e2e_s")), length)


def _engine_figures(figures: Any) -> dict[str, Any]:
    """All that the screen shows, or nothing."""
    for name in ENGINE_FIGURES if _checked(figures, dict) else ():
        _number(figures.get(name))
    return figures


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise NoAnswerError
    return value


def _number(value: Any, least: float = -LARGEST) -> Any:
    """One that is finite and fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LARGEST:
        raise NoAnswerError
    return value
