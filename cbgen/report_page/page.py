"""The page put together: what is shown, as text and tables that stand alone, and as data that its script draws from."""

import base64
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

import cbgen
from cbgen.data.files import ADVICE, publish_text
from cbgen.data.runs import Run
from cbgen.engine.step_log import PHASES
from cbgen.errors import OutputError, UsageError
from cbgen.report_page import wording
from cbgen.report_page.active_time import ActiveTime, active_time
from cbgen.report_page.course_charts import course_charts, phase_totals
from cbgen.report_page.descriptions import describe_close, describe_course, describe_lives
from cbgen.report_page.facts import cards, tpot_ms, ttft
from cbgen.report_page.histograms import histogram
from cbgen.report_page.lives import lives
from cbgen.report_page.record import checked
from cbgen.report_page.row_lists import row_lists
from cbgen.report_page.row_table import RowTable, read_rows
from cbgen.report_page.runs import course_of, generating_span, runs_of
from cbgen.report_page.target import refuse_own_files
from cbgen.status import DAMAGED, RUNNING, JobStatus, Situation, look, read_status

HERE = Path(__file__).parent
MAX_COLUMNS = 240
# What a script in a page must not hold, in a form that JSON reads the same.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_report(out: Path, report: Path, notify: Callable[[str], None]) -> None:
    """Publishes the page of the job at `out`, finished or not.

    notify: told what the page leaves out. Raises UsageError where there is nothing to show, or when the page would
    replace a file of the job; InputError for an output that cannot be read, OutputError for a page that cannot be.
    """
    while True:
        try:
            situation = look(str(out))
            refuse_own_files(report, situation)
            text = _page(checked(situation))
            break
        except FileNotFoundError:
            continue  # the job has deleted its parts meanwhile: it is done, or begun anew
    if situation.folder.unreadable:
        parts = wording.plural(len(situation.folder.unreadable), "part")
        notify(f"{parts} cannot be read: left out of the report, and to be run again")
    try:
        publish_text(report, text)
    except OutputError as error:  # whose advice is for a job
        raise OutputError(f"{str(error).removesuffix(f'; {ADVICE}')}; choose another file for the page") from error


def _page(situation: Situation) -> str:
    out = situation.output.path
    if situation.state == DAMAGED:
        raise UsageError(f"{out}: is no output that cbgen finished; `cbgen verify` tells what is wrong with it")
    if situation.manifest is None and situation.footer is None and not situation.folder.part_paths():
        raise UsageError(f"{out}: the job has published nothing yet; make the report later")
    table = read_rows(situation)
    runs = runs_of(situation)
    order = table.by_arrival()
    at_work = active_time((span for run in runs if (span := generating_span(run))), table, order)
    context = _facts(situation, table, runs) | _charts(table, runs, order, at_work, situation.footer is not None)
    context["cards"] = cards(table, at_work, runs)
    context["slow_rows"], context["failures"] = row_lists(situation, table)
    return render(context)


def _facts(situation: Situation, table: RowTable, runs: list[Run]) -> dict[str, Any]:
    """What stands in words and tables."""
    manifest, footer = situation.manifest, situation.footer or {}
    status = None if manifest is None else read_status(str(situation.output.path))[0]
    fingerprint = footer.get("fingerprint") if manifest is None else manifest.fingerprint
    config = footer.get("config", {})
    engine = config.get("engine") or next((run["engine"] for run in reversed(runs) if run["engine"]), None)
    counts = np.bincount(table.rows["reason"], minlength=len(table.reasons))
    num_rows = max(1, len(table.rows))
    return {
        "title": situation.output.path.name,
        "model": (fingerprint or {}).get("model"),
        "state": situation.state,
        "status": status,
        "done_share": _done_share(status),
        "when": wording.span(_first_moment(table, runs), table.last_finish),
        "written": time.time(),
        "version": cbgen.__version__,
        "runs": [_told_run(run, situation.state == RUNNING and run is runs[-1]) for run in runs],
        "reasons": sorted(
            ((name, int(n), n / num_rows) for name, n in zip(table.reasons, counts, strict=True)),
            key=lambda reason: -reason[1],
        ),
        "configuration": {
            "Options that change results": _as_text(fingerprint),
            "Options that do not": _as_text(config if manifest is None else manifest.settings, fingerprint),
            "Engine": _as_text(engine),
            "Versions": _as_text(footer.get("versions")),
        },
    }


def _as_text(options: dict[str, Any] | None, known: dict[str, Any] | None = None) -> dict[str, str]:
    """Options with their values, but for those that are known already and those of the engine."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in (options or {}).items()
        if name not in (known or {}) and name != "engine"
    }


def _charts(
    table: RowTable, runs: list[Run], order: np.ndarray, at_work: ActiveTime, is_finished: bool
) -> dict[str, Any]:
    """What the script draws from, and what stands beside its charts."""
    course = course_of(runs, at_work, MAX_COLUMNS)
    drawn = {} if course is None else course_charts(course, runs)
    ok = ~table.is_failed
    histograms = {
        "prompt_tokens": histogram(table.rows["prompt_tokens"][ok]),
        "completion_tokens": histogram(table.rows["completion_tokens"][ok]),
        "ttft": histogram(ttft(table)),
        "tpot": histogram(tpot_ms(table)),
        "latency": histogram(table.rows["latency"][ok]),
    }
    seen = lives(table, order, at_work)
    return {
        "data": {
            "time": at_work.as_json(),
            "lives": seen,
            # Of a job that is not finished a row has no place yet.
            "numbered": is_finished,
            "course": drawn or None,
            "histograms": histograms,
        },
        "histograms": histograms,
        "has_lives": seen is not None,
        "has_bars": seen is not None and "bars" in seen,
        "has_failed_bars": seen is not None and any(bar[-1] for bar in seen.get("bars", [])),
        "about_lives": describe_lives(table, order, at_work),
        "about_close": "" if seen is None or "close" not in seen else describe_close(seen["close"], len(order)),
        "course": drawn,
        "about_course": {} if course is None else describe_course(course, drawn),
        "phase_keys": [(name, name) for name in PHASES],
        "phases": [] if course is None else phase_totals(course),
    }


def render(context: dict[str, Any]) -> str:
    """The page as one text that needs nothing else and may load nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    for name in ("count", "rate", "percent", "duration", "size", "moment", "plural"):
        environment.filters[name] = getattr(wording, name)
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    text = environment.get_template("page.html").render(
        context,
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=Markup(embedded_json(context["data"])),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON may hold halves of characters


def embedded_json(value: Any) -> str:
    """JSON that ends no element of a page, whatever texts are in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _hash(text: str) -> str:
    """As a Content-Security-Policy names a text that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _done_share(status: JobStatus | None) -> float | None:
    return min(1.0, status.done / status.rows_total) if status and status.rows_total else None


def _first_moment(table: RowTable, runs: list[Run]) -> float | None:
    """When the first run began, or the first request arrived, or else the first row finished."""
    arrival = table.rows["arrival"]
    first = float(np.nanmin(arrival)) if len(arrival) and not np.isnan(arrival).all() else table.first_finish
    moments = [*(run["started"] for run in runs), *([] if first is None else [first])]
    return min(moments, default=None)


def _told_run(run: Run, is_at_work: bool) -> dict[str, Any]:
    return {
        "started": run["started"],
        "length_s": run["ended"] - run["started"],
        "how": run["how"] or ("at work" if is_at_work else "killed"),
        "shard": run["shard"],
        "load_s": run["load_s"],
        "rows": run["rows"],
        "output_rate": run["summary"].get("output_tokens_per_second"),
        "mean_batch": run["summary"].get("mean_batch_requests"),
    }
