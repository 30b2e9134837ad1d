"""`cbgen bench` ends before its time: at once, and neither a process nor a file stays."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from job_harness import TIMEOUT_S, start_process

from cbgen.bench.backends import BACKENDS, PEERS
from cbgen.bench.ending import ENDING, EndingSignals
from cbgen.bench.worker import Worker
from cbgen.stopping import Stopped

BETWEEN_SIGNALS_S = 0.02
# A peer that generates for ever, or leaves a cycle behind.
PEER = """
import gc, os, sys, time, types, weakref
sys.path.insert(0, {peers!r})
from contextlib import contextmanager
from serve import Generated, Session, serve

gc.disable()
def note(text):
    with open({notes!r}, "a") as file:
        file.write(text + "\\n")

class Cache:
    def __init__(self):
        self.me = self
        weakref.finalize(self, note, "freed")

class Peer:
    takes_samples = True
    def __init__(self, options):
        sys.modules["torch"] = types.SimpleNamespace(
            cuda=types.SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: note("emptied"))
        )
    @contextmanager
    def session(self, requests):
        cache = Cache()
        yield Session(lambda: self.generate(cache, requests))
    def generate(self, cache, requests):
        note("generating")
        while requests[0].max_tokens > 1:
            time.sleep(0.05)
        return Generated([[1] for _ in requests], [None for _ in requests])

serve(Peer, ("sys",))
"""
# What stands for the benchmark: it hands a peer its work, and says its process id.
PARENT = """
import json, subprocess, sys, time
peer = subprocess.Popen([sys.executable, {peer!r}], stdin=subprocess.PIPE, start_new_session=True, text=True)
for message in {messages!r}:
    peer.stdin.write(json.dumps(message) + "\\n")
peer.stdin.flush()
print(peer.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Processes start with signals that are not ignored, whatever these tests were started with, and afterwards this
    one has its handlers back."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in ENDING)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """The script; its notes are beside it."""
    path = tmp_path / "peer.py"
    path.write_text(PEER.format(peers=str(PEERS), notes=str(tmp_path / "notes")), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        (["SIGINT"], 130, "cbgen: interrupted; nothing was written"),
        (["SIGINT", "SIGINT"], 130, "cbgen: interrupted; nothing was written"),
        (["SIGTERM"], 143, "cbgen: stopped by SIGTERM; nothing was written"),
        (["SIGHUP", "SIGTERM", "SIGINT"], 129, "cbgen: stopped by SIGHUP; nothing was written"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_signal_ends_the_backends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], code: int, words: str
) -> None:
    """Also one that is at work, and whatever follows: nothing is left, no log and no copy of the model either."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sizes = ("--num-prompts", 64, "--input-len", 1000, "--output-len", 1000)
    process = start_process("bench", "--model", "tiny-random", "--backend", "hf", *sizes)
    peers: list[psutil.Process] = []
    while not peers and process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            peers = [child for child in children if str(PEERS / BACKENDS["hf"]) in child.cmdline()]
    for name in names:
        process.send_signal(getattr(signal, name))
        time.sleep(BETWEEN_SIGNALS_S)
    _, messages = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, messages
    assert messages.splitlines()[-1] == words
    assert peers
    assert [own for own in peers if own.is_running() and own.status() != psutil.STATUS_ZOMBIE] == []
    assert list(tmp_path.glob("cbgen-bench-*")) == []


def test_a_peer_ends_with_a_parent_that_was_killed(tmp_path: Path, peer: Path) -> None:
    """In the midst of a run that would never end."""
    messages = [{"do": "load", "options": {}}, {"do": "run", "requests": [{"prompt_ids": [1], "max_tokens": 2}]}]
    code = PARENT.format(peer=str(peer), messages=messages)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        process = psutil.Process(int(parent.stdout.readline()))
        while not (tmp_path / "notes").exists():
            assert process.is_running()
            time.sleep(0.01)
        parent.kill()
        parent.wait()
    try:
        psutil.wait_procs([process], timeout=30)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_memory_is_free_when_a_run_has_answered(tmp_path: Path, peer: Path) -> None:
    """What was left in a cycle, and then what torch keeps of the device: the next backend may need it."""
    process = subprocess.Popen(
        [sys.executable, str(peer)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        requests = [{"prompt_ids": [1], "max_tokens": 1}]
        for message in ({"do": "load", "options": {}}, {"do": "run", "requests": requests}):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            assert "error" not in json.loads(process.stdout.readline())
        notes = (tmp_path / "notes").read_text().split()
        process.stdin.close()
    assert notes[notes.index("generating") :] == ["generating", "freed", "emptied"]


def test_closing_at_once_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads nothing, with more written to it than a pipe holds, and that ends by no signal but one."""
    script = tmp_path / "deaf.py"
    script.write_text("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n")
    monkeypatch.setitem(BACKENDS, "vllm", str(script))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worker = Worker("vllm", sys.executable)
    with EndingSignals(), pytest.raises(Stopped), contextlib.ExitStack() as stack:
        stack.callback(worker.close, at_once=True)
        child = f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, {int(signal.SIGTERM)})"
        stack.enter_context(subprocess.Popen([sys.executable, "-c", child]))
        worker.load({"model": "m" * (1 << 20)})
    assert worker._process.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.log")) == []


def test_signals_wait_for_what_has_to_be_whole() -> None:
    """The first one counts, the rest are ignored from then on; without any, handlers are as before."""
    before = [signal.getsignal(getattr(signal, name)) for name in ENDING]
    with EndingSignals():
        assert signal.getsignal(signal.SIGTERM) != before[ENDING.index("SIGTERM")]
    assert [signal.getsignal(getattr(signal, name)) for name in ENDING] == before
    done = []
    with pytest.raises(Stopped) as stopped, EndingSignals() as signals:
        with signals.put_off():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("more")
    assert done == ["whole"]
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGTERM", 143)
    signal.raise_signal(signal.SIGINT)
