"""Which models are served, and that the others are refused at load, by what they do and not by what they are called."""

import copy

import pytest
import torch
from tiny_models import COMMON, CONFIGS, CONTEXT, DECODER, WINDOW, build
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION
from cbgen.errors import ModelError
from cbgen.models import seam

FULL, SLIDING = FULL_ATTENTION, SLIDING_ATTENTION
HYBRID = [SLIDING, FULL, SLIDING]
SHORT_CONTEXT = 128
SHORT = 4  # a window that the trial outgrows
FOUR_LAYERS = DECODER | {"num_hidden_layers": 4}
NO_HEAD_DIM = {name: value for name, value in DECODER.items() if name != "head_dim"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

SERVED_IN_FULL: list[PretrainedConfig] = [
    Qwen2Config(**COMMON, **DECODER, use_sliding_window=False),
    MistralConfig(**COMMON, **DECODER, sliding_window=None),
    GPTNeoXConfig(**COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96),
    OPTConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=64
    ),
]
SLIDING_CONFIGS: list[tuple[PretrainedConfig, list[str]]] = [
    (MistralConfig(**COMMON, **DECODER, sliding_window=SHORT), [SLIDING] * 3),
    (Phi3Config(**COMMON, **NO_HEAD_DIM, sliding_window=SHORT), [SLIDING] * 3),
    (
        Qwen2Config(**COMMON, **DECODER, use_sliding_window=True, sliding_window=SHORT, max_window_layers=1),
        [FULL, SLIDING, SLIDING],
    ),
    (Gemma2Config(**COMMON, **DECODER, sliding_window=SHORT, layer_types=HYBRID, attn_logit_softcapping=2.0), HYBRID),
    (Gemma3TextConfig(**COMMON, **DECODER, sliding_window=SHORT, layer_types=HYBRID), HYBRID),
    (Cohere2Config(**COMMON, **DECODER, sliding_window=SHORT, layer_types=HYBRID, logit_scale=1.0), HYBRID),
    (
        GptOssConfig(
            **COMMON,
            **DECODER,
            sliding_window=SHORT,
            layer_types=HYBRID,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=DEFAULT_ROPE,
        ),
        HYBRID,
    ),
]
# What each asks of its attention beside windows; the others nothing.
SPECIAL = {Gemma2Config: ("softcap",), GptOssConfig: ("sinks",)}
KV_SHARED = Gemma3nTextConfig(
    **COMMON,
    **FOUR_LAYERS,
    sliding_window=SHORT,
    layer_types=[SLIDING, FULL] * 2,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=320,
    hidden_size_per_layer_input=16,
    laurel_rank=8,
)
TWO_HEAD_SIZES = Gemma4TextConfig(
    **COMMON,
    **DECODER,
    sliding_window=SHORT,
    layer_types=[SLIDING, SLIDING, FULL],
    global_head_dim=32,
    vocab_size_per_layer_input=320,
    hidden_size_per_layer_input=16,
)
CHUNKED = Llama4TextConfig(
    **COMMON, **FOUR_LAYERS, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=SHORT
)
LINEAR = Qwen3NextConfig(
    **COMMON,
    **FOUR_LAYERS,
    **EXPERTS,
    num_experts=4,
    shared_expert_intermediate_size=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LATENT = DeepseekV3Config(
    **COMMON | {"initializer_range": 0.02},
    **NO_HEAD_DIM | {"num_key_value_heads": 4},
    **EXPERTS,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "alibi": (
        FalconConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        "attention interface",
    ),
    "recurrent": (MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4), "linear_attention"),
    "convolution": (Lfm2Config(**COMMON, **DECODER, layer_types=["conv", FULL, "conv"]), "type conv"),
    "linear attention": (LINEAR, "type linear_attention"),
    "chunked attention": (CHUNKED, "type chunked_attention"),
    "shared KV": (KV_SHARED, "last 2 layers share the KV"),
    "two head sizes": (TWO_HEAD_SIZES, "different number or size"),
    "latent attention": (LATENT, "latent attention"),
}
ROPES: dict[str, tuple[PretrainedConfig, int]] = {
    "dynamic": (LlamaConfig(**COMMON, **DECODER, rope_parameters=DYNAMIC_ROPE), CONTEXT),
    "longrope": (
        Phi3Config(
            **COMMON,
            **NO_HEAD_DIM,
            sliding_window=None,
            original_max_position_embeddings=SHORT_CONTEXT,
            rope_parameters=LONGROPE,
        ),
        SHORT_CONTEXT,
    ),
    "dynamic in full layers": (
        Gemma3TextConfig(
            **COMMON, **DECODER, layer_types=HYBRID, rope_parameters={SLIDING: DEFAULT_ROPE, FULL: DYNAMIC_ROPE}
        ),
        CONTEXT,
    ),
}


def model_of(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()


def name_of(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, PretrainedConfig) else ""


def assert_refused(model: torch.nn.Module, reason: str, max_model_len: int = CONTEXT) -> None:
    """One line, with the model's name and the reason."""
    with pytest.raises(ModelError, match=reason) as refusal:
        seam.attach(model, "some-model", max_model_len)
    assert "some-model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_shape_comes_from_what_the_layers_do(name: str) -> None:
    """Layers, heads and sizes are seen in the trial, whatever the config's names for them."""
    shape = seam.attach(build(name), name, CONTEXT)
    assert (shape.num_layers, shape.num_heads, shape.head_dim, shape.hidden_size) == (3, 4, 16, 64)
    assert shape.num_kv_heads == (4 if name == "gpt2" else 2)
    assert (shape.vocab_size, shape.max_model_len, shape.dtype_bytes) == (320, CONTEXT, 4)
    expected = {"mistral": [SLIDING] * 3, "gemma3": HYBRID}.get(name, [FULL] * 3)
    assert list(shape.layer_types) == expected
    assert shape.sliding_window == (WINDOW if SLIDING in expected else None)


@pytest.mark.parametrize("config", SERVED_IN_FULL, ids=name_of)
def test_other_families_are_taken(config: PretrainedConfig) -> None:
    """What only attends over positions passes the trial."""
    shape = seam.attach(model_of(config), "model", CONTEXT)
    assert shape.layer_types == (FULL,) * config.num_hidden_layers
    assert shape.sliding_window is None
    assert shape.special_attention == ()


@pytest.mark.parametrize(("config", "layer_types"), SLIDING_CONFIGS, ids=name_of)
def test_windows_caps_and_sinks_are_served(config: PretrainedConfig, layer_types: list[str]) -> None:
    """Each layer is of the type that it attends by; the trial outgrows the window, so that a wrong one would show."""
    shape = seam.attach(model_of(config), "model", CONTEXT)
    assert list(shape.layer_types) == layer_types
    assert shape.sliding_window == SHORT
    assert shape.special_attention == SPECIAL.get(type(config), ())


@pytest.mark.parametrize(
    ("config", "layer_types"),
    [
        (MistralConfig(**COMMON, **DECODER, sliding_window=CONTEXT), [SLIDING] * 3),
        (Gemma3TextConfig(**COMMON, **DECODER, sliding_window=CONTEXT, layer_types=HYBRID), HYBRID),
    ],
    ids=name_of,
)
def test_a_window_that_no_request_outgrows_is_full_attention(config: PretrainedConfig, layer_types: list[str]) -> None:
    """Nothing is ever hidden by it, and full attention can share blocks."""
    model = model_of(config)
    within, beyond = (seam.attach(model, "model", context) for context in (CONTEXT, CONTEXT + 1))
    assert (list(within.layer_types), within.sliding_window) == ([FULL] * 3, None)
    assert (list(beyond.layer_types), beyond.sliding_window) == (layer_types, CONTEXT)


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused(config: PretrainedConfig, reason: str) -> None:
    """Whether the config says it or the trial shows it."""
    assert_refused(model_of(config), reason)


def test_a_config_without_a_longest_position_is_refused_in_one_line() -> None:
    """BLOOM's has none: positions are biases by distance, which have no end."""
    assert_refused(model_of(BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4)), "attention interface")


@pytest.mark.parametrize(("config", "limit"), ROPES.values(), ids=ROPES)
def test_rotary_scaling_by_the_longest_row_is_served_up_to_where_it_begins(
    config: PretrainedConfig, limit: int
) -> None:
    """Beyond that a row would depend on its neighbours; the message names the option that helps."""
    assert seam.attach(model_of(config), "some-model", limit).max_model_len == limit
    assert_refused(model_of(config), rf"rotary scaling \((dynamic|longrope)\).*--max-model-len {limit} ", limit + 1)


@pytest.mark.parametrize("layer_types", [[FULL] * 3, [FULL, SLIDING, SLIDING]], ids=["no window", "other layers"])
def test_layers_that_disagree_with_their_config_are_refused(layer_types: list[str]) -> None:
    """The cache is sized by the config before there is a model to try."""
    model = build("gemma3")
    model.config.layer_types = layer_types
    assert_refused(model, "not those of its config")


def test_layers_with_different_windows_are_refused() -> None:
    """A cache has one ring size."""
    model = build("gemma3")
    model.model.layers[2].self_attn.sliding_window = WINDOW + 1
    assert_refused(model, rf"windows of different sizes \({WINDOW}, {WINDOW + 1}\)")


class SeesOneMore(torch.nn.Module):
    """A layer's attention that is given another window than the one it asks its attention function for."""

    def __init__(self, attention: torch.nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, *args: object, attention_mask: torch.Tensor | None = None, **kwargs: object) -> object:
        if attention_mask is not None:
            distance = torch.arange(attention_mask.shape[-2])[:, None] - torch.arange(attention_mask.shape[-1])
            attention_mask = attention_mask.masked_fill(distance == SHORT, 0.0)
        return self.attention(*args, attention_mask=attention_mask, **kwargs)


def test_a_window_that_is_not_kept_shows_in_the_logits() -> None:
    """One visible key more than asked for, in a model's own attention, is enough to be refused."""
    model = model_of(SLIDING_CONFIGS[0][0])
    model.model.layers[1].self_attn = SeesOneMore(model.model.layers[1].self_attn)
    assert_refused(model, "other logits")
