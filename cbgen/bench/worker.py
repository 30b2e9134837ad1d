"""A process for each backend, so that memory is its own, its Python too, and one that dies takes nobody along."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from cbgen.bench.answers import Failure, NoAnswerError, Run, failure_in, parsed, profile_in, run_in, versions_in
from cbgen.bench.backends import BACKENDS, PEERS, how_to_install, peer_environment
from cbgen.bench.datasets import BenchRequest
from cbgen.bench.profile import Profile
from cbgen.errors import CbgenError, ModelError, first_line

POLL_S = 0.2
CLOSE_S = 20.0
SHOWN_CHARS = 120
_Understood = TypeVar("_Understood")


class Worker:
    """A backend in a process of its own, see peers/serve.py. Every method waits for it; what it cannot do is raised
    here as CbgenError."""

    def __init__(self, name: str, interpreter: str):
        """Starts it, and waits for nothing."""
        self._name = name
        self._interpreter = interpreter
        self._is_busy = self._keeps_log = False
        self.versions: dict[str, str] = {}
        log, path = tempfile.mkstemp(prefix=f"cbgen-bench-{name}-", suffix=".log")
        self._log = Path(path)
        self._lines: queue.Queue[str | None] = queue.Queue()
        try:
            self._process = _started(interpreter, PEERS / BACKENDS[name], log)
        except OSError as error:
            self._log.unlink()
            raise CbgenError(f"{interpreter} cannot be run: {first_line(error)}") from error
        finally:
            os.close(log)
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()

    def load(self, options: dict[str, Any]) -> None:
        self.versions = self._ask({"do": "load", "options": options}, versions_in)

    def run(self, requests: list[BenchRequest]) -> Run:
        lengths = [request.max_tokens for request in requests for _ in range(request.n)]
        asked = {"do": "run", "requests": [asdict(request) for request in requests]}
        return self._ask(asked, lambda answer: run_in(answer, lengths))

    def profile(self, requests: list[BenchRequest]) -> Profile:
        return self._ask({"do": "profile", "requests": [asdict(request) for request in requests]}, profile_in)

    def close(self, at_once: bool = False) -> None:
        """Ends the process and all it started: by itself if it has nothing to do, and there is time."""
        assert self._process.stdin is not None
        if not (at_once or self._is_busy):
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):  # what it has not read is of no use to it now
            self._process.stdin.close()
        if not self._keeps_log:
            self._log.unlink(missing_ok=True)

    def _ask(self, message: dict[str, Any], understand: Callable[[dict[str, Any]], _Understood]) -> _Understood:
        """What is understood of the answer."""
        assert self._process.stdin is not None
        self._is_busy = True
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._death() from error
        line = self._next_line()
        if line is None:
            raise self._death()
        try:
            answer = parsed(line)
            failure = failure_in(answer)
            if failure is None:
                understood = understand(answer)
                self._is_busy = False
                return understood
        except NoAnswerError as error:
            raise self._nonsense(line) from error
        self._is_busy = False
        raise self._error_of(failure)

    def _next_line(self) -> str | None:
        """None when the process has ended, even where one that it started holds its output open."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=POLL_S)
            if self._process.poll() is not None:
                with contextlib.suppress(queue.Empty):
                    return self._lines.get(timeout=POLL_S)
                return None

    def _error_of(self, failure: Failure) -> CbgenError:
        if failure.missing is not None:
            return CbgenError(how_to_install(self._name, failure.missing, self._interpreter))
        return ModelError(failure.text if failure.expected else failure.text + self._log_note())

    def _nonsense(self, line: str) -> CbgenError:
        shown = line.strip()[:SHOWN_CHARS]
        return CbgenError(f"its process answered what is no answer: {shown!r}{self._log_note()}")

    def _death(self) -> CbgenError:
        code = self._process.wait()
        if code < 0:
            return ModelError(
                f"the process of {self._name} was killed by signal {-code} (9: often for want of memory)"
                f"{self._log_note()}"
            )
        return ModelError(f"the process of {self._name} ended with code {code}{self._log_note()}")

    def _log_note(self) -> str:
        """What the process said last, and where the rest is, which stays there from now on."""
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        said = [line for line in lines if line]
        if not said:
            return ""
        self._keeps_log = True
        return f"; it said last: {said[-1][:SHOWN_CHARS]!r}, all of it is in {self._log}"


def _started(interpreter: str, script: Path, log: int) -> "subprocess.Popen[str]":
    """In a session of its own, so that the keyboard's interrupt is the benchmark's and it can be ended with all it
    started."""
    return subprocess.Popen(
        [interpreter, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=peer_environment(interpreter),
        start_new_session=True,
    )


def _read(output: IO[str] | None, lines: "queue.Queue[str | None]") -> None:
    assert output is not None
    with output:
        for line in output:
            lines.put(line)
    lines.put(None)
