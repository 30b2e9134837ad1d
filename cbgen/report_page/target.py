"""Where the page goes, and where it must not: nothing but an earlier page is replaced."""

import os
from pathlib import Path

from cbgen.data.rows import parts_path
from cbgen.errors import UsageError
from cbgen.finished_rows import sidecar_of
from cbgen.status import Situation

# How every page begins, see page.html.
FIRST_LINE = b"<!doctype html>"


def output_path(out: str) -> Path:
    """The output of a job as a user names it; a folder may be "." too. Raises UsageError for what names none."""
    path = Path(out).expanduser()
    if path.name in ("", ".."):
        path = path.resolve()
    if not out or not path.name:
        raise UsageError(f"{out!r} names no output; give the --out of a job")
    return path


def page_path(output: Path, asked: str | None) -> Path:
    """Where the user wants the page, or else beside the output. Raises UsageError for a folder, and for a file that is
    there already and is no page."""
    if asked is None:
        return output.with_name(output.name + ".report.html")
    if not asked:
        raise UsageError("--out is empty; name the file of the page")
    page = Path(asked).expanduser()
    try:
        is_folder, is_there = page.is_dir(), page.exists()
    except OSError as error:
        raise UsageError(f"--out {asked}: cannot be looked at: {error.strerror or error}") from error
    if is_folder:
        raise UsageError(f"--out {asked}: is a folder; name the file of the page in it")
    if is_there and not _is_page(page):
        raise UsageError(f"--out {asked}: is there already and is no report; choose another name")
    return page


def refuse_own_files(page: Path, situation: Situation) -> None:
    """Raises UsageError for a page that would replace a file of the job, or lie in a folder where each file counts."""
    output = situation.output
    recorded = (situation.footer or {}).get("files")
    record = sidecar_of(output) or output.path
    own = [output.path, record, parts_path(output.path)]
    if isinstance(recorded, dict):  # an OpenAI batch has a second file, which may lie anywhere
        own += [record.parent / name for name in recorded]
    place, *taken = (Path(os.path.realpath(path)) for path in (page, *own))
    for path in taken:
        if place == path or path in place.parents:
            what = "is a file of the job itself" if place == path else f"lies in {path}, which is the job's own"
            raise UsageError(f"{page}: {what}; choose another name for the page")


def _is_page(path: Path) -> bool:
    """An empty file may become one."""
    try:
        with open(path, "rb") as file:
            return path.is_file() and file.read(len(FIRST_LINE)) in (FIRST_LINE, b"")
    except OSError:
        return False
