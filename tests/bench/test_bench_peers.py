"""Backends as processes: the protocol with real ones that behave, are not installed, die, or say what is no answer."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_harness import CPU
from job_harness import cbgen

from cbgen.bench.backends import BACKENDS, PEERS, BackendOptions, PeerOptions
from cbgen.bench.dataset_options import BenchRequest
from cbgen.bench.worker import Worker
from cbgen.config import ContinuousBatchingConfig
from cbgen.errors import CbgenError, ModelError
from cbgen.models.loading import describe

REQUESTS = [BenchRequest([5, 6], 3), BenchRequest([7], 2, n=2)]
CHILD_BYTES = 96 << 20
# A peer that needs the standard library alone. It answers each request with its first token, and is noisy.
COUNTING = """
import os, subprocess, sys, time
sys.path.insert(0, {peers!r})
from contextlib import contextmanager
from serve import Generated, Session, serve

class Counting:
    takes_samples = False
    def __init__(self, options):
        print("loading", options["model"])
    @contextmanager
    def session(self, requests):
        code = "import sys; held = bytearray(b'x') * {child_bytes}; print('held', flush=True); sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        try:
            yield Session(lambda: self.generate(requests), warm_cache=True)
        finally:
            child.communicate()
    def generate(self, requests):
        print("a line that is no answer")
        os.write(1, b"nor is this")
        subprocess.run(["echo", "nor what others print"], check=True)
        start_s = time.perf_counter()
        time.sleep(0.25)
        moments = [(start_s, time.perf_counter())] * len(requests)
        return Generated([[r.prompt_ids[0]] * r.max_tokens for r in requests], moments)

if __name__ == "__main__":
    serve(Counting, ("sys", "subprocess"))
"""
ANSWERS = "import sys\nfor line in sys.stdin:\n    print({!r}, flush=True)\n"
LOADED = """
import json, os, sys
sys.stdin.readline()
print(json.dumps({"versions": {}}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@dataclass
class Scripts:
    """Puts scripts in the place of vLLM's."""

    folder: Path
    patch: pytest.MonkeyPatch

    def use(self, text: str) -> None:
        path = self.folder / "peer.py"
        path.write_text(text, encoding="utf-8")
        self.patch.setitem(BACKENDS, "vllm", str(path))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where logs stay
    return Scripts(tmp_path, monkeypatch)


@pytest.fixture
def opened() -> Iterator[Callable[..., Worker]]:
    """Makes workers, and closes them."""
    workers: list[Worker] = []

    def make(name: str, python: str, options: dict[str, Any] | None = None) -> Worker:
        workers.append(Worker(name, python))
        workers[-1].load({"model": "m"} if options is None else options)
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def counting() -> str:
    return COUNTING.format(peers=str(PEERS), child_bytes=CHILD_BYTES)


def test_a_peer_in_an_environment_without_packages(
    scripts: Scripts, bare_python: str, opened: Callable[..., Worker]
) -> None:
    """What it, its engine and others print breaks nothing; samples come one by one; its children's memory counts."""
    scripts.use(counting())
    worker = opened("vllm", bare_python)
    assert set(worker.versions) == {"sys", "subprocess"}
    for _ in range(2):
        run = worker.run(REQUESTS)
        assert run.token_ids == [[5, 5, 5], [7, 7], [7, 7]]
        assert run.peak_rss_bytes > CHILD_BYTES
        assert run.warm_cache
        for latency, length in zip(run.latencies, (3, 2, 2), strict=True):
            assert latency is not None
            assert latency.ttft_s is not None
            assert 0 <= latency.ttft_s < latency.e2e_s <= run.wall_s
            assert latency.output_tokens == length
    worker.close()
    assert list(scripts.folder.glob("*.log")) == []


def test_a_cache_that_stays_warm_is_told_once(scripts: Scripts, bare_python: str) -> None:
    """In a benchmark of three runs, with the goodput of what the peer tells."""
    scripts.use(counting())
    sizes = ("--num-prompts", 2, "--input-len", 3, "--output-len", 4, "--runs", 3, "--seed", 9)
    report = scripts.folder / "b.json"
    options = ("--python", bare_python, "--slo", "ttft=100s,e2e=200s", "--output-json", report)
    result = cbgen("bench", "--model", "tiny-random", "--backend", "vllm", *sizes, *options)
    assert result.exit_code == 0, result.output
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "--backend vllm: run 1 repeats seed 9 and its prefix cache still holds the warm-up" in warning
    own = json.loads(report.read_text(encoding="utf-8"))
    assert own["backends"]["vllm"]["latencies"]["slo_met_share"] == 1.0
    assert own["versions"]["subprocess"] == "unknown"
    assert all(run["warm_cache"] for run in own["runs"])
    assert "goodput" in result.stdout


def test_an_engine_that_is_not_installed(bare_python: str, opened: Callable[..., Worker]) -> None:
    """The line says what is missing where, and both ways out; also of cbgen itself."""
    for name, package in (("vllm", "vllm"), ("openvino", "openvino-genai"), ("hf", "torch"), ("hf-cb", "torch")):
        with pytest.raises(CbgenError) as caught:
            opened(name, bare_python, {"model": "m", "device": "cpu"})
        assert str(caught.value) == (
            f"{package} is not installed in {bare_python}; pip install {package} there, or give --python "
            f"{name}=/path/to/python of an environment that has it"
        )


def test_the_command_says_that_an_engine_is_not_installed(bare_python: str) -> None:
    """One line with the backend's name, exit code 1."""
    result = cbgen("bench", "--model", "tiny-random", "--backend", "vllm", "--python", bare_python, "--num-prompts", 1)
    assert result.exit_code == 1, result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]
    assert message.startswith(f"cbgen: --backend vllm: vllm is not installed in {bare_python}; pip install vllm there")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (LOADED + "os.kill(os.getpid(), 9)", "vllm was killed by signal 9"),
        (LOADED + "sys.stderr.write('all is\\nlost\\n')\nsys.exit(3)", "ended with code 3; it said last: 'lost'"),
        (LOADED + "sys.exit()", "ended with code 0"),
        (LOADED + "print('INFO hello', flush=True)\nsys.stdin.read()", "what is no answer: 'INFO hello'"),
        (LOADED + "print('[1]', flush=True)\nsys.stdin.read()", "what is no answer: '[1]'"),
        (ANSWERS.format('{"versions": {}}'), "what is no answer: '{\"versions\": {}}'"),
        (ANSWERS.format('{"versions": {}, "error": "no room", "missing": null, "expected": true}'), "no room"),
        ("import nothing_like_this", 'ended with code 1; it said last: "ModuleNotFoundError: No module named'),
    ],
)
def test_a_peer_that_fails_is_told(scripts: Scripts, opened: Callable[..., Worker], script: str, words: str) -> None:
    """While it loads or runs, in one line. What it said stays in a file that the line names."""
    scripts.use(script)
    with pytest.raises(CbgenError) as caught:
        opened("vllm", sys.executable).run(REQUESTS)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    logs = list(scripts.folder.glob("*.log"))
    if "it said last" in message:
        (log,) = logs
        assert message.endswith(str(log))
        assert log.read_text(encoding="utf-8")


def test_wrong_counts_of_tokens_are_refused(scripts: Scripts, opened: Callable[..., Worker]) -> None:
    """A backend that stops early does less work than the others."""
    scripts.use(counting().replace("r.max_tokens for", "(r.max_tokens - 1) for"))
    with pytest.raises(ModelError, match="as many tokens"):
        opened("vllm", sys.executable).run(REQUESTS)


def test_what_an_engine_raises_is_told(scripts: Scripts, opened: Callable[..., Worker]) -> None:
    """With its class; the peer lives on and runs the next."""
    scripts.use(counting().replace("        start_s =", "        1 / (len(requests) - 1)\n        start_s ="))
    worker = opened("vllm", sys.executable)
    with pytest.raises(
        ModelError, match=r"^ZeroDivisionError: division by zero; it said last: .*nor what others print"
    ):
        worker.run([BenchRequest([5, 6], 3)])
    assert len(worker.run(REQUESTS).token_ids) == 3


def test_a_python_that_cannot_be_run(tmp_path: Path) -> None:
    """A file without the permission."""
    (tmp_path / "python").write_text("")
    with pytest.raises(CbgenError, match=r"cannot be run: .*Permission denied"):
        Worker("vllm", str(tmp_path / "python"))


def test_real_backends_give_the_same_tokens_until_they_die(opened: Callable[..., Worker]) -> None:
    """cbgen with forks, transformers with repeated requests; then one is killed, as the kernel does."""
    model = describe("tiny-random", None, "float32", CPU)
    with PeerOptions(BackendOptions(model, CPU, {}, ContinuousBatchingConfig())) as options:
        ours, theirs = (opened(name, sys.executable, options.of(name)) for name in ("cbgen", "hf"))
        saved = Path(options.of("hf")["model"])
        assert (saved / "config.json").is_file()
    assert not saved.exists()
    run = ours.run(REQUESTS)
    assert run.token_ids == theirs.run(REQUESTS).token_ids
    assert run.token_ids[1] == run.token_ids[2]
    assert not run.warm_cache
    assert run.figures["num_steps"] == 3
    os.kill(theirs._process.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match="killed by signal 9"):
        theirs.run(REQUESTS)


def test_openvino_gets_long_prefixes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request for each, where they are few; otherwise all requests at once."""
    monkeypatch.syspath_prepend(str(PEERS))
    from peer_openvino import LONG_PREFIX, in_turn
    from serve import Request

    def requests(prefixes: list[int], length: int) -> list[Any]:
        return [Request([prefix] * length + [number], 1) for number, prefix in enumerate(prefixes)]

    assert in_turn(requests([1, 2, 1, 1, 2, 1], LONG_PREFIX)) == [[0, 1], [2, 3, 4, 5]]
    assert in_turn(requests([1, 2, 3, 1], LONG_PREFIX)) == [[0, 1, 2, 3]]
    assert in_turn(requests([1, 1, 1, 1], LONG_PREFIX - 2)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "answer",
    [
        {"tokens": None},
        {"tokens": [[1, 2]], "wall_s": 0, "peak_rss_bytes": 1, "latencies": [None], "warm_cache": False, "figures": {}},
        {"error": 5, "missing": 5},
        {"versions": 3},
    ],
)
def test_an_interpreter_that_answers_something_else(scripts: Scripts, answer: dict[str, Any]) -> None:
    """One line of the command, exit code 1, and no traceback."""
    scripts.use(ANSWERS.format(json.dumps({"versions": {}} | answer)))
    sizes = ("--num-prompts", 1, "--input-len", 2, "--output-len", 2, "--runs", 1)
    result = cbgen("bench", "--model", "tiny-random", "--backend", "vllm", *sizes)
    assert result.exit_code == 1, result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]
    assert message.startswith("cbgen: --backend vllm: its process answered what is no answer: ")


STAND_IN = """
import json, pathlib
class LLM:
    def __init__(self, **options):
        pathlib.Path({told!r}).write_text(json.dumps(options))
"""


@pytest.mark.parametrize("share", [None, 0.4])
def test_vllm_is_told_how_much_memory_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Worker], share: float | None
) -> None:
    """By --gpu-memory-utilization, as cbgen is; else by a default of its own. A package that notes it stands for it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN.format(told=str(tmp_path / "told.json")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    backends = BackendOptions(describe("tiny-random", None, "float32", CPU), CPU, {}, ContinuousBatchingConfig(), share)
    with PeerOptions(backends) as options:
        opened("vllm", sys.executable, options.of("vllm"))
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.get("gpu_memory_utilization") == share
    assert ("gpu_memory_utilization" in told) == (share is not None)
