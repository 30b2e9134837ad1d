"""`--model tiny-random`: a very small Llama with a byte tokenizer, made in memory from a fixed seed; no download."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20_260_101
BOS, EOS = "<|begin|>", "<|end|>"
# Weights this large make one token stand out at every step, so that greedy output does not hang on rounding.
INITIALIZER_RANGE = 0.25
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the 256 bytes, one each for the begin and the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE, model_max_length=2048
    )


def build_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )


def build_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights every time, whatever the caller's random state, which stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = LlamaForCausalLM(build_config())
    model.generation_config = build_generation_config()
    return model.to(dtype)


def build_generation_config() -> GenerationConfig:
    return GenerationConfig(bos_token_id=256, eos_token_id=257)
