"""`cbgen quality`, and the logits of every token of a text that it rests on."""

import json
import math
from pathlib import Path

import pytest
import torch
from engine_harness import engine_for, random_ids
from job_harness import cbgen
from tiny_models import ModelUnderTest

from cbgen.kernels.cpu.library import load_library

NEEDS_KERNELS = pytest.mark.skipif(load_library() is None, reason="this installation has no compiled kernels")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [{"prompt": "The ferry leaves at seven, when the fog has lifted. " * 2}, {"prompt_ids": list(range(10, 50))}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@NEEDS_KERNELS
@pytest.mark.parametrize(
    "options",
    [
        ["--kv-cache-dtype", "bfloat16"],
        ["--quantization", "w8a8"],
        ["--quantization", "int8", "--kv-cache-dtype", "int8"],
    ],
)
def test_a_table_beside_float32(text: Path, options: list[str]) -> None:
    """Float32 agrees with itself in everything; the other precision has its line below."""
    result = cbgen("quality", text, "--model", "tiny-random", "--output-len", 4, *options)
    assert result.exit_code == 0, result.output
    header, reference, other = result.stdout.splitlines()
    assert header.split()[:2] == ["precision", "perplexity"]
    assert reference.split()[0] == "float32"
    assert reference.split()[2:] == ["+0.00%", "100.0%", "100.0%", "100%"]
    shares = [float(word.strip("%")) for word in other.split()[-3:]]
    assert all(0 <= share <= 100 for share in shares)


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare with float32"),
        (["--quantization", "int4"], "--quantization int4: not one of"),
        (["--quantization", "int8", "--rows", 0], "--rows 0: at least 1"),
        (["--quantization", "int8", "--row-tokens", 1], "--row-tokens 1"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype: 'int4'"),
        (["--quantization", "w8a8", "--calibration", "missing.txt"], "--calibration missing.txt"),
    ],
)
def test_what_is_wrong_is_one_line(text: Path, arguments: list[object], message: str) -> None:
    result = cbgen("quality", text, "--model", "tiny-random", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    result = cbgen("quality", tmp_path / "none.jsonl", "--model", "tiny-random", "--kv-cache-dtype", "bfloat16")
    assert result.exit_code == 2
    assert "none.jsonl: no such file" in result.stderr


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@torch.inference_mode()
def test_scored_logits_are_those_of_the_model(request: pytest.FixtureRequest, name: str) -> None:
    """Every token of a text that takes several forward passes; the cache holds nothing of it afterwards."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(under_test, max_batch_tokens=24)
    ids = random_ids(70, seed=3)
    pieces = list(engine.manager.score(ids))
    assert [len(piece) for piece in pieces] == [24, 24, 22]
    expected = under_test.reference(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-4)
    assert not engine.manager.cache.holders
    engine.manager.check_integrity()
    perplexity = math.exp(torch.nn.functional.cross_entropy(expected[:-1], torch.tensor(ids[1:])))
    own = math.exp(torch.nn.functional.cross_entropy(torch.cat(pieces)[:-1], torch.tensor(ids[1:])))
    assert own == pytest.approx(perplexity, rel=1e-4)
