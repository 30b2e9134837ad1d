"""What every peer's script does: it answers the benchmark, one JSON object a line, on standard input and output.

    benchmark                              peer, a process of its own
    ---------                              --------------------------
    {"do": "load", "options": {...}}  -->  loads the model
                                      <--  {"versions": {"vllm": "0.32"}}
    {"do": "run", "requests": [       -->  empties its cache, starts the clock, generates, stops it
      {"prompt_ids": [5, 6],
       "max_tokens": 3, "n": 2}]}
                                      <--  {"tokens": [[7, 8, 9], [7, 8, 9]], "wall_s": 0.2,
                                            "peak_rss_bytes": 123, "warm_cache": false, "figures": {},
                                            "latencies": [{"ttft_s": 0.1, "e2e_s": 0.2}, null]}
    {"do": "profile", "requests": []} -->  one more run, watched (cbgen alone)
                                      <--  {"profile": {...}}
    closes standard input             -->  ends

tokens and latencies have an entry for each sample: a request of n has n, one after the other. Latencies count from the
start of the clock; null where the engine does not tell, and so is ttft_s. warm_cache: the cache could not be emptied.
peak_rss_bytes: the largest resident set of the process and its children during the run. Instead of any answer:

    {"error": "in one line", "missing": "vllm" or null, "expected": true}

missing: a module that is not installed. expected: the engine refuses by itself, and its log has nothing to add.

Scripts run by their path in environments without cbgen: this file and theirs import the standard library, and their
engine late. Descriptor 1 is kept for the protocol, and then leads to where standard error goes, so that an engine that
prints breaks nothing.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# Resident sets are cheap to read; to find the children, every process of the machine is looked at.
MEMORY_INTERVAL_S, FAMILY_INTERVAL_S = 0.1, 5.0
PARENT_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Request:
    """One prompt and the number of tokens that every one of its n samples has."""

    prompt_ids: list[int]
    max_tokens: int
    n: int = 1


@dataclass(frozen=True)
class Generated:
    """Token ids of each sample. moments: when its first and its last token came, by time.perf_counter or a clock that
    agrees with it; None where that is not known. figures: what the engine says of the run."""

    token_ids: list[list[int]]
    moments: list[tuple[float | None, float] | None]
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """An engine with an empty cache (unless it says otherwise), and the call that is timed: greedy, and exactly
    max_tokens for each sample."""

    generate: Callable[[], Generated]
    warm_cache: bool = False


class Peer(Protocol):
    """An engine with a model, loaded once. takes_samples: requests come with their n; else each comes n times."""

    takes_samples: bool

    def session(self, requests: list[Request]) -> AbstractContextManager[Session]:
        """Everything before and after the part that is timed."""


def serve(make: Callable[[dict[str, Any]], Peer], modules: tuple[str, ...]) -> None:
    """Answers until standard input is closed. make: loads, from the options. modules: whose versions are told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark is interrupted too, and ends this process
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        loaded: list[Peer] = []
        with contextlib.suppress(BrokenPipeError):
            for line in sys.stdin:
                answer = _attempt(partial(_answer, json.loads(line), loaded, make, modules))
                _release_memory()
                answers.write(json.dumps(answer) + "\n")
                answers.flush()


def _end_with_parent(parent: int) -> None:
    """Ends this process, and what it started, when the benchmark has died: also in the midst of a run, whose end
    nobody waits for. POSIX gives it another parent then; Windows does not, and there it ends after the run."""
    while os.getppid() == parent:
        time.sleep(PARENT_INTERVAL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _release_memory() -> None:
    """Frees what the run left in cycles, such as a cache, and gives the device back what torch keeps of it for later:
    backends that stand beside this one have the same device."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _attempt(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer, or the error that was raised on the way: whatever it is, the benchmark says it and goes on."""
    try:
        return task()
    except Exception as error:  # noqa: BLE001
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        expected = hasattr(error, "exit_code")  # of cbgen's own, which speak to the user
        first = (str(error).strip().splitlines() or [""])[0]
        text = first if expected else f"{type(error).__name__}: {first}".removesuffix(": ")
        return {"error": text, "missing": missing, "expected": expected}


def _answer(
    message: dict[str, Any], loaded: list[Peer], make: Callable[[dict[str, Any]], Peer], modules: tuple[str, ...]
) -> dict[str, Any]:
    if message["do"] == "load":
        loaded.append(make(message["options"]))
        return {"versions": {name: str(getattr(sys.modules.get(name), "__version__", "unknown")) for name in modules}}
    (peer,) = loaded
    requests = [Request(**request) for request in message["requests"]]
    if message["do"] == "profile":
        profiled: Any = peer
        return {"profile": profiled.profile(requests)}
    return _run(peer, requests)


def _run(peer: Peer, requests: list[Request]) -> dict[str, Any]:
    if not peer.takes_samples:
        requests = [Request(one.prompt_ids, one.max_tokens) for one in requests for _ in range(one.n)]
    with peer.session(requests) as session, PeakMemory() as memory:
        start_s = time.perf_counter()
        generated = session.generate()
        wall_s = time.perf_counter() - start_s
    return {
        "tokens": generated.token_ids,
        "wall_s": wall_s,
        "peak_rss_bytes": memory.peak_bytes,
        "latencies": [_latency(moments, start_s) for moments in generated.moments],
        "warm_cache": session.warm_cache,
        "figures": generated.figures,
    }


def _latency(moments: tuple[float | None, float] | None, start_s: float) -> dict[str, float | None] | None:
    if moments is None:
        return None
    first_s, last_s = moments
    return {"ttft_s": None if first_s is None else first_s - start_s, "e2e_s": last_s - start_s}


class PeakMemory:
    """Looks at resident sets again and again, since the kernel's own peak cannot be set back."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        measure = _family_reader()
        stopped = False
        while not stopped:
            stopped = self._stop.wait(MEMORY_INTERVAL_S)
            self.peak_bytes = max(self.peak_bytes, measure())


def _family_reader() -> Callable[[], int]:
    """A function that adds up the resident sets of this process and all that it started; 0 where nothing tells."""
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return proc_family_bytes
    me = psutil.Process()
    family: list[Any] = []
    looked_s = float("-inf")

    def measure() -> int:
        nonlocal family, looked_s
        if time.monotonic() - looked_s > FAMILY_INTERVAL_S:
            family, looked_s = [me, *me.children(recursive=True)], time.monotonic()
        total = 0
        for process in family:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    return measure


def proc_family_bytes() -> int:
    """The same read from Linux's /proc, where psutil is not installed."""
    family, resident = {os.getpid()}, dict(_processes())
    total = 0
    for _ in resident:  # a generation of children in each round
        grown = family | {pid for pid, (parent, _) in resident.items() if parent in family}
        if grown == family:
            break
        family = grown
    for pid in family & resident.keys():
        total += resident[pid][1]
    return total


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (its parent, bytes resident)) of every process; none where there is no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            pages = int((folder / "statm").read_text().split()[1])
            yield int(folder.name), (int(after_name[1]), pages * os.sysconf("SC_PAGE_SIZE"))
