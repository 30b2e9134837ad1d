"""What a model will look like to the cache and how much its weights take, from its config alone: nothing is loaded."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cbgen.config import SLIDING_ATTENTION, ModelShape
from cbgen.errors import first_line
from cbgen.models import seam
from cbgen.models.loading import ModelDescription


def expected_shape(description: ModelDescription) -> ModelShape:
    """The shape that the probe at load will find, for a model that is served.

    Raises ModelError for one whose config says that it is not, or does not say enough.
    """
    config: Any = description.config.get_text_config()
    try:
        return _shape_in(config, description)
    except AttributeError as error:
        raise seam.refused(description.name, f"its config does not tell its shape: {first_line(error)}") from error


def _shape_in(config: Any, description: ModelDescription) -> ModelShape:
    seam.refuse_by_config(config, description.max_model_len, description.name)
    if getattr(config, "kv_lora_rank", None):
        raise seam.refused(description.name, "its keys and values are compressed (multi-head latent attention)")
    layer_types = seam.layer_types_of(config, description.max_model_len)
    num_heads = config.num_attention_heads
    return ModelShape(
        layer_types=layer_types,
        sliding_window=config.sliding_window if SLIDING_ATTENTION in layer_types else None,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=description.max_model_len,
        dtype_bytes=description.dtype.itemsize,
        special_attention=_special_attention(config, description),
    )


def _special_attention(config: Any, description: ModelDescription) -> tuple[str, ...]:
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith(".sinks") for name, _ in _without_weights(description).named_parameters())
    return tuple(name for name, is_there in (("softcap", softcap), ("sinks", sinks)) if is_there)


def weight_bytes(description: ModelDescription) -> int:
    """Bytes of the weights in the dtype they will be loaded in; tied ones count once."""
    return sum(weights.numel() * weights.element_size() for weights in _without_weights(description).parameters())


def _without_weights(description: ModelDescription) -> torch.nn.Module:
    """The model as its config has it, in no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(description.config, dtype=description.dtype)
