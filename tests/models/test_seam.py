"""Which models are served, and that the others are refused at load, by what they do and not by what they are called."""

import copy

import pytest
import torch
from tiny_models import COMMON, CONFIGS, CONTEXT, DECODER, build
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
)

from cbgen.errors import ModelError
from cbgen.models import seam

ALIBI = BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4)
RECURRENT = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
SLIDING = MistralConfig(**COMMON, **DECODER, sliding_window=4)
SOFT_CAPPED = Gemma2Config(**COMMON, **DECODER, sliding_window=4096, layer_types=["full_attention"] * 3)
LONGROPE = LlamaConfig(**COMMON, **DECODER, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
LATENT = DeepseekV3Config(
    **COMMON | {"initializer_range": 0.02},
    **{name: value for name, value in DECODER.items() if name != "head_dim"} | {"num_key_value_heads": 4},
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)


def model_of(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_shape_comes_from_what_the_layers_do(name: str) -> None:
    """Layers, heads and sizes are seen in the trial, whatever the config's names for them."""
    shape = seam.attach(build(name), name, CONTEXT)
    assert (shape.num_layers, shape.num_heads, shape.head_dim, shape.hidden_size) == (3, 4, 16, 64)
    assert shape.num_kv_heads == (4 if name == "gpt2" else 2)
    assert (shape.vocab_size, shape.max_model_len, shape.dtype_bytes) == (320, CONTEXT, 4)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**COMMON, **DECODER, use_sliding_window=False),
        MistralConfig(**COMMON, **DECODER, sliding_window=None),
        GPTNeoXConfig(**COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96),
        OPTConfig(
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=96,
            word_embed_proj_dim=64,
        ),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_families_are_taken(config: PretrainedConfig) -> None:
    """What only attends over positions passes the trial."""
    assert seam.attach(model_of(config), "model", CONTEXT).num_layers == config.num_hidden_layers


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ALIBI, "attention interface|0 attend|logits"),
        (RECURRENT, "attention interface|0 attend|fails"),
        (SLIDING, "sliding-window attention"),
        (SOFT_CAPPED, "soft-capped attention"),
        (LONGROPE, "rotary scaling"),
        (LATENT, "latent attention"),
    ],
    ids=["alibi", "recurrent", "sliding", "soft-capped", "dynamic rope", "latent"],
)
def test_what_cannot_be_served_is_refused(config: PretrainedConfig, reason: str) -> None:
    """One line, with the model's name and the reason."""
    with pytest.raises(ModelError, match=reason) as refusal:
        seam.attach(model_of(config), "some-model", CONTEXT)
    assert "some-model" in str(refusal.value)
    assert "\n" not in str(refusal.value)
