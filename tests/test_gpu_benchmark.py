"""benchmarks/gpu.py, tried on the CPU: what it works out from the ends of passes, and that it runs to its end."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from job_harness import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"
TINY = [
    *("--device", "cpu", "--dtype", "float32", "--small", "--layers", "2", "--requests", "10", "--prompt-len", "20"),
    *("--output-len", "8", "--requests-per-batch", "8", "--repeats", "2"),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_only_full_decodes_after_full_decodes_are_steps(script: ModuleType) -> None:
    """Not one that follows a prompt, nor one of fewer requests: part of their time was another pass's."""
    numbers = [(0.0, 4, False, 9), (1.0, 4, True, 40), (1.5, 4, True, 44), (2.25, 4, True, 48), (3.0, 3, True, 30)]
    numbers += [(3.5, 4, False, 50), (4.0, 4, True, 60), (4.125, 4, True, 64)]
    assert script.decode_steps([script.Pass(*one) for one in numbers]) == [(0.5, 44), (0.75, 48), (0.125, 64)]
    assert script.decode_steps([]) == []
    assert script.decode_steps([script.Pass(1.0, 2, False, 3)]) == []


def test_the_share_of_the_bandwidth_counts_weights_and_kv(script: ModuleType) -> None:
    """1,000 bytes of weights and 10 per token: 1,500 bytes in half a second are 3 of 4 thousand a second."""
    assert script.bandwidth_share([(0.5, 50)], 1000, 10.0, 4000.0) == pytest.approx(0.75)
    assert script.bandwidth_share([(0.5, 50), (1.0, 50), (9.0, 0)], 1000, 10.0, 4000.0) == pytest.approx(0.375)


def test_a_copy_moves_something(script: ModuleType) -> None:
    assert script.copy_bytes_per_s(torch.device("cpu")) > 1e6


def test_the_table_has_the_slower_of_two_runs(script: ModuleType) -> None:
    runs = [
        script.Run("cbgen", 2.0, 100, decode_step_ms=1.5, bandwidth_share=0.42),
        script.Run("transformers", 4.0, 100),
    ]
    runs += [script.Run("cbgen", 1.0, 100), script.Run("transformers", 5.0, 100)]
    _, own, peer = script.table(runs)
    assert own.split() == ["cbgen", "50", "2.50", "1.50", "ms", "42%"]
    assert peer.split() == ["transformers", "20", "1.00", "-", "-"]
    assert script.table(runs[:1])[1].split() == ["cbgen", "50", "-", "1.50", "ms", "42%"]


def run_script(*more: str) -> tuple[str, dict]:
    command = [sys.executable, str(SCRIPT), *TINY, *more]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return output, json.loads(output.splitlines()[-1])


def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """Every request of every engine has all its tokens, and both engines ran twice."""
    output, figures = run_script("--json", str(tmp_path / "figures.json"))
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert [run["engine"] for run in figures["runs"]] == ["cbgen", "transformers"] * 2
    assert all(run["output_tokens"] == 10 * 8 and run["complete"] for run in figures["runs"])
    assert all(run["bandwidth_share"] > 0 for run in figures["runs"][::2])
    assert figures["remarks"] == []
    assert "output tokens/s" in output


def test_what_the_budget_leaves_no_time_for_is_named() -> None:
    output, figures = run_script("--budget-s", "0", "--skip-transformers")
    assert figures["runs"] == []
    assert [remark.split(" was ")[0] for remark in figures["remarks"]] == ["run 1 of cbgen", "run 2 of cbgen"]
    assert "--budget-s are over" in output
