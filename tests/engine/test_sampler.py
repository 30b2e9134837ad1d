"""Draws: greedy, filtered as transformers filters, distributed as the softmax says, and each row's own."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cbgen.engine.draws import uniform_draws
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampler
from cbgen.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=1)
PLAIN = replace(GREEDY, temperature=0.8)
FILTERED = replace(GREEDY, temperature=1.2, top_k=7, top_p=0.9)
VOCABULARY = 24
NUM_DRAWS = 20_000

FILTERS = [
    pytest.param({"temperature": 1.0}, id="plain"),
    pytest.param({"temperature": 0.6}, id="cold"),
    pytest.param({"temperature": 1.7}, id="hot"),
    pytest.param({"temperature": 1.0, "top_k": 5}, id="top_k"),
    pytest.param({"temperature": 1.0, "top_k": 500}, id="top_k above the vocabulary"),
    pytest.param({"temperature": 1.0, "top_p": 0.7}, id="top_p"),
    pytest.param({"temperature": 1.0, "top_p": 0.97}, id="wide top_p"),
    pytest.param({"temperature": 1.0, "min_p": 0.3}, id="min_p"),
    pytest.param({"temperature": 1.5, "top_k": 9, "top_p": 0.8}, id="three"),
    pytest.param({"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.25}, id="all four"),
]


def sample(logits: torch.Tensor, requests: list[RequestState]) -> list[int | None]:
    return Sampler().sample(logits, requests).token_ids


def request_at(params: SamplingParams, position: int = 0) -> RequestState:
    """A request about to draw its token number `position`."""
    request = RequestState(0, [0], params)
    request.token_ids += [0] * position
    return request


def random_logits(rows: int, vocabulary: int = VOCABULARY, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5


def even_logits(seed: int) -> torch.Tensor:
    """[vocab], so close to each other that even the least likely token comes often in NUM_DRAWS draws."""
    return torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.6


def filtered_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [vocab]: what transformers would draw from, filtered in its order."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None].double())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0]


@cache
def draw_counts(seed: int, params: SamplingParams) -> torch.Tensor:
    """[vocab]: how often each token of even_logits comes in NUM_DRAWS draws, over 400 seeds and 50 positions."""
    logits = even_logits(seed)
    seeded = [replace(params, seed=seed) for seed in range(NUM_DRAWS // 50)]
    requests = [request_at(one, position) for one in seeded for position in range(50)]
    token_ids = sample(logits.expand(NUM_DRAWS, -1), requests)
    return torch.bincount(torch.tensor(token_ids), minlength=len(logits))


def chi_square_bound(degrees: int) -> float:
    """The value passed once in 10,000 times by chance (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


@pytest.mark.parametrize("vocabulary", [1, 7, 1000])
def test_greedy_is_the_largest_logit(vocabulary):
    """Temperature 0 takes the argmax, whatever the filters and the seed say."""
    logits = random_logits(30, vocabulary, seed=1)
    requests = [request_at(replace(GREEDY, seed=row, top_k=row % 3, top_p=0.5), row) for row in range(30)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_a_draw_with_one_candidate_is_greedy(options):
    """The best token is never filtered out, and with nothing beside it every draw takes it."""
    logits = random_logits(200, seed=2)
    requests = [request_at(replace(PLAIN, **options, seed=row), row % 5) for row in range(200)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300])
def test_a_temperature_near_zero_is_greedy(params, temperature):
    """Any positive number is a temperature: dividing by a very small one may not overflow into a wrong token."""
    logits = random_logits(50, seed=3)
    requests = [request_at(replace(params, temperature=temperature, seed=row)) for row in range(50)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("options", FILTERS)
def test_the_tokens_ever_drawn_are_those_transformers_keeps(options):
    """Over many draws each token that the warpers keep comes, and no other ever does."""
    logits, params = even_logits(seed=5), replace(GREEDY, **options)
    expected = filtered_distribution(logits, params)
    assert expected[expected > 0].min() * NUM_DRAWS > 12, "each kept token must be certain to come"
    assert torch.equal(draw_counts(5, params) > 0, expected > 0)


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize("seed", [5, pytest.param(6, marks=pytest.mark.long)])
def test_draws_follow_the_filtered_distribution(options, seed):
    """The counts of 20,000 draws pass a chi-square test against the exact distribution."""
    logits, params = even_logits(seed), replace(GREEDY, **options)
    probabilities, counts = filtered_distribution(logits, params), draw_counts(seed, params)
    kept = probabilities > 0
    expected = probabilities[kept] * NUM_DRAWS
    statistic = ((counts[kept] - expected) ** 2 / expected).sum().item()
    assert statistic < chi_square_bound(int(kept.sum()) - 1)


def mixed_requests(count: int) -> list[RequestState]:
    """Greedy, plain and filtered rows by turns, with seeds of the whole 64 bits."""
    rng = np.random.default_rng(7)
    seeds = [0, 2**64 - 1, *rng.integers(0, 2**64, size=count - 2, dtype=np.uint64).tolist()]
    hot = replace(PLAIN, temperature=3.0)
    kinds = [GREEDY, PLAIN, FILTERED, hot, replace(hot, top_k=40), replace(PLAIN, top_p=0.6)]
    return [request_at(replace(kinds[row % 6], seed=seed), row % 11) for row, seed in enumerate(seeds)]


@pytest.mark.parametrize("vocabulary", [50, 1003])
def test_a_row_draws_the_same_alone_and_in_any_company(vocabulary):
    """Neither the neighbours, nor their parameters, nor the order changes what a row draws."""
    logits, requests = random_logits(60, vocabulary, seed=8), mixed_requests(60)
    together = sample(logits, requests)
    assert [sample(logits[row : row + 1], [requests[row]])[0] for row in range(60)] == together
    order = np.random.default_rng(9).permutation(60).tolist()
    assert sample(logits[order], [requests[row] for row in order]) == [together[row] for row in order]
    assert len(set(together)) > 10, "the rows must differ for the order to matter"


def test_seed_and_position_both_move_the_draw():
    """Samples of one prompt differ by seed, and the tokens of one sample by position."""
    logits = torch.zeros(300, 1000)
    by_seed = sample(logits, [request_at(replace(PLAIN, seed=n)) for n in range(300)])
    by_position = sample(logits, [request_at(PLAIN, n) for n in range(300)])
    for token_ids in (by_seed, by_position):
        assert len(set(token_ids)) > 230, "about 259 of 1,000 equally likely tokens are expected"


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FILTERED], ids=["greedy", "plain", "filtered"])
@pytest.mark.parametrize("poison", [[torch.nan], [torch.inf], [-torch.inf] * VOCABULARY, [torch.nan, torch.inf]])
@pytest.mark.parametrize("row", [0, 4, 9])
def test_a_row_that_is_not_finite_gives_none_and_harms_nobody(row, poison, params):
    """NaN or infinity in one row is that row's failure; the others draw as if it were not there."""
    logits, requests = random_logits(10, seed=10), mixed_requests(10)
    requests[row] = request_at(params)
    expected = sample(logits, requests)
    expected[row] = None
    logits[row, VOCABULARY - len(poison) :] = torch.tensor(poison)
    assert sample(logits, requests) == expected


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FILTERED], ids=["greedy", "plain", "filtered"])
def test_a_masked_token_is_never_drawn(params):
    """Minus infinity on some tokens is a mask that models use, not a failure."""
    logits = random_logits(400, seed=11)
    masked = torch.rand(400, VOCABULARY, generator=torch.Generator().manual_seed(12)) < 0.7
    masked[:, 3] = False
    requests = [request_at(replace(params, seed=row)) for row in range(400)]
    token_ids = sample(logits.masked_fill(masked, -torch.inf), requests)
    assert not any(masked[row, token_id] for row, token_id in enumerate(token_ids))


def seed_that_draws_first(output: int) -> int:
    """SplitMix64 backwards: the seed whose number 0 is this output."""
    state = output ^ (output >> 31) ^ (output >> 62)
    state = state * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state ^= (state >> 27) ^ (state >> 54)
    state = state * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    state ^= (state >> 30) ^ (state >> 60)
    return (state - 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.999}], ids=["plain", "top_k", "top_p"])
@pytest.mark.parametrize(("output", "draw"), [(0, 0.0), (2**64 - 1, 1 - 2**-53)], ids=["smallest", "largest"])
def test_the_extreme_draws_take_a_token_with_weight(output, draw, options):
    """A draw of exactly 0, or the last before 1, may not fall on a masked token at either end of the vocabulary."""
    seed = seed_that_draws_first(output)
    assert uniform_draws(np.array([seed], dtype=np.uint64), np.zeros(1, dtype=np.uint64)).tolist() == [draw]
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.3, 0.2, 0.1, -torch.inf]])
    expected = 2 if draw == 0.0 else 4
    assert sample(logits, [request_at(replace(PLAIN, **options, seed=seed))]) == [expected]


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_draws_are_those_of_splitmix64(seed, outputs):
    """Published outputs of the generator, their upper 53 bits as a fraction: the same on every machine."""
    positions = np.arange(len(outputs), dtype=np.uint64)
    draws = uniform_draws(np.full(len(outputs), seed, dtype=np.uint64), positions)
    assert draws.tolist() == [(output >> 11) / 2**53 for output in outputs]


def streams(num_streams: int, length: int) -> np.ndarray:
    """[num_streams, length]: the draws of neighbouring seeds."""
    seeds, positions = np.divmod(np.arange(num_streams * length, dtype=np.uint64), np.uint64(length))
    return uniform_draws(seeds, positions).reshape(num_streams, length)


def test_draws_are_uniform():
    """In [0, 1), with the mean and the variance of a uniform distribution, along seeds and along positions."""
    for draws in (streams(1, 100_000), streams(100_000, 1), streams(300, 300)):
        assert draws.dtype == np.float64
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        sigma = (1 / 12 / draws.size) ** 0.5
        assert abs(draws.mean() - 0.5) < 4 * sigma
        assert draws.var() == pytest.approx(1 / 12, rel=0.02)


def test_streams_are_not_correlated():
    """Neighbouring seeds, and neighbouring positions of one seed, have nothing to do with each other."""
    draws = streams(20, 20_000)
    between = np.corrcoef(draws) - np.eye(20)
    assert np.abs(between).max() < 4.5 / 20_000**0.5
    for stream in draws:
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 4.5 / 20_000**0.5
