"""Tiny random models of several families, built in the test; weights large enough that one token stands out."""

import copy
from collections import Counter
from dataclasses import dataclass, field

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from cbgen.config import ModelShape
from cbgen.kernels.cpu.library import load_library
from cbgen.models import seam
from cbgen.models.speed import speed_up

CONTEXT = 512
WINDOW = 24  # of the sliding layers: no multiple of a page of 16, so that rings hold more than the window
NEAR_TIE = 1e-4  # law 9: the reference's two best logits are closer than this
COMMON = {"vocab_size": 320, "initializer_range": 0.25, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **DECODER),
    "qwen3": Qwen3Config(**COMMON, **DECODER),
    "gpt2": GPT2Config(**COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=CONTEXT),
    # Every layer sees WINDOW tokens; then one layer of three that sees all.
    "mistral": MistralConfig(**COMMON, **DECODER, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        **DECODER,
        sliding_window=WINDOW,
        tie_word_embeddings=False,  # tied ones repeat the last token of the prompt, whatever came before
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

PARITY: Counter[str] = Counter()
# Of sampled jobs done in several ways without --deterministic: rows whose tokens differed, and rows compared.
SAMPLED_ROWS: dict[str, tuple[int, int]] = {}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model with its own attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.float32).eval()


@dataclass
class ModelUnderTest:
    """A model that attends through cbgen, beside an untouched copy that answers what is right."""

    name: str
    model: PreTrainedModel
    reference: PreTrainedModel
    shape: ModelShape
    eos_token_ids: frozenset[int]
    _generated: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, model: PreTrainedModel, eos_token_ids: frozenset[int]) -> "ModelUnderTest":
        reference = copy.deepcopy(model)
        reference.set_attn_implementation("eager")  # the one that serves every option of a layer
        context = getattr(model.config.get_text_config(), "max_position_embeddings", CONTEXT)
        shape = seam.attach(model, name, context)
        library = load_library()
        if library is not None:
            speed_up(model, library, lambda: seam.trial(model, name, context))
        return cls(name, model, reference, shape, eos_token_ids)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The reference's greedy tokens for one prompt alone."""
        key = (max_tokens, *prompt)
        if key not in self._generated:
            output = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(self.eos_token_ids) or None,
                pad_token_id=2,
            )
            self._generated[key] = output[0, len(prompt) :].tolist()
        return self._generated[key]

    def assert_parity(self, prompt: list[int], max_tokens: int, ours: list[int]) -> None:
        """Law 9: token for token, or a near tie of the reference at the first difference; counted in PARITY."""
        expected = self.generate(prompt, max_tokens)
        if ours == expected:
            PARITY[f"{self.name}: equal throughout"] += 1
            return
        place = next((i for i, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1]), None)
        assert place is not None, f"{len(ours)} tokens instead of {len(expected)}, equal as far as they go"
        gap = self._best_two_gap(prompt + expected[:place])
        assert gap < NEAR_TIE, f"token {place} of a prompt of {len(prompt)}: {ours[place]} instead of {expected[place]}"
        PARITY[f"{self.name}: differed at a near tie"] += 1

    @torch.inference_mode()
    def _best_two_gap(self, token_ids: list[int]) -> float:
        best = self.reference(torch.tensor([token_ids]), use_cache=False).logits[0, -1].topk(2).values
        return (best[0] - best[1]).item()
