"""From a name to a model: a folder, a hub id, a GGUF file, smollm2 or tiny-random; description first, weights later."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from cbgen.config import ModelShape
from cbgen.device import supports_bfloat16
from cbgen.errors import ModelError, UsageError, first_line
from cbgen.kernels.cpu.library import Library
from cbgen.models import gguf, seam, tiny_random
from cbgen.models.gguf import sampled_bytes
from cbgen.models.quantization import Calibrator, Quantization, kernels_for
from cbgen.models.speed import speed_up

TINY_RANDOM = "tiny-random"
SMOLLM2 = "smollm2"
IDENTITY_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelDescription:
    """All that is known of a model before its weights are loaded.

    location: what transformers loads from; None for the model made in memory. identity: tells this model's results from
    another's, for the job's fingerprint. sampling_defaults: what its generation config says of SamplingParams;
    not_followed: what else it says, by name.
    """

    name: str
    location: str | None
    revision: str | None
    dtype: torch.dtype
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    max_model_len: int
    identity: str
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    not_followed: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def is_local(self) -> bool:
        """Whether it comes from a path or from memory, where there are no revisions."""
        return self.location is None or Path(self.location).is_dir()


def describe(
    name: str,
    revision: str | None,
    dtype_name: str,
    device: torch.device,
    max_model_len: int | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> ModelDescription:
    """Finds a model and reads all but its weights. Raises ModelError or UsageError with what to do.

    notify: told in a line when something takes a while.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 8)))  # the cores are the engine's
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if name == TINY_RANDOM:
        return _describe_tiny(_pick_dtype(dtype_name, None, device, name), max_model_len)
    path = Path(name).expanduser()
    if name == SMOLLM2 and not path.exists():
        path = gguf.smollm2_path()
    if path.suffix == ".gguf":
        return _describe_gguf(name, path, _pick_dtype(dtype_name, None, device, name), max_model_len, notify)
    if not path.is_dir() and (path.is_file() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UsageError(f"--model {name}: no such model folder or .gguf file")
    location = str(path) if path.is_dir() else name
    config = _from_hub(name, lambda: AutoConfig.from_pretrained(location, revision=revision))
    tokenizer = _from_hub(name, lambda: AutoTokenizer.from_pretrained(location, revision=revision))
    generation = _generation_config(location, revision)
    dtype = _pick_dtype(dtype_name, config.dtype, device, name)
    commit = getattr(config, "_commit_hash", None)
    identity = commit or (_folder_identity(path) if path.is_dir() else f"{name}@{revision}")
    return _description(
        name, location, commit or revision, dtype, config, tokenizer, generation, identity, max_model_len
    )


def load(
    description: ModelDescription, device: torch.device, quantization: Quantization | None = None
) -> tuple[PreTrainedModel, ModelShape]:
    """Loads the weights and makes the model attend through cbgen. Raises ModelError when it is not supported.

    On a CPU its layers are replaced by faster ones, with integer weights if a quantization is asked for.
    """
    if description.location is None:
        model: Any = tiny_random.build_model(description.dtype)
    else:
        model = _from_hub(
            description.name,
            lambda: AutoModelForCausalLM.from_pretrained(
                description.location, revision=description.revision, dtype=description.dtype
            ),
        )
    model = model.to(device).eval()
    shape = seam.attach(model, description.name, description.max_model_len)
    library = kernels_for(device, description.dtype)
    if library is not None:
        _speed_up(model, library, description, quantization)
    return model, shape


def _speed_up(
    model: PreTrainedModel, library: Library, description: ModelDescription, quantization: Quantization | None
) -> None:
    context = description.max_model_len
    weight_of = None
    if quantization is not None:
        calibrator = Calibrator(library, quantization)
        weight_of = calibrator.weight_of
        if quantization.text is not None:
            token_ids = description.tokenizer(quantization.text)["input_ids"][:context]
            calibrator.observe(model, lambda ids: seam.run_alone(model, ids, context), token_ids)
    extent = speed_up(model, library, lambda: seam.trial(model, description.name, context), weight_of)
    if extent == "none" and quantization is not None:
        raise ModelError(
            f"--model {description.name}: its linear layers cannot be replaced, so --quantization has nothing to act on"
        )


def _describe_tiny(dtype: torch.dtype, max_model_len: int | None) -> ModelDescription:
    config, tokenizer = tiny_random.build_config(), tiny_random.build_tokenizer()
    generation = tiny_random.build_generation_config()
    return _description(TINY_RANDOM, None, None, dtype, config, tokenizer, generation, TINY_RANDOM, max_model_len)


def _describe_gguf(
    name: str, path: Path, dtype: torch.dtype, max_model_len: int | None, notify: Callable[[str], None]
) -> ModelDescription:
    if not path.is_file():
        raise UsageError(f"--model {name}: no such file")
    folder = gguf.converted_folder(path, dtype, notify)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generation = _generation_config(str(folder), None)
    return _description(name, str(folder), None, dtype, config, tokenizer, generation, folder.name, max_model_len)


def _description(
    name: str,
    location: str | None,
    revision: str | None,
    dtype: torch.dtype,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    identity: str,
    max_model_len: int | None,
) -> ModelDescription:
    return ModelDescription(
        name=name,
        location=location,
        revision=revision,
        dtype=dtype,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(generation, config, tokenizer),
        max_model_len=_context(config, max_model_len, name),
        identity=identity,
        sampling_defaults=_sampling_defaults(generation),
        not_followed=_not_followed(generation),
    )


def _from_hub(name: str, read: Any) -> Any:
    """Calls `read`, which asks transformers for a part of a model, and says in one line what went wrong."""
    try:
        return read()
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"--model {name}: {_hub_advice(error)}") from error


def _hub_advice(error: Exception) -> str:
    chain = [error, error.__cause__, error.__context__]
    if any(isinstance(link, GatedRepoError) for link in chain):
        return "the model is gated: accept its terms on its hub page, then run `hf auth login` or set HF_TOKEN"
    if any(isinstance(link, RepositoryNotFoundError | HFValidationError) for link in chain):
        return "not a folder, a .gguf file, smollm2, tiny-random or a hub id (private ones need `hf auth login`)"
    if any(isinstance(link, LocalEntryNotFoundError) for link in chain) or "offline" in str(error).lower():
        return (
            "not in the local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set): give the path of a "
            "folder or .gguf file, or run once with a connection"
        )
    return first_line(error)


def _pick_dtype(name: str, own: torch.dtype | None, device: torch.device, model: str) -> torch.dtype:
    """auto: float32 on CPUs, where bfloat16 is slower without matrix units; elsewhere 16 bits.

    Those are the model's own, or bfloat16 where the device has it: float32 would take twice the memory there, and
    the fast attention of CUDA takes 16 bits alone.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UsageError(f"--dtype {name}: not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cpu" or (model == TINY_RANDOM and device.type != "cuda"):
        return torch.float32
    return torch.float16 if own == torch.float16 or not supports_bfloat16(device) else torch.bfloat16


def _generation_config(location: str, revision: str | None) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(location, revision=revision or "main")
    except OSError:  # a model without one: everything is at its default
        return GenerationConfig()


def _eos_token_ids(
    generation: GenerationConfig, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The generation config's list if it has one, else the model's, else the tokenizer's."""
    for found in (
        generation.eos_token_id,
        getattr(config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


# Of a generation config: what sampling goes by, and what holds for greedy generation as well.
_DRAWN = ("temperature", "top_p", "top_k", "min_p")
_ALWAYS = {"repetition_penalty": "repetition_penalty", "max_tokens": "max_new_tokens"}
# What changes the output and is not followed, and the value with which it does not.
NOT_FOLLOWED: dict[str, Any] = {
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "sequence_bias": {},
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "stop_strings": [],
}


def _sampling_defaults(generation: GenerationConfig) -> dict[str, float | int]:
    """Only a generation config that asks for sampling has a say in how tokens are drawn; otherwise greedy."""
    names = {name: name for name in _DRAWN} if generation.do_sample else {}
    found = {ours: getattr(generation, theirs) for ours, theirs in (names | _ALWAYS).items()}
    drawn = {"temperature": 1.0} if generation.do_sample else {}
    return drawn | {name: value for name, value in found.items() if value is not None}


def _not_followed(generation: GenerationConfig) -> tuple[str, ...]:
    """The names in a generation config that would change the output and do not."""
    return tuple(
        name
        for name, neutral in NOT_FOLLOWED.items()
        if (value := getattr(generation, name, None)) is not None and value != neutral
    )


def _context(config: PretrainedConfig, asked: int | None, name: str) -> int:
    own: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    if own is None and asked is None:
        raise UsageError(f"--model {name}: its config does not say how long its context is; give --max-model-len")
    if own is not None and asked is not None and asked > own:
        raise UsageError(f"--max-model-len {asked}: the context of this model is {own}")
    if asked is not None and asked < 2:
        raise UsageError(f"--max-model-len {asked}: at least 2 is needed, one token of prompt and one of output")
    return asked or own


def _folder_identity(folder: Path) -> str:
    """What a folder's results depend on, and not when or where it was written: all its small files, and a sample of
    each weight file."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        if path.suffix in IDENTITY_SUFFIXES:
            digest.update(f"{path.name} {path.stat().st_size}".encode() + sampled_bytes(path))
    return digest.hexdigest()
