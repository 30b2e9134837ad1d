"""Every causal language model that transformers knows, small and random: served exactly, or refused at load.

What comes out is the README's table, which `CBGEN_WRITE_README=1 pytest -m "" tests/models/test_every_model.py` writes.
"""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from engine_harness import Prompt, engine_for, greedy_requests, mixed_prompts, run_all
from models.causal_zoo import MODEL_TYPES, NOT_BUILT, PROMISED, build
from tiny_models import ModelUnderTest

from cbgen.config import SLIDING_ATTENTION
from cbgen.errors import ModelError

README = Path(__file__).parents[2] / "README.md"
MARKERS = ("<!-- models: written by tests/models/test_every_model.py -->\n", "<!-- end of models -->\n")
FULL, SLIDING = "works", "works, with sliding-window layers"
# How a refusal begins or ends, and what the table says of all that share it.
REASONS = {
    r"its layers are of type": "layers of other kinds: linear, recurrent, convolutional, sparse, chunked",
    r"does not use transformers' attention interface": "attention outside transformers' attention interface",
    r"multi-head latent attention": "multi-head latent attention",
    r"KV heads of different number or size": "KV heads that differ from layer to layer",
    r"share the KV of earlier ones": "layers that share the KV of earlier ones",
    r"attend more than once|attend through the cache": "layers that attend several times, or not at all",
    r"other logits than each alone|a packed batch fails|of chosen tokens": "positions of its own, state beside "
    "attention, or no packed batch",
    r"windows that its layers ask for": "a window in the config that its layers do not ask for",
}
outcomes: dict[str, str] = {}


def outcome_of(refusal: ModelError) -> str:
    """The table's words for a refusal, which is one line that names the model."""
    assert "\n" not in str(refusal)
    (reason,) = [words for pattern, words in REASONS.items() if re.search(pattern, str(refusal))][:1]
    return f"refused: {reason}"


def check(model_type: str) -> str:
    """Serves a few prompts, whole and in pieces, in a cache they outgrow; returns what the table says of the model."""
    try:
        under_test = ModelUnderTest.of(model_type, build(model_type), frozenset([1]))
    except ModelError as refusal:
        return outcome_of(refusal)
    prompts = [Prompt(prompt.token_ids, 12) for prompt in mixed_prompts(7, 300, longest=60, seed=3)]
    engine = engine_for(under_test, num_blocks=12, max_batch_tokens=40, safety_margin=0.0)
    for prompt, served in zip(prompts, run_all(engine, greedy_requests(prompts)), strict=True):
        assert served.error is None
        under_test.assert_parity(prompt.token_ids, prompt.max_tokens, served.generated_ids)
    return SLIDING if SLIDING_ATTENTION in under_test.shape.layer_types else FULL


@pytest.mark.parametrize("model_type", PROMISED)
def test_promised_families(model_type: str) -> None:
    """The well-known families are served, token for token."""
    outcomes[model_type] = check(model_type)
    assert outcomes[model_type] in (FULL, SLIDING)


@pytest.mark.long
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in PROMISED])
def test_other_families(model_type: str) -> None:
    """Served token for token, or refused with a reason; never anything in between."""
    outcomes[model_type] = check(model_type)


def table() -> str:
    """The README's table of outcomes, each with the model types that transformers knows it by."""
    members = defaultdict(list)
    for model_type, outcome in sorted(outcomes.items()):
        members[outcome].append(model_type)
    for model_type, reason in sorted(NOT_BUILT.items()):
        members[f"not tried: {reason}"].append(model_type)
    refused = sorted(outcome for outcome in members if outcome.startswith("refused"))
    untried = sorted(outcome for outcome in members if outcome.startswith("not tried"))
    rows = [f"| {outcome} | {', '.join(members[outcome])} |\n" for outcome in [FULL, SLIDING, *refused, *untried]]
    return "| | model types |\n| --- | --- |\n" + "".join(rows)


@pytest.mark.long
def test_readme_table() -> None:
    """The README says what the tests above found."""
    assert outcomes.keys() == set(MODEL_TYPES), "this needs the tests above, in one run"
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    if os.environ.get("CBGEN_WRITE_README"):
        README.write_text(before + MARKERS[0] + table() + MARKERS[1] + after, encoding="utf-8")
    else:
        assert text == before + MARKERS[0] + table() + MARKERS[1] + after
