"""With --deterministic a row's logits have the same bits however it is served: batch, pieces, sharing, offloading."""

from collections import defaultdict

import pytest
import torch
from engine_harness import CPU, Prompt, engine_for, mixed_prompts, random_ids, run_all
from models.causal_zoo import build as build_zoo
from tiny_models import CONFIGS, ModelUnderTest, build

import cbgen.engine.execution
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.fixed_products import FixedProducts, multiplies_in_torch
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampled
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError

# Layers all of cbgen's own; then MLPs, or experts, that torch multiplies.
OURS = ["llama", "mistral", "qwen3", "gemma3"]
TORCHS = ["gpt2", "qwen3_moe", "gpt_oss", "jetmoe"]
PREFIX = random_ids(64, seed=9)
PROMPTS = [
    *mixed_prompts(10, 320, longest=150, most=10, seed=5),
    *(Prompt([*PREFIX, *random_ids(5 + number, seed=number)], 6) for number in range(5)),
]
CHOICES = [{}, {}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}]
WAYS = {
    "one in a batch": {"max_requests_per_batch": 1},
    "three in a batch": {"max_requests_per_batch": 3},
    "pieces of 16 tokens": {"max_batch_tokens": 16},
    "pieces of 5 tokens": {"max_batch_tokens": 5},
    "prompts first": {"max_batch_tokens": 23, "scheduler_type": "prefill_first"},
    "nothing shared": {"allow_block_sharing": False},
    "a small cache": {"num_blocks": 12, "safety_margin": 0.0},
    "a small cache and a swap pool": {"num_blocks": 12, "safety_margin": 0.0, "cpu_offload_space": 0.01},
}
Rows = dict[int, list[bytes]]


@pytest.fixture(scope="module", params=[*OURS, *TORCHS])
def under_test(request: pytest.FixtureRequest) -> ModelUnderTest:
    name: str = request.param
    return ModelUnderTest.of(name, build(name) if name in CONFIGS else build_zoo(name), frozenset([1]))


def served(engine: Engine, prompts: list[Prompt]) -> tuple[list[list[int]], Rows]:
    """The tokens of each row, and the bytes of the logits that each of them was sampled from."""
    logits_of: Rows = defaultdict(list)
    sampler = engine.manager.passes.sampler
    sample = sampler.sample

    def recorded(logits: torch.Tensor, requests: list[RequestState]) -> Sampled:
        for row, request in zip(logits, requests, strict=True):
            logits_of[request.request_id].append(row.numpy().tobytes())
        return sample(logits, requests)

    requests = [
        RequestState(n, list(p.token_ids), SamplingParams(p.max_tokens, seed=1000 * n + 1, **CHOICES[n % 5]))
        for n, p in enumerate(prompts)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample", recorded)
        run_all(engine, requests)
    assert all(request.error is None for request in requests)
    return [request.generated_ids for request in requests], dict(logits_of)


_expected: dict[str, tuple[list[list[int]], Rows]] = {}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_in_another_way(under_test: ModelUnderTest, way: str) -> None:
    """Greedy and sampled rows: every token, and every logit it was taken from."""
    if under_test.name not in _expected:
        _expected[under_test.name] = served(engine_for(under_test, deterministic=True), PROMPTS)
    tokens, logits = served(engine_for(under_test, deterministic=True, **WAYS[way]), PROMPTS)
    expected_tokens, expected_logits = _expected[under_test.name]
    assert tokens == expected_tokens
    different = [number for number in expected_logits if logits[number] != expected_logits[number]]
    assert not different, "rows with the same tokens, but other bits in their logits"


@pytest.mark.parametrize("name", TORCHS)
def test_without_it_the_bits_depend_on_the_batch(name: str) -> None:
    """What the option is for: a model of which torch multiplies a part. Else the tests above would show nothing."""
    model = ModelUnderTest.of(name, build(name) if name in CONFIGS else build_zoo(name), frozenset([1]))
    assert multiplies_in_torch(model.model)
    together, alone = (
        served(engine_for(model, **WAYS[way]), PROMPTS)[1] for way in ("nothing shared", "one in a batch")
    )
    assert together != alone


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_done_for_models_that_are_the_same_anyhow(name: str) -> None:
    """Where cbgen multiplies, products stay as they are."""
    model = ModelUnderTest.of(name, build(name), frozenset([1]))
    assert not multiplies_in_torch(model.model)


def test_kernels_that_depend_on_the_batch_are_refused(
    tiny_llama: ModelUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiled kernels there is no such promise, and no run that breaks it."""
    config = engine_for(tiny_llama, deterministic=True).config
    monkeypatch.setattr(cbgen.engine.execution, "load_library", lambda: None)
    with pytest.raises(UsageError, match=r"--deterministic: .*needs cbgen's compiled kernels"):
        build_engine(tiny_llama.model, tiny_llama.shape, torch.float32, config, frozenset(), CPU, 4 << 30)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
def test_products_in_pieces_are_products(count: int) -> None:
    """Every kind of product gives what torch gives for any number of rows, to rounding."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((count, 24), (40, 24), (40,)))
    experts, ends = torch.randn(3, 24, 40, generator=generator), torch.tensor([count // 3, count // 3, count])
    kinds = [
        lambda: torch.nn.functional.linear(rows[None], weight, bias),
        lambda: torch.nn.functional.linear(rows, weight),
        lambda: torch.addmm(bias, rows, weight.T),
        lambda: rows @ weight.T,
        lambda: torch.mm(rows, weight.T),
        lambda: torch._grouped_mm(rows, experts, offs=ends.int()) if count else rows,
        lambda: torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(1)) @ rows[:, :1].T[None],
    ]
    for product in kinds:
        with FixedProducts():
            ours = product()
        torch.testing.assert_close(ours, product())


def test_a_product_that_cannot_be_cut_is_refused() -> None:
    """One line names it, before anything is written."""
    with FixedProducts(), pytest.raises(UsageError, match=r"torch\.bmm"):
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    with FixedProducts(), pytest.raises(UsageError, match=r"torch\.matmul"):
        torch.ones(2, 3, 4) @ torch.ones(2, 4, 5)
