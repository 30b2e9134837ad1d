"""Outputs of random tokens, each one among those that a structure allows."""

import json
from typing import Any

import numpy as np

from cbgen.engine.grammars import Grammars, Structure
from cbgen.models.tiny_random import build_tokenizer

EOS_ID = 257
TOKENIZER = build_tokenizer()


def byte_grammars(vocab_size: int = 258) -> Grammars:
    return Grammars(TOKENIZER, vocab_size, frozenset({EOS_ID}))


def schema_structure(schema: dict[str, Any]) -> Structure:
    return "json_schema", json.dumps(schema, ensure_ascii=False)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)


def allows(grammars: Grammars, structure: Structure, text: str) -> bool:
    """Whether the whole of `text` may be the output."""
    matcher = grammars.matcher(structure)
    for token_id in tokens_of(text):
        if not grammars.allowed([matcher])[0, token_id]:
            return False
        matcher.advance([token_id])
    return matcher.may_end


def random_outputs(grammars: Grammars, structures: list[Structure], seed: int, most: int) -> list[str | None]:
    """For each structure the text of at most so many allowed tokens, drawn evenly; None where it came to no end."""
    draws = np.random.default_rng(seed)
    matchers = [grammars.matcher(structure) for structure in structures]
    outputs: list[list[int]] = [[] for _ in structures]
    going = list(range(len(structures)))
    for _ in range(most):
        if not going:
            break
        allowed = grammars.allowed([matchers[row] for row in going]).numpy()
        for row, mask in zip(list(going), allowed, strict=True):
            assert matchers[row].error is None
            outputs[row].append(int(draws.choice(np.flatnonzero(mask))))
            matchers[row].catch_up(outputs[row])
            if outputs[row][-1] == EOS_ID or matchers[row].is_complete:
                going.remove(row)
    texts = [TOKENIZER.decode([token_id for token_id in output if token_id != EOS_ID]) for output in outputs]
    return [None if row in going else text for row, text in enumerate(texts)]
