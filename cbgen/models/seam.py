"""The seam with transformers: a model is registered, tried on a few tokens, and refused if its answers differ.

The trial packs two short sequences into one batch, as the engine does, with attention done by plain torch, and compares
the logits with those of the model's own forward pass on each sequence alone. Whatever a model does beside attention
over positions (state carried from token to token, layers that bypass the attention function, biases by distance) shows
in the logits, so that nothing has to be known of it by name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelShape
from cbgen.engine.model_runner import attention_forward, attention_options, serving_attention
from cbgen.errors import ModelError, first_line
from cbgen.kernels.sdpa import attend_sequence, visibility_mask

IMPLEMENTATION = "cbgen"
# The model's own attention that the trial is compared with: the one that every option of a layer is written for.
OWN_IMPLEMENTATION = "eager"
TRIAL_LENGTHS = (7, 5)
# The largest difference of logits, relative to the largest logit, that is put down to rounding.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# How often other tokens are tried: in half precision a near tie in the routing of experts may fall either way once.
MAX_TRIALS = 4
# What layers tell their attention function beside scaling, and it heeds.
ATTENTION_KEYWORDS = ("sliding_window", "softcap", "s_aux")
# Of these, what not every kernel does, by the name it has in a ModelShape.
SPECIAL_KEYWORDS = {"softcap": "softcap", "s_aux": "sinks"}
# Rotary scalings that change for the whole batch once a position in it is past the original context: a row's
# neighbours would change it.
ROPE_TYPES_BY_LONGEST_ROW = ("longrope", "dynamic")


class _Trial:
    """Attends causally within each of the packed sequences, and notes what the layers ask for."""

    def __init__(self, max_model_len: int, lengths: Sequence[int] = TRIAL_LENGTHS) -> None:
        self.max_model_len = max_model_len
        self._lengths = lengths
        self.layers: list[int] = []
        self.windows: list[int | None] = []
        self.kv_shapes: set[tuple[int, int, int]] = set()  # kv_heads, head size of K, head size of V
        self.asked: dict[int, dict[str, Any]] = {}  # the keywords of each layer that change its attention

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        window = options.get("sliding_window")
        self.layers.append(layer)
        self.windows.append(effective_window(window, self.max_model_len))
        self.kv_shapes.add((key.shape[1], key.shape[3], value.shape[3]))
        self.asked[layer] = {"scaling": scaling} | {name: options.get(name) for name in ATTENTION_KEYWORDS}
        asked = attention_options(query.shape[-1], scaling, options)
        pieces = zip(*(tensor[0].transpose(0, 1).split(self._lengths) for tensor in (query, key, value)), strict=True)
        outputs = [attend_sequence(q, k, v, visibility_mask(len(q), 0, window, q.device), asked) for q, k, v in pieces]
        return torch.cat(outputs)[None]

    def direct(self, *_: Any) -> None:
        """See LayerAttention: what a layer asks is to be seen here."""

    wanted = None


@torch.inference_mode()
def attach(model: PreTrainedModel, name: str, max_model_len: int) -> ModelShape:
    """Makes the model attend through cbgen and returns its shape. Raises ModelError for one that cannot be served."""
    refuse_by_config(model.config.get_text_config(), max_model_len, name)
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    differences: list[float] = []
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    while not differences or (min(differences) > tolerance and len(differences) < MAX_TRIALS):
        shape, difference = _try(model, name, max_model_len, seed=len(differences))
        differences.append(difference)
    if not min(differences) <= tolerance:
        raise refused(
            name,
            f"two sequences in one batch give other logits than each alone (by {min(differences):.1e}), so it "
            "does more than attention over positions (recurrent state, biases by distance, positions of its own)",
        )
    return shape


@torch.inference_mode()
def trial(model: PreTrainedModel, name: str, max_model_len: int) -> tuple[torch.Tensor, dict[int, dict[str, Any]]]:
    """Logits [2, vocab] of an attached model over a packed batch of two short sequences, always the same, and what each
    layer asks of its attention."""
    generator = torch.Generator().manual_seed(MAX_TRIALS)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, sum(TRIAL_LENGTHS)), generator=generator)
    attention = _Trial(max_model_len)
    return _run_trial(model, ids.to(model.device), attention, name), attention.asked


def run_alone(model: PreTrainedModel, ids: torch.Tensor, max_model_len: int) -> None:
    """A forward pass of an attached model over one sequence [1, T], with the logits of every token."""
    with serving_attention(_Trial(max_model_len, [ids.shape[1]])):
        model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False, logits_to_keep=0)


def _try(model: PreTrainedModel, name: str, max_model_len: int, seed: int) -> tuple[ModelShape, float]:
    """The shape found with tokens drawn from `seed`, and the largest difference of logits relative to the largest."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, sum(TRIAL_LENGTHS)), generator=generator).to(model.device)
    model.set_attn_implementation(OWN_IMPLEMENTATION)
    own = torch.cat([model(input_ids=part, use_cache=False).logits[0, -1:] for part in ids.split(TRIAL_LENGTHS, dim=1)])
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config.get_text_config()._attn_implementation != IMPLEMENTATION:
        raise refused(name, f"{type(model).__name__} does not use transformers' attention interface")
    trial = _Trial(max_model_len)
    packed = _run_trial(model, ids, trial, name)
    shape = _shape_of(trial, model, own.shape[-1], max_model_len, name)
    if packed.shape != own.shape:
        raise refused(name, f"{type(model).__name__} does not give the logits of chosen tokens alone")
    return shape, ((packed - own).abs().max() / own.abs().max()).item()


def _run_trial(model: PreTrainedModel, ids: torch.Tensor, trial: _Trial, name: str) -> torch.Tensor:
    """The logits [2, vocab] at the end of each sequence of a packed forward pass."""
    positions = torch.cat([torch.arange(length) for length in TRIAL_LENGTHS])[None].to(ids.device)
    ends = torch.tensor(TRIAL_LENGTHS, device=ids.device).cumsum(0) - 1
    try:
        with serving_attention(trial):
            output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=ends)
    except (TypeError, RuntimeError, KeyError, AttributeError, ValueError) as error:
        raise refused(name, f"its forward pass over a packed batch fails: {first_line(error)}") from error
    return output.logits[0]


def _shape_of(trial: _Trial, model: PreTrainedModel, vocab_size: int, max_model_len: int, name: str) -> ModelShape:
    config = model.config.get_text_config()
    num_attending = len(set(trial.layers))
    if num_attending != config.num_hidden_layers:
        raise refused(name, f"of its {config.num_hidden_layers} layers, {num_attending} attend through the cache")
    if trial.layers != list(range(config.num_hidden_layers)):
        raise refused(name, "its layers attend more than once in a forward pass, or not in order")
    if len(trial.kv_shapes) != 1:
        raise refused(name, "its layers have KV heads of different number or size")
    num_kv_heads, key_dim, value_dim = next(iter(trial.kv_shapes))
    if key_dim != value_dim:
        raise refused(
            name, f"its K heads have {key_dim} numbers and its V heads {value_dim} (multi-head latent attention)"
        )
    windows = sorted({window for window in trial.windows if window is not None})
    if len(windows) > 1:
        raise refused(name, f"its layers have windows of different sizes ({', '.join(map(str, windows))})")
    layer_types = tuple(FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in trial.windows)
    if layer_types != layer_types_of(config, max_model_len):
        raise refused(name, "the windows that its layers ask for are not those of its config")
    return ModelShape(
        layer_types=layer_types,
        sliding_window=windows[0] if windows else None,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=key_dim,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype_bytes=model.dtype.itemsize,
        special_attention=tuple(
            name
            for keyword, name in SPECIAL_KEYWORDS.items()
            if any(asked[keyword] is not None for asked in trial.asked.values())
        ),
    )


def effective_window(window: int | None, max_model_len: int) -> int | None:
    """A window that no request outgrows hides nothing: that is full attention, and its blocks can be shared."""
    return None if window is None or window >= max_model_len else window


def layer_types_of(config: Any, max_model_len: int) -> tuple[str, ...]:
    """The type of each layer as the config has it: its layer_types, or all sliding if it has a window, or all full."""
    window = effective_window(getattr(config, "sliding_window", None), max_model_len)
    own = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    listed = getattr(config, "layer_types", None) or (own,) * config.num_hidden_layers
    return tuple(own if listed_type == SLIDING_ATTENTION else listed_type for listed_type in listed)


def refuse_by_config(config: Any, max_model_len: int, name: str) -> None:
    """What the config says outright, and what a short trial would not show."""
    others = sorted(set(layer_types_of(config, max_model_len)) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if others:
        known = f"{FULL_ATTENTION} and {SLIDING_ATTENTION}"
        raise refused(name, f"its layers are of type {', '.join(others)}; only {known} are served")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refused(name, f"its last {config.num_kv_shared_layers} layers share the KV of earlier ones")
    parameters = getattr(config, "rope_parameters", None) or {}
    for group in [parameters, *(group for group in parameters.values() if isinstance(group, dict))]:
        rope_type, own = group.get("rope_type"), getattr(config, "max_position_embeddings", max_model_len)
        limit = min(own, group.get("original_max_position_embeddings") or own)
        if rope_type in ROPE_TYPES_BY_LONGEST_ROW and max_model_len > limit:
            raise refused(
                name,
                f"beyond {limit} tokens its rotary scaling ({rope_type}) depends on the longest row of a batch; "
                f"--max-model-len {limit} serves it",
            )


def refused(name: str, reason: str) -> ModelError:
    return ModelError(f"--model {name}: not supported: {reason}")
