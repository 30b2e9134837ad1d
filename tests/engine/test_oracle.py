"""The tiny models of these tests tell right from wrong: what they answer hangs on what they were to attend to."""

import pytest
from engine_harness import random_ids
from tiny_models import ModelUnderTest


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "coarse"])
def test_answers_depend_on_tokens_before_the_last(request: pytest.FixtureRequest, name: str) -> None:
    """Another token a few places before the end gives most prompts another answer."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    num_different = 0
    for seed in range(8):
        prompt = random_ids(40, seed=seed)
        answers = [under_test.generate([*prompt[:-6], token, *prompt[-5:]], 6) for token in (5, 6)]
        num_different += answers[0] != answers[1]
    assert num_different > 4
