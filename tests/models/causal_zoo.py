"""A small random model of every causal language model type that transformers knows.

One table of sizes serves all families: a field of that name gets that value wherever a configuration class declares it,
in nested configurations too. A list of layer kinds keeps the family's own pattern, shortened so that each kind still
occurs. What is left over stands in OVERRIDES; what cannot be built stands in NOT_BUILT.
"""

from dataclasses import fields
from typing import Any

import torch
from tiny_models import COMMON, CONTEXT
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
HEADS = 4
EXPERTS = 4
WINDOW = 16  # shorter than the tests' prompts, so that what has left the window is missed


# The families that people ask for first; whatever else changes, these are served.
PROMISED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "phi3"),
    *("cohere2", "olmo2", "gpt2", "gpt_neox", "opt", "stablelm", "mixtral", "smollm3", "granite"),
)


def _all(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **COMMON,
    **_all(COMMON["vocab_size"], "unpadded_vocab_size vocab_size_per_layer_input audio_vocab_size shape_vocab_size"),
    **_all(COMMON["vocab_size"], "pronunciation_vocab_size encoder_hash_byte_group_vocab"),
    **_all(COMMON["initializer_range"], "init_std embed_init_std"),
    **_all(CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    **_all(LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks encoder_layers decoder_layers"),
    **_all(HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    **_all(HEADS, "encoder_attention_heads decoder_attention_heads linear_num_value_heads linear_num_heads"),
    **_all(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads n_groups"),
    **_all(8, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    **_all(64, "hidden_size d_model n_embd emb_dim lru_width embedding_size input_embedding_size hidden_size_global"),
    **_all(64, "output_embedding_size pronunciation_embed_dim shape_embed_dim adapter_in_dim adapter_out_dim"),
    **_all(64, "adapter_input_size nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"),
    **_all(96, "intermediate_size ffn_dim dff dim_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"),
    **_all(96, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_all(96, "moe_shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size"),
    **_all(96, "intermediate_size_mlp expert_ffn_hidden_size feed_forward_size"),
    **_all(16, "head_dim dim_head attention_head_size v_head_dim qk_nope_head_dim index_head_dim linear_head_dim"),
    **_all(16, "linear_key_head_dim linear_value_head_dim swa_head_dim kv_channels mamba_head_dim"),
    **_all(16, "mamba_d_state state_size ssm_state_size chunk_size mamba_chunk_size index_topk"),
    **_all(8, "qk_rope_head_dim rotary_dim"),
    **_all(32, "kv_lora_rank q_lora_rank o_lora_rank router_hidden_size hidden_size_per_layer_input laurel_rank"),
    **_all(WINDOW, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    **_all(WINDOW, "attention_chunk_size"),
    **_all(EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_all(2, "num_experts_per_tok moe_topk moe_k zero_expert_num"),
    **_all(1, "n_group topk_group first_k_dense_replace n_shared_experts"),
    **_all(True, "is_decoder causal"),  # BERT and its like attend to both sides unless they are told
    "tie_word_embeddings": False,  # tied to a scaled embedding, the head only repeats the last token
    "index_n_heads": 16,  # with few, many keys score exactly 0, and the choice among them is nobody's business
    # Generation configurations are made of these; generate would force or forbid tokens.
    **_all(None, "forced_eos_token_id begin_suppress_tokens"),
    "encoder_no_repeat_ngram_size": 0,
    "decoder_start_token_id": 0,
}

SLIDING_THEN_FULL = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
CONV_AND_FULL = ["conv", "full_attention"] * (LAYERS // 2)

# Normed after each block, not before: large weights make all positions alike, and one token is repeated for ever.
POST_NORM = (
    "bart bert big_bird blenderbot-small camembert data2vec-text electra ernie marian mvp plbart roberta roc_bert "
    "roformer trocr xlm-roberta xmod"
)

# By the model type of the configuration class, nested ones too.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"num_hidden_layers": LAYERS},  # its configuration has none, yet generate asks for it
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "logit_scale": 1.0,
        "layer_types": SLIDING_THEN_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "ngpt_alpha_init": 0.5},
    "dots3_note_text": {
        "head_dim": 24,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "hrm_text": {"num_hidden_layers": 1},  # run eight times, and rounding grows with every run
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": SLIDING_THEN_FULL},
    "lfm2": {"layer_types": CONV_AND_FULL},
    "lfm2_moe": {"layer_types": CONV_AND_FULL, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING_THEN_FULL},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2),
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 4,
    },
    "moshi": {"sliding_window": CONTEXT},  # its cache forgets what has left the window, its mask does not
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"w_init_variance_scale": 1.0},
    "reformer": {
        "attn_layers": ["local", "lsh"] * (LAYERS // 2),
        "axial_pos_shape": [16, CONTEXT // 16],
        "axial_pos_embds_dim": [32, 32],
        "hash_seed": 0,
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"] * (LAYERS // 2)},
}

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm and pillow; gemma3n_text is built",
    "gemma4_assistant": "a drafter: it reads the keys and hidden states of its main model",
    "gemma4_unified_assistant": "a drafter: it reads the keys and hidden states of its main model",
    "musicgen": "writes audio codes, and AutoModelForCausalLM hands its class the wrong configuration",
    "musicgen_melody": "writes audio codes, and AutoModelForCausalLM hands its class the wrong configuration",
    "prophetnet": "an encoder-decoder whose decoder alone raises when generate uses its cache",
}

MODEL_TYPES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_BUILT.keys())


def small_config(model_type: str) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_small(config_class))


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with its own attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float32).eval()
        if model_type == "openai-gpt":  # its blocks do not read initializer_range, and attention would hardly count
            for parameter in model.transformer.h.parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    return model


def _small(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The arguments that make a small configuration of this class."""
    names = {field.name for field in fields(config_class)}
    default = config_class()
    arguments = {name: value for name, value in SIZES.items() if name in names}
    if config_class.model_type in POST_NORM.split():
        arguments |= {name: 0.1 for name in ("initializer_range", "init_std") if name in names}
    if "kv_lora_rank" in names:  # latent attention has one key head per query head
        arguments["num_key_value_heads"] = HEADS
    for name in names:
        if name in config_class.sub_configs and isinstance(nested := getattr(default, name), PretrainedConfig):
            arguments[name] = _small(type(nested)) | {"model_type": nested.model_type}
        elif name.endswith("layer_types") or name == "layers_block_type":
            arguments[name] = _shortened(getattr(default, name))
    return arguments | OVERRIDES.get(config_class.model_type, {})


def _shortened(kinds: list[str] | None) -> list[str] | None:
    """A pattern of layer kinds cut to LAYERS; kinds that come only later take the last places."""
    if kinds is None:
        return None
    late = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:LAYERS]]
    return kinds[: LAYERS - len(late)] + late
