"""The gate of `cbgen bench`: a report against an earlier one of the same work. No figure of a time is looked at."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_harness import cbgen
from typer.testing import Result

from cbgen.bench.baseline import RATE, Baseline

SIZES = ("--num-prompts", 3, "--input-len", 4, "--output-len", 3, "--runs", 1, "--no-profile")


def bench(*options: object) -> Result:
    return cbgen("bench", "--model", "tiny-random", *SIZES, *options)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a real run."""
    path = tmp_path_factory.mktemp("bench") / "old.json"
    result = bench("--output-json", path)
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def save(values: dict[str, Any]) -> Path:
        path = tmp_path / "old.json"
        path.write_text(json.dumps(values), encoding="utf-8")
        return path

    return save


def test_a_regression_ends_with_1(report: dict[str, Any], saved: Callable[[dict[str, Any]], Path]) -> None:
    """Against a hundred times the throughput; both figures are named."""
    old = saved(report | {RATE: 100 * report[RATE]})
    result = bench("--baseline", old)
    assert result.exit_code == 1, result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]
    assert message.startswith(f"cbgen: slower than --baseline {old} by more than 10%: ")
    assert message.endswith(f"there it was {100 * report[RATE]:,.1f}")
    assert "warning: " not in result.stderr
    assert f"of {old}'s throughput" in result.stdout


def test_other_circumstances_warn(report: dict[str, Any], saved: Callable[[dict[str, Any]], Path]) -> None:
    """A line for each kind; against a hundredth of the throughput all is well."""
    changed = {
        RATE: report[RATE] / 100,
        "engine": report["engine"] | {"page_size": 7},
        "hardware": report["hardware"] | {"cores": 1000},
        "versions": report["versions"] | {"torch": "0.1"},
    }
    old = saved(report | changed)
    result = bench("--baseline", old, "--max-regression", "5%")
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert [warning.partition(f"{old}: ")[2].partition(":")[0] for warning in warnings] == [
        "other engine options",
        "other hardware",
        "other versions",
    ]
    assert "page_size: 7 there, 32 here" in warnings[0]
    assert "cores: 1000 there" in warnings[1]
    assert "torch: 0.1 there" in warnings[2]
    assert result.stdout.splitlines()[-1].startswith("baseline  ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seed", 1], "seed: 0 there, 1 here"),
        (["--n", 2], "n: 1 there, 2 here"),
        (["--num-prompts", 4], "requests: 3 there, 4 here"),
        (["--output-len", 4], "output tokens: 9 there, 12 here"),
        (["--dataset-name", "prefix-repetition"], "dataset name: random there, prefix-repetition here"),
        (["--dtype", "bfloat16"], "dtype: float32 there, bfloat16 here"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_other_work_is_refused(
    report: dict[str, Any], saved: Callable[[dict[str, Any]], Path], options: list[object], words: str
) -> None:
    """Before anything is run, with the difference."""
    result = bench(*options, "--baseline", saved(report))
    assert result.exit_code == 2, result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]
    assert message.endswith(f": compares other work: {words}")
    assert "run 1 of" not in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a readable report"),
        ("[]", "not a report of cbgen bench --output-json"),
        ('{"output_tokens_per_second": 5}', "not a report of cbgen bench --output-json"),
        ("[" * 100_000, "not a readable report"),
        *(
            (f'{{"output_tokens_per_second": {rate}, "workload": {{}}}}', "not a report of cbgen bench --output-json")
            for rate in ("0", "true", "NaN", "Infinity", "1" + 400 * "0", '"5"')
        ),
    ],
    ids=lambda value: value[:50],
)
def test_what_is_no_report(tmp_path: Path, text: str, words: str) -> None:
    """One line, exit code 2."""
    (tmp_path / "old.json").write_text(text)
    result = bench("--baseline", tmp_path / "old.json")
    assert result.exit_code == 2, result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("cbgen: ")]
    assert message.startswith(f"cbgen: --baseline {tmp_path / 'old.json'}: {words}")


def test_where_the_bound_lies(saved: Callable[[dict[str, Any]], Path]) -> None:
    """A share of the baseline's throughput, itself still good."""
    baseline = Baseline(saved({RATE: 200.0, "workload": {}}))
    assert baseline.verdict(180.0, 0.1)[1] is None
    line, regression = baseline.verdict(179.0, 0.1)
    assert line.startswith("baseline  0.90 of ")
    assert regression is not None
    assert "179.0 output tokens/s, there it was 200.0" in regression
    assert baseline.verdict(300.0, 0.0)[1] is None


def test_a_baseline_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, or a folder: without the number of the error."""
    for path, words in ((tmp_path / "none.json", "no such file"), (tmp_path, "cannot be read: Is a directory")):
        result = bench("--baseline", path)
        assert result.exit_code == 2, result.output
        assert result.stderr.splitlines()[-1] == f"cbgen: --baseline {path}: {words}"


def test_either_name_of_a_dataset_is_the_same_work(tmp_path: Path) -> None:
    """A report has the one with a hyphen, and an older one with an underscore is compared as if it had."""
    path = tmp_path / "old.json"
    dataset = ("--dataset-name", "prefix_repetition", "--prefix-len", 4)
    assert bench(*dataset, "--output-json", path).exit_code == 0
    values = json.loads(path.read_text(encoding="utf-8"))
    names = (values["dataset_name"], values["workload"]["dataset_name"], values["config"]["dataset"]["dataset_name"])
    assert names == ("prefix-repetition",) * 3
    Baseline(path).compare(values)
    old = values | {"workload": values["workload"] | {"dataset_name": "prefix_repetition"}}
    path.write_text(json.dumps(old), encoding="utf-8")
    Baseline(path).compare(values)
