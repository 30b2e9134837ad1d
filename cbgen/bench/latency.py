"""How long single requests take in a benchmark, and how many of them are as fast as was asked."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from cbgen.errors import UsageError

# By the names that vLLM's serving benchmark has for them.
METRICS = ("ttft", "tpot", "e2el")
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
    "p90": lambda values: float(np.percentile(values, 90)),
    "p99": lambda values: float(np.percentile(values, 99)),
}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NAMES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
_EXPECTED = "ttft, tpot and e2e with a time each are expected, such as ttft=2s,tpot=100ms (units us, ms, s, min)"


@dataclass(frozen=True)
class Latency:
    """Of one request: from its arrival to its first token (None: not told) and to its last, in seconds.

    output_tokens: all that it generated.
    """

    ttft_s: float | None
    e2e_s: float
    output_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None without any, or where the first one's time is not told."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Slo:
    """What a request has to keep to, in seconds; None: whatever it is."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, latency: Latency) -> bool | None:
        """None where it depends on a time that is not told. A request of one token keeps to every tpot."""
        if latency.ttft_s is None and not (self.ttft_s is None and self.tpot_s is None):
            return None
        limits = ((own.name, getattr(self, own.name)) for own in fields(self))
        return all(limit is None or (getattr(latency, name) or 0.0) <= limit for name, limit in limits)

    def __str__(self) -> str:
        limits = ((own.name.removesuffix("_s"), getattr(self, own.name)) for own in fields(self))
        return ", ".join(f"{name} {_written(limit)}" for name, limit in limits if limit is not None)


def parse_slo(text: str) -> Slo:
    """From "ttft=2s,tpot=100ms,e2e=1.5s", each at most once. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min)", part.strip().lower())
        if found is None or found[1] not in _NAMES:
            raise UsageError(f"--slo {text}: {part.strip() or 'nothing'} is none; {_EXPECTED}")
        name, seconds = _NAMES[found[1]], float(found[2]) * _UNITS_S[found[3]]
        if name in limits:
            raise UsageError(f"--slo {text}: {found[1]} is there twice")
        if not math.isfinite(seconds):
            raise UsageError(f"--slo {text}: {found[1]} is longer than any number")
        if seconds <= 0:
            raise UsageError(f"--slo {text}: {part.strip()} is met by nothing, more than 0 is expected")
        limits[name] = seconds
    return Slo(**limits)


def latency_figures(latencies: Sequence[Latency | None], slo: Slo | None, wall_s: float) -> dict[str, Any]:
    """Figures of one run, for the JSON: mean_ttft_ms, median_ttft_ms, p90_ttft_ms, p99_ttft_ms, the same of tpot and
    e2el, and the goodput: tokens and requests per second of wall_s, of the requests that meet the SLO alone.

    latencies: of every request, None where the backend does not tell; then all figures are None, as is each that
    depends on a first token whose time is not told, and the goodput without an SLO. tpot is over requests with two
    tokens or more.
    """
    told = [latency for latency in latencies if latency is not None]
    is_told = len(told) == len(latencies) > 0
    has_firsts = is_told and all(latency.ttft_s is not None for latency in told)
    values: dict[str, list[float]] = {
        "ttft": [latency.ttft_s for latency in told if latency.ttft_s is not None] if has_firsts else [],
        "tpot": [latency.tpot_s for latency in told if latency.tpot_s is not None] if has_firsts else [],
        "e2el": [latency.e2e_s for latency in told] if is_told else [],
    }
    figures: dict[str, Any] = {
        f"{statistic}_{metric}_ms": 1e3 * of(values[metric]) if values[metric] else None
        for metric in METRICS
        for statistic, of in STATISTICS.items()
    }
    return figures | _goodput(told if is_told else [], slo, wall_s)


def _goodput(told: list[Latency], slo: Slo | None, wall_s: float) -> dict[str, Any]:
    met = [] if slo is None else [slo.is_met(latency) for latency in told]
    within = [latency for latency, is_met in zip(told, met, strict=False) if is_met]
    is_known = bool(met) and None not in met
    return {
        "slo": None if slo is None else asdict(slo),
        "slo_met_share": len(within) / len(told) if is_known else None,
        "goodput_requests_per_second": len(within) / wall_s if is_known else None,
        "goodput_output_tokens_per_second": sum(one.output_tokens for one in within) / wall_s if is_known else None,
    }


def latency_lines(figures: dict[str, Any]) -> dict[str, str]:
    """The same for the eye, one line per fact. What a backend does not tell is said once, or, where it tells nothing,
    to whoever gave limits."""
    if figures["mean_e2el_ms"] is not None:
        is_told = figures["mean_ttft_ms"] is not None
        lines = {metric: _line_of(figures, metric) for metric in METRICS if is_told or metric != "tpot"}
    elif figures["slo"] is not None:
        lines = {"latency": "this backend does not tell when the tokens of a request came"}
    else:
        return {}
    if figures["slo"] is not None:
        lines["goodput"] = _goodput_line(figures)
    return lines


def _line_of(figures: dict[str, Any], metric: str) -> str:
    if figures[f"mean_{metric}_ms"] is not None:
        written = (f"{name} {_written(figures[f'{name}_{metric}_ms'] / 1e3)}" for name in STATISTICS)
        return ", ".join(written)
    if metric == "tpot":
        return "none: no request has a second token"
    return "this backend does not tell when a request's first token came"


def _goodput_line(figures: dict[str, Any]) -> str:
    limits = str(Slo(**figures["slo"]))
    if figures["slo_met_share"] is None:
        return f"unknown: this backend does not tell whether a request kept to {limits}"
    return (
        f"{figures['goodput_output_tokens_per_second']:,.1f} output tokens/s, "
        f"{figures['goodput_requests_per_second']:.2f} requests/s: "
        f"{figures['slo_met_share']:.1%} of the requests kept to {limits}"
    )


def _written(seconds: float) -> str:
    """In the unit that leaves few digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
