"""The two files of an OpenAI batch held against each other and against the requests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cbgen.data.openai_batch import ID_COLUMN
from cbgen.data.rows import PromptRow
from cbgen.finished_rows import json_records

LINE_KEYS = ["id", ID_COLUMN, "response", "error"]


@dataclass
class BatchFound:
    """problems, out_of_order: the first fault of each kind, if there is one."""

    num_ok: int = 0
    num_failed: int = 0
    problems: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)


def read_batch(answers: Path, errors: Path, requests: Iterable[PromptRow], num_requests: int) -> BatchFound:
    """Reads both files whole. Raises InputError.

    requests: with the columns ID_COLUMN and n, of which so many are covered; empty if they cannot be had.
    """
    found = BatchFound()
    ok, failed = _Lines(answers, "response", found.problems), _Lines(errors, "error", found.problems)
    for request in islice(requests, num_requests):
        own_id = request.values[ID_COLUMN]
        line = next((lines for lines in (ok, failed) if lines.head and lines.head.get(ID_COLUMN) == own_id), None)
        if line is None:
            found.out_of_order = [f"request {request.index + 1}, {own_id!r}, is not at its place in either file"]
            break
        if line is ok:
            ok.check_choices(request.values["n"] or 1)
        line.next()
    else:
        if requests and (ok.head or failed.head):
            found.out_of_order = ["there are more lines than requests"]
    found.num_ok, found.num_failed = ok.read_on(), failed.read_on()
    return found


class _Lines:
    """A file's lines, one at a time; `head` is the next one, None at the end."""

    def __init__(self, path: Path, wanted: str, problems: list[str]):
        """wanted: response or error, the one that each line has."""
        self._path, self._wanted, self._problems = path, wanted, problems
        self._records: Iterator[dict[str, Any]] = json_records(path)
        self._count = 0
        self.head: dict[str, Any] | None = None
        self.next()

    def next(self) -> None:
        self.head = next(self._records, None)
        if self.head is None:
            return
        self._count += 1
        filled = [name for name in ("response", "error") if self.head.get(name) is not None]
        if list(self.head) != LINE_KEYS or filled != [self._wanted]:
            self._tell(f"is no line with a {self._wanted}")

    def check_choices(self, num_samples: Any) -> None:
        """Whether the next line, an answer, has as many choices as its request asks for, in order."""
        assert self.head is not None
        try:
            indices = [choice["index"] for choice in self.head["response"]["body"]["choices"]]
        except (KeyError, TypeError):
            indices = []
        if len(indices) != num_samples or indices != list(range(len(indices))):
            self._tell(f"has the choices {indices}, in order {num_samples} are expected")

    def _tell(self, problem: str) -> None:
        if not self._problems:
            self._problems.append(f"{self._path}, line {self._count}: {problem}")

    def read_on(self) -> int:
        """To the end; how many lines there are."""
        while self.head is not None:
            self.next()
        return self._count
