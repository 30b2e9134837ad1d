"""What a run computes and reads, counted in other ways; what a machine can do, by its order of size alone."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from engine_harness import CPU, engine_for, greedy_requests, mixed_prompts
from models.causal_zoo import EXPERTS, build
from tiny_models import ModelUnderTest

from cbgen.bench import work
from cbgen.bench.profile import profiling
from cbgen.bench.work import Ceilings, ModelCosts, Work, bare_model, expert_weights, visible_tokens
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest
from cbgen.engine.sources import ListSource
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cpu.linear import IntegerWeight, PackedWeight
from cbgen.models.cpu_layer import FastDecoderLayer
from cbgen.models.cpu_modules import GatedMLP, PackedLinear
from cbgen.models.loading import describe, load
from cbgen.models.quantization import Quantization

NO_KERNELS = "cbgen's kernels are not compiled in this installation"
W8A8, W8A16 = Quantization("w8a8", "A short text to calibrate with."), Quantization("w8a16", None)
has_kernels = pytest.mark.skipif(load_library() is None, reason=NO_KERNELS)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_visible_tokens_are_counted_one_by_one(window: int | None) -> None:
    """The closed form against a loop over query tokens."""
    for start in (0, 1, 4, 5, 6, 50):
        for end in (start + 1, start + 3, start + 120):
            one_by_one = sum(min(position + 1, window or end) for position in range(start, end))
            assert visible_tokens(start, end, window) == one_by_one


def test_parameters_used_per_token() -> None:
    """All matrices of a dense model but its embedding, whatever class they have; of experts, those that are taken."""
    for name in ("llama", "gpt2", "qwen3_moe"):
        under_test = ModelUnderTest.of(name, build(name), frozenset())
        model = under_test.reference  # as it was loaded, with transformers' own modules
        costs = ModelCosts.of(model, under_test.shape, kv_token_bytes=1.0)
        embeddings = sum(w.numel() for part, w in model.named_parameters() if "embed" in part or "wte" in part)
        positions = sum(w.numel() for part, w in model.named_parameters() if "wpe" in part)
        head = 0 if model.config.tie_word_embeddings else model.get_output_embeddings().weight.numel()
        vectors = sum(weights.numel() for weights in model.parameters() if weights.dim() == 1)
        routers = sum(w.numel() for part, w in model.named_parameters() if part.endswith("mlp.gate.weight"))
        experts = sum(weights.numel() for weights in expert_weights(model))
        taken = experts * (getattr(model.config, "num_experts_per_tok", 0) / EXPERTS)
        whole = sum(weights.numel() for weights in model.parameters())
        assert (experts > 0) == (name == "qwen3_moe")
        left = whole - embeddings - positions - head - vectors - routers - experts
        assert costs.layer_parameters == left + taken
        assert costs.head_parameters == model.get_output_embeddings().weight.numel()
        # As they are held, in four bytes each: none of the experts, which the passes say how many are read of.
        assert costs.layer_bytes == 4 * left
        assert costs.head_bytes == 4 * costs.head_parameters
        assert costs.expert_bytes == 4 * experts


def test_weights_are_read_once_per_pass() -> None:
    """The layers in every pass, the head where a token is sampled, and no more of the experts than tokens can take."""
    under_test = ModelUnderTest.of("qwen3_moe", build("qwen3_moe"), frozenset())
    costs = ModelCosts.of(under_test.reference, under_test.shape, kv_token_bytes=10.0)
    counted = Work.of(under_test.shape)
    request = RequestState(0, list(range(40)), SamplingParams(4))
    for start, length, samples in ((0, 39, False), (39, 1, True), (40, 1, True)):
        counted.count(ScheduledBatch([ScheduledRequest(request, start, length, 0, samples)]))
    assert {tokens: count for tokens, count in enumerate(counted.passes) if count} == {39: 1, 1: 2}
    assert (counted.num_steps, counted.sampling_passes) == (3, 2)
    taken = under_test.reference.config.num_experts_per_tok / EXPERTS
    assert 0 < taken < 1
    experts = costs.expert_bytes * (1 + 2 * taken)
    assert costs.weight_bytes(counted) == pytest.approx(3 * costs.layer_bytes + 2 * costs.head_bytes + experts)
    assert Work(**json.loads(json.dumps(asdict(counted)))) == replace(
        counted, layers=[[*kind] for kind in counted.layers]
    )
    kv_tokens = under_test.shape.num_layers * (39 + 40 + 41)
    assert costs.read_bytes(counted) - costs.weight_bytes(counted) == pytest.approx(10 * kv_tokens)


def test_an_engine_s_passes_are_counted(tiny: ModelUnderTest) -> None:
    """Each once, with its tokens; a prompt in pieces has passes of its own that sample nothing."""
    engine = engine_for(tiny, allow_block_sharing=False, max_batch_tokens=16, max_requests_per_batch=1)
    requests = greedy_requests(mixed_prompts(3, tiny.shape.vocab_size, longest=60, most=8))
    with profiling(engine, tiny.model, tiny.shape, CPU) as profiler:
        list(engine.manager.run(ListSource(requests)))
    counted = profiler.work
    assert sum(counted.passes) == counted.num_steps == engine.manager.metrics.num_steps
    assert sum(tokens * count for tokens, count in enumerate(counted.passes)) == counted.query_tokens
    assert counted.sampling_passes == counted.sampled_tokens == sum(r.num_generated_tokens for r in requests)
    assert counted.sampling_passes < counted.num_steps


@has_kernels
@pytest.mark.parametrize("quantization", [None, W8A8, W8A16], ids=lambda own: own and own.scheme)
def test_bytes_are_those_of_the_weights_that_are_held(quantization: Quantization | None) -> None:
    """Packed weights with their scales, but for what fills up a panel of outputs."""
    description = describe("tiny-random", None, "float32", CPU)
    model, shape = load(description, CPU, quantization)
    costs = ModelCosts.of(bare_model(description), shape, 1.0, quantization)
    packed = list({id(weight): weight for module in model.modules() for weight in packed_weights(module)}.values())
    assert {type(weight) for weight in packed} == {PackedWeight if quantization is None else IntegerWeight}
    held = sum(weight._packed.nbytes + getattr(weight, "_scales", torch.empty(0)).nbytes for weight in packed)
    told = costs.layer_bytes + costs.head_bytes
    assert told <= held < 1.1 * told
    outputs = sum(weight.out_features for weight in packed)
    numbers = sum(weight.out_features * weight.in_features for weight in packed)
    assert told == (4 * numbers if quantization is None else numbers + 4 * outputs)


def packed_weights(module: torch.nn.Module) -> list[Any]:
    if isinstance(module, FastDecoderLayer):
        parts = module._kernel.parts
        return [parts.qkv, parts.out, parts.gate_up, parts.down]
    if isinstance(module, GatedMLP):
        return [module.gate_up, module.down]
    return [module.products.weight] if isinstance(module, PackedLinear) else []


def test_sixteen_bits_take_half_the_bytes() -> None:
    """A model in bfloat16 is read in bfloat16."""
    costs = []
    for dtype in ("float32", "bfloat16"):
        description = describe("tiny-random", None, dtype, CPU)
        shape = load(description, CPU)[1]
        costs.append(ModelCosts.of(bare_model(description), shape, 1.0))
    assert costs[0].layer_bytes == 2 * costs[1].layer_bytes
    assert costs[0].head_bytes == 2 * costs[1].head_bytes


@pytest.mark.parametrize(
    ("dtype", "quantization", "whose"),
    [
        ("float32", None, {"torch", "cbgen"}),
        ("bfloat16", None, {"torch"}),
        pytest.param("float32", W8A8, {"cbgen", "oneDNN"}, marks=has_kernels),
        pytest.param("float32", W8A16, {"cbgen"}, marks=has_kernels),
    ],
)
def test_the_ceiling_is_of_the_precision_of_the_run(
    dtype: str, quantization: Quantization | None, whose: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what was multiplied, by whom and in which shape, one of the model's layers."""
    monkeypatch.setattr(work, "MATRIX_SECONDS", 0.05)  # any speed will do
    monkeypatch.setattr(work, "READ_TRIES", 1)
    model = bare_model(describe("tiny-random", None, dtype, CPU))
    ceilings = Ceilings.measure(model, CPU, quantization)
    assert ceilings.dtype == ("int8" if quantization else dtype)
    assert ceilings.products in whose
    assert ceilings.best_shape[0] == 512
    assert tuple(ceilings.best_shape[1:]) in {(64, 64), (32, 64), (128, 64), (64, 128)}
    assert ceilings.matrix_flops_per_s > 1e6
    assert ceilings.read_bytes_per_s > 1e6


@has_kernels
@pytest.mark.parametrize("quantization", [None, W8A8, W8A16], ids=lambda own: own and own.scheme)
def test_what_is_timed_is_a_product_of_that_shape(quantization: Quantization | None) -> None:
    """Of all who multiply in that precision; oneDNN is among them where this torch has it."""
    makers = work._products(torch.float32, CPU, quantization)
    for make in makers.values():
        out: Any = make(5, 48, 64)()
        assert (out.shape, out.dtype) == ((5, 48), torch.float32)
    expected = {None: {"torch", "cbgen"}, W8A16: {"cbgen"}}.get(quantization, {"cbgen", "oneDNN"})
    assert set(makers) == expected - (set() if work._multiplies_bytes() else {"oneDNN"})
