"""What layers ask of their attention beside a window: soft caps, sinks, and models that lack one type of layer."""

import pytest
from engine_harness import Prompt, assert_parity, engine_for, greedy_requests, model_of, random_ids, run_all
from tiny_models import COMMON, CONFIGS, DECODER, WINDOW
from transformers import Gemma2Config, GptOssConfig, PretrainedConfig

from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION

FULL_FIRST = [FULL_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION]
# Scores of random weights reach the cap, so that a missing one shows.
GEMMA2 = Gemma2Config(
    **COMMON, **DECODER, sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
)
GPT_OSS = GptOssConfig(
    **COMMON,
    **DECODER,
    sliding_window=WINDOW,
    num_local_experts=4,
    num_experts_per_tok=2,
    layer_types=FULL_FIRST,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
KINDS: dict[str, tuple[PretrainedConfig, dict[str, object]]] = {
    "soft-capped": (GEMMA2, {}),
    "soft-capped, full": (GEMMA2, {"layer_types": [FULL_ATTENTION] * 3}),
    "sinks": (GPT_OSS, {}),
    "sinks, sliding": (GPT_OSS, {"layer_types": [SLIDING_ATTENTION] * 3}),
    "hybrid family without sliding layers": (CONFIGS["gemma3"], {"layer_types": [FULL_ATTENTION] * 3}),
    "hybrid family without full layers": (CONFIGS["gemma3"], {"layer_types": [SLIDING_ATTENTION] * 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_models_own_forward(kind: str) -> None:
    """Soft-capped attention (Gemma 2), sinks, one layer type missing: equal to the model's own forward pass."""
    config, changes = KINDS[kind]
    under_test = model_of(kind, config, tie_word_embeddings=False, **changes)
    prompts = [Prompt(random_ids(length, seed=length), 8) for length in (1, WINDOW, WINDOW + 1, 70)]
    for options in (
        {},
        {"max_batch_tokens": 11},
        {"num_blocks": 6, "safety_margin": 0.0, "cpu_offload_space": 0.01, "max_batch_tokens": 20},
    ):
        engine = engine_for(under_test, **options)
        types = {group.attention_type for group in engine.plan.layout.groups}
        assert types == set(changes.get("layer_types", [FULL_ATTENTION, SLIDING_ATTENTION]))
        assert engine.manager.cache.shares_blocks == (types == {FULL_ATTENTION})
        assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))
