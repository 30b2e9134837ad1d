"""Several samples of one prompt: as forks of the first of them, and as requests of their own."""

from engine_harness import engine_for, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.requests import RequestState, SamplingParams

NUM_SAMPLES = 5


def samples(prompt: list[int], max_tokens: int, first_id: int = 0, temperature: float = 1.0) -> list[RequestState]:
    """n requests for one prompt, each with draws of its own."""
    return [
        RequestState(first_id + k, list(prompt), SamplingParams(max_tokens, temperature=temperature, seed=7 * k + 1))
        for k in range(NUM_SAMPLES)
    ]


def fork_group(prompt: list[int], max_tokens: int, first_id: int = 0, temperature: float = 1.0) -> RequestState:
    """The first sample, and the others as its forks."""
    leader, *leader.forks = samples(prompt, max_tokens, first_id, temperature)
    return leader


def members_of(leaders: list[RequestState]) -> list[RequestState]:
    return [member for leader in leaders for member in (leader, *leader.forks)]


_expected: dict[tuple[str, int, tuple[int, ...]], list[list[int]]] = {}


def expected_samples(under_test: ModelUnderTest, prompt: list[int], max_tokens: int) -> list[list[int]]:
    """The same samples as separate requests that share nothing; one that fails has the tokens up to there."""
    key = (under_test.name, max_tokens, tuple(prompt))
    if key not in _expected:
        engine = engine_for(under_test, allow_block_sharing=False)
        _expected[key] = [request.generated_ids for request in run_all(engine, samples(prompt, max_tokens))]
    return _expected[key]


def assert_as_expected(under_test: ModelUnderTest, members: list[RequestState]) -> None:
    """Token for token what each sample is as a request of its own."""
    for member in members:
        assert member.error is None
        prompt = member.token_ids[: member.num_prompt_tokens]
        expected = expected_samples(under_test, prompt, member.params.max_tokens)
        assert member.generated_ids == expected[member.params.seed // 7], member.request_id
