"""Backends take turns: run 1 of each, then run 2 of each, so that a machine that gets slower is fair to all."""

from collections.abc import Callable
from functools import partial

from rich.console import Console

from cbgen.bench.answers import Run
from cbgen.bench.backends import CBGEN, PeerOptions
from cbgen.bench.datasets import Workload
from cbgen.bench.ending import EndingSignals
from cbgen.bench.figures import Results
from cbgen.bench.spec import BenchSpec
from cbgen.bench.worker import Worker
from cbgen.errors import CbgenError
from cbgen.report import print_line


class Contest:
    """The workers of one benchmark: loaded one after the other, then run in turn, never two at once."""

    def __init__(
        self,
        spec: BenchSpec,
        workload: Workload,
        interpreters: dict[str, str],
        console: Console,
        signals: EndingSignals,
    ):
        self._spec = spec
        self._workload = workload
        self._interpreters = interpreters
        self._console = console
        self._signals = signals
        self._workers: dict[str, Worker] = {}
        self._warned: set[str] = set()
        self._results = Results(workload)

    def hold(self, options: PeerOptions) -> Results:
        """Loads and warms up every backend, times them in turn, and watches cbgen once more; who fails drops out.

        All of them have ended when it returns, and when it is interrupted.
        """
        try:
            self._run_all(options)
            for worker in self._workers.values():
                worker.close()
        except BaseException:
            for worker in self._workers.values():
                worker.close(at_once=True)
            raise
        return self._results

    def _run_all(self, options: PeerOptions) -> None:
        for name in self._spec.backends:
            self._attempt(name, partial(self._load, name, options))
        for number in range(1, self._spec.runs + 1):
            for name in list(self._workers):
                self._attempt(name, partial(self._time, name, number))
        if self._spec.profile and CBGEN in self._workers:
            self._attempt(CBGEN, self._profile)

    def _attempt(self, name: str, task: Callable[[], None]) -> None:
        try:
            task()
        except CbgenError as error:
            self._results.failures[name] = str(error)
            print_line(self._console, f"cbgen: --backend {name}: {error}")
            if name in self._workers:
                self._workers[name].close()
                del self._workers[name]  # only now: an interrupt on the way finds it

    def _load(self, name: str, options: PeerOptions) -> None:
        told = options.of(name)
        with self._signals.put_off():
            worker = self._workers[name] = Worker(name, self._interpreters[name])
        worker.load(told)
        self._results.versions[name] = worker.versions
        worker.run(self._workload.warm_up)

    def _time(self, name: str, number: int) -> None:
        run = self._workers[name].run(self._workload.requests)
        self._results.add(name, number, run)
        print_line(self._console, f"run {number} of {self._spec.runs}, {name}: {run.wall_s:.2f} s")
        self._warn_of_warm_cache(name, number, run)

    def _warn_of_warm_cache(self, name: str, number: int, run: Run) -> None:
        if not run.warm_cache or name in self._warned:
            return
        self._warned.add(name)
        before = "the warm-up" if number == 1 else f"run {number - 1}"
        print_line(
            self._console,
            f"warning: --backend {name}: run {number} repeats seed {self._spec.dataset.seed} and its prefix cache "
            f"still holds {before}: prompts that are found there are not computed, and its figures are too good",
        )

    def _profile(self) -> None:
        self._results.profile = self._workers[CBGEN].profile(self._workload.requests)
