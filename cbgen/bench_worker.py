"""A process for each backend, so that memory is its own and one that dies takes nobody along."""

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
from transformers.utils import logging as transformers_logging

from cbgen.bench_backends import BACKENDS, Backend, BackendOptions
from cbgen.bench_profile import Profile
from cbgen.bench_workloads import BenchRequest
from cbgen.errors import CbgenError, ModelError, first_line

RUN, PROFILE = "run", "profile"
MEMORY_INTERVAL_S = 0.1
# What other libraries raise for a model that they cannot run.
FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError, ImportError, MemoryError)


@dataclass(frozen=True)
class Run:
    """One timed run. peak_rss_bytes: the largest resident set of the backend's process during it."""

    token_ids: list[list[int]]
    wall_s: float
    peak_rss_bytes: int


class Worker:
    """A backend in a process of its own. Every method waits for it; what it cannot do is raised here as CbgenError."""

    def __init__(self, name: str, options: BackendOptions):
        """Returns when the backend is loaded."""
        self._name = name
        spawn = multiprocessing.get_context("spawn")  # a fork of a process that has used torch may hang
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, name, options), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, requests: list[BenchRequest]) -> Run:
        run: Run = self._ask(RUN, requests)
        if [len(ids) for ids in run.token_ids] != [request.max_tokens for request in requests]:
            raise ModelError("it did not generate as many tokens as it was asked for")
        return run

    def profile(self, requests: list[BenchRequest]) -> Profile:
        return self._ask(PROFILE, requests)

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def _ask(self, task: str, requests: list[BenchRequest]) -> Any:
        try:
            self._connection.send((task, requests))
        except OSError as error:
            raise self._death() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, CbgenError):
            raise answer
        return answer

    def _death(self) -> ModelError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code} (9: often for want of memory)" if code < 0 else f"ended with code {code}"
        return ModelError(f"the process of {self._name} {how}")


def serve(connection: Connection, name: str, options: BackendOptions) -> None:
    """What the process does: load, say so, then answer tasks until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this process
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    backend = _attempt(partial(BACKENDS[name], options))
    try:
        if isinstance(backend, CbgenError):
            connection.send(backend)
            return
        connection.send(None)
        while True:
            task, requests = connection.recv()
            work = partial(_measured, backend) if task == RUN else backend.profile
            connection.send(_attempt(partial(work, requests)))
    except (EOFError, OSError):  # the other end is closed
        return


def _attempt(task: Callable[[], Any]) -> Any:
    """The task's result, or the error that it raised."""
    try:
        return task()
    except CbgenError as error:
        return error
    except FOREIGN_ERRORS as error:
        return ModelError(f"{type(error).__name__}: {first_line(error)}")


def _measured(backend: Backend, requests: list[BenchRequest]) -> Run:
    memory = _PeakMemory()
    with memory:
        generated = backend.generate(requests)
    return Run(generated.token_ids, generated.wall_s, memory.peak_bytes)


class _PeakMemory:
    """Looks at this process's resident set again and again, since the kernel's own peak cannot be set back."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        stopped = False
        while not stopped:
            stopped = self._stop.wait(MEMORY_INTERVAL_S)
            self.peak_bytes = max(self.peak_bytes, process.memory_info().rss)
