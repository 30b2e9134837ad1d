"""The gate: today's throughput against that of an earlier report of the same work."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbgen.errors import UsageError, first_line

RATE = "output_tokens_per_second"
# Values of a report that make the work; of those in "workload", the ones that say most come first.
WORK = ("model_identity", "dtype", "device", "quantization")
WORKLOAD = ("dataset_name", "requests", "n", "prompt_tokens", "output_tokens", "seed", "requests_digest")
# Values that change how fast it is done, and what they are called.
CIRCUMSTANCES = {"backend": "another backend", "engine": "other engine options", "hardware": "other hardware"}
SHOWN, SHOWN_CHARS = 4, 80


class Baseline:
    """A report of an earlier benchmark."""

    def __init__(self, path: Path):
        """Raises UsageError for a file that is none."""
        self._path = path
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(f"--baseline {path}: no such file") from error
        except OSError as error:
            raise UsageError(f"--baseline {path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--baseline {path}: not a readable report: {first_line(error)}") from error
        rate: Any = report.get(RATE) if isinstance(report, dict) else None
        if not _is_rate(rate) or not isinstance(report.get("workload"), dict):
            raise UsageError(f"--baseline {path}: not a report of cbgen bench --output-json: it has no {RATE}")
        self._report: dict[str, Any] = report
        self._rate = float(rate)

    def compare(self, settings: dict[str, Any]) -> list[str]:
        """Warnings about what was not the same. settings: what is about to be measured, with the keys of a report.

        Raises UsageError when the work was another.
        """
        there, here = self._report, settings
        differing = [*_differing(there, here, WORK), *_differing(there["workload"], here["workload"], WORKLOAD)]
        if differing:
            name, theirs, ours = differing[0]
            shown = _shown(name.replace("_", " "), theirs, ours)
            raise UsageError(f"--baseline {self._path}: compares other work: {shown}")
        return [
            warning
            for name, what in CIRCUMSTANCES.items()
            for warning in self._warnings(what, _named(name, there.get(name)), _named(name, here[name]))
        ]

    def compare_versions(self, versions: dict[str, str]) -> list[str]:
        """The same of versions, which backends tell when they are loaded."""
        return self._warnings("other versions", _named("versions", self._report.get("versions")), versions)

    def verdict(self, rate: float, max_regression: float) -> tuple[str, str | None]:
        """What to print, and the line about a regression if there is one. rate: median output tokens per second."""
        share = rate / self._rate
        line = (
            f"{'baseline':<10}{share:.2f} of {self._path}'s throughput ({rate:,.1f} against {self._rate:,.1f} output "
            "tokens/s)"
        )
        if share >= 1 - max_regression:
            return line, None
        return line, (
            f"slower than --baseline {self._path} by more than {max_regression:.0%}: {rate:,.1f} output tokens/s, "
            f"there it was {self._rate:,.1f}"
        )

    def _warnings(self, what: str, there: dict[str, Any], here: dict[str, Any]) -> list[str]:
        """One line, if anything differs, or none."""
        differing = [_shown(*found) for found in _differing(there, here, tuple(here))]
        if not differing:
            return []
        more = f", and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        return [f"--baseline {self._path}: {what}: {'; '.join(differing[:SHOWN])}{more}"]


def _is_rate(value: Any) -> bool:
    """Whether a value from JSON, which may be NaN or a whole number of any size, is a speed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _shown(name: str, theirs: Any, ours: Any) -> str:
    there, here = (" ".join(str(value).split())[:SHOWN_CHARS] for value in (theirs, ours))
    return f"{name}: {there} there, {here} here"


def _differing(there: dict[str, Any], here: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value there, value here)."""
    for name in names:
        theirs = there.get(name)
        if name == "dataset_name" and isinstance(theirs, str):
            theirs = theirs.replace("_", "-")  # as vLLM writes it
        if theirs != here[name]:
            yield name, theirs, here[name]


def _named(name: str, value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {name: value}
