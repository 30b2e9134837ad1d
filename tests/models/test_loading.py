"""Models by name: folders as transformers writes them, GGUF files, the model made in memory, and what goes wrong."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from job_harness import SAMPLES, cbgen, read_rows, write_jsonl
from tiny_models import ModelUnderTest, build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from cbgen.errors import ModelError, UsageError
from cbgen.models import gguf, loading, tiny_random

CPU = torch.device("cpu")
ABSENT_GPU = torch.device("cuda:99")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny Llama and the byte tokenizer, without pad token; its generation config samples and has two EOS ids."""
    folder = tmp_path / "model"
    model = build("llama")
    model.generation_config = GenerationConfig(eos_token_id=[44, 45], do_sample=True, temperature=0.6, top_k=30)
    model.save_pretrained(folder)
    tiny_random.build_tokenizer().save_pretrained(folder)
    return folder


def test_generation_config_is_used_printed_and_recorded(model_folder: Path, tmp_path: Path) -> None:
    """EOS lists and sampling defaults come from generation_config where the user is silent, and are told."""
    out = tmp_path / "out.parquet"
    result = cbgen(
        "run", SAMPLES / "questions.jsonl", "--model", model_folder, "--out", out, "--limit", 6, "--output-token-ids"
    )
    assert result.exit_code == 0, result.output
    assert "sampling  temperature 0.6, max_tokens 512, n 1, top_k 30, seed 0; " in result.output
    assert "; temperature, top_k from the model's generation config; " in result.output
    assert "stops at  token ids 44, 45" in result.output
    for row in read_rows(out):
        ends = [place for place, token in enumerate(row["completion_ids"]) if token in (44, 45)]
        assert (row["finish_reason"] == "stop") == bool(ends)
        assert ends in ([], [len(row["completion_ids"]) - 1]), "it stops at the first of either"
    greedy = cbgen(
        "run", SAMPLES / "questions.jsonl", "--model", model_folder, "--out", tmp_path / "g.parquet", "--temperature", 0
    )
    assert "sampling  greedy, max_tokens 512, n 1, top_k 30, seed 0; top_k from the model's" in greedy.output


def test_a_folder_is_told_from_a_changed_one(model_folder: Path) -> None:
    """The fingerprint of a model folder changes with its weights, so that a resume does not mix two models."""
    before = loading.describe(str(model_folder), None, "auto", CPU).identity
    assert loading.describe(str(model_folder), None, "auto", CPU).identity == before
    build("llama", seed=1).save_pretrained(model_folder)
    assert loading.describe(str(model_folder), None, "auto", CPU).identity != before


@pytest.mark.parametrize(("name", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype(model_folder: Path, name: str, expected: torch.dtype) -> None:
    """auto is float32 on a CPU; a dtype asked for is loaded."""
    description = loading.describe(str(model_folder), None, name, CPU)
    model, shape = loading.load(description, CPU)
    assert description.dtype == model.dtype == expected
    assert shape.dtype_bytes == expected.itemsize


@pytest.mark.parametrize(
    ("own", "name", "expected"),
    [
        ("float32", "auto", torch.bfloat16),
        (None, "auto", torch.bfloat16),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "float16", torch.float16),
    ],
)
def test_dtype_on_cuda(model_folder: Path, own: str | None, name: str, expected: torch.dtype) -> None:
    """auto is 16 bits, the model's own if it has that; a dtype asked for is taken. On a CPU auto stays float32."""
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"dtype": own}))
    assert loading.describe(str(model_folder), None, name, ABSENT_GPU).dtype == expected
    on_cpu = torch.float32 if name == "auto" else expected
    assert loading.describe(str(model_folder), None, name, CPU).dtype == on_cpu


def test_dtype_of_the_model_in_memory() -> None:
    """bfloat16 on CUDA, as for any other whose own dtype is unknown; float32 elsewhere, or when asked for."""
    assert loading.describe("tiny-random", None, "auto", ABSENT_GPU).dtype == torch.bfloat16
    assert loading.describe("tiny-random", None, "float32", ABSENT_GPU).dtype == torch.float32
    for device in (CPU, torch.device("mps")):
        assert loading.describe("tiny-random", None, "auto", device).dtype == torch.float32


def test_dtype_on_an_old_gpu(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch speaks for a GPU without bfloat16: auto is float16, also for a model of bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    config = json.loads((model_folder / "config.json").read_text())
    for own in ("float32", "bfloat16", "float16"):
        (model_folder / "config.json").write_text(json.dumps(config | {"dtype": own}))
        assert loading.describe(str(model_folder), None, "auto", torch.device("cuda")).dtype == torch.float16
    assert loading.describe("tiny-random", None, "float32", torch.device("cuda")).dtype == torch.float32


def test_context_can_be_less_but_not_more(model_folder: Path) -> None:
    """--max-model-len bounds the context; more than the model has is refused."""
    assert loading.describe(str(model_folder), None, "auto", CPU, 100).max_model_len == 100
    with pytest.raises(UsageError, match="512"):
        loading.describe(str(model_folder), None, "auto", CPU, 513)


def test_unknown_architecture(model_folder: Path) -> None:
    """A folder whose model type transformers does not know is refused in one line."""
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | {"model_type": "no-such-type"}))
    with pytest.raises(ModelError, match="no-such-type") as refusal:
        loading.describe(str(model_folder), None, "auto", CPU)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (GatedRepoError, "accept its terms"),
        (RepositoryNotFoundError, "hf auth login"),
        (LocalEntryNotFoundError, "cannot be reached"),
    ],
)
def test_hub_failures_say_what_to_do(error: type[Exception], advice: str) -> None:
    """What the hub's client raises, as transformers wraps it, becomes advice."""

    def fail() -> None:
        try:
            raise error.__new__(error)
        except error as cause:
            raise OSError("could not load\nmany lines") from cause

    with pytest.raises(ModelError, match=advice) as refusal:
        loading._from_hub("org/model", fail)
    assert "\n" not in str(refusal.value)


def test_tiny_random_is_always_the_same() -> None:
    """The same weights in every process, and the caller's random state is left alone."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, second = (tiny_random.build_model(torch.float32) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.lm_head.weight[0, 0].item() == pytest.approx(-0.2356, abs=1e-3)


def test_byte_tokenizer_reads_and_writes_any_text() -> None:
    """One token a byte: every text comes back."""
    tokenizer = tiny_random.build_tokenizer()
    for text in ("plain", "höhere Mathematik", "日本語\n\ttabs", "emoji 🚲"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_gguf_is_converted_once(smollm2: ModelUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is complete, has the EOS token that GGUF does not bring, and is not written a second time."""
    path = gguf.smollm2_path()
    folder = gguf.converted_folder(path, torch.float32)
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf.converted_folder(path, torch.float32) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified
    assert not list(folder.parent.glob(f".{folder.name}.*")), "no temporary folder is left"
    by_path = loading.describe(str(path), None, "auto", CPU)
    assert by_path.eos_token_ids == loading.describe("smollm2", None, "auto", CPU).eos_token_ids == {2}
    assert by_path.tokenizer.chat_template


def test_a_broken_gguf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no GGUF is refused in one line, and the cache stays empty."""
    monkeypatch.setenv("CBGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"broken\.gguf") as refusal:
        loading.describe(str(tmp_path / "broken.gguf"), None, "auto", CPU)
    assert "\n" not in str(refusal.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_truncated_weight_file(model_folder: Path) -> None:
    """Half a download is refused in one line."""
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError) as refusal:
        loading.load(loading.describe(str(model_folder), None, "auto", CPU), CPU)
    assert "\n" not in str(refusal.value)


def test_a_prompt_without_tokens_is_an_error_row(model_folder: Path, tmp_path: Path) -> None:
    """A tokenizer that makes nothing of white space fails that row alone."""
    words = Tokenizer(models.WordLevel({"a": 3, "b": 4, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model_folder)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a b"}, {"prompt": " "}, {"prompt": "b"}])
    out = tmp_path / "out.jsonl"
    result = cbgen("run", source, "--model", model_folder, "--out", out, "--max-tokens", 3)
    assert result.exit_code == 3, result.output
    assert [row["error"] for row in read_rows(out)] == [None, "the prompt has no tokens", None]


def test_the_end_token_is_no_text(tmp_path: Path) -> None:
    """An EOS token that the tokenizer does not know as special counts as a token and is left out of the completion."""
    folder = tmp_path / "model"
    model = build("llama")
    model.generation_config = GenerationConfig(eos_token_id=list(range(3, 200)))
    model.save_pretrained(folder)
    tiny_random.build_tokenizer().save_pretrained(folder)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(8)])
    out = tmp_path / "out.jsonl"
    assert cbgen("run", source, "--model", folder, "--out", out, "--output-token-ids").exit_code == 0
    stopped = [row for row in read_rows(out) if row["completion_ids"] and len(row["completion_ids"]) == 1]
    assert stopped, "some row stops with its first token"
    assert all(row["completion"] == "" and row["completion_tokens"] == 1 for row in stopped)
