"""int8 weights: which scheme is meant, what a calibration text changes, and that rows stay their own."""

import copy
import re

import pytest
import torch
from engine_harness import CPU, Prompt, greedy_requests, random_ids, run_all
from tiny_models import CONTEXT, ModelUnderTest, build

from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.build import build_engine
from cbgen.errors import UsageError
from cbgen.kernels.cpu.library import load_library
from cbgen.models import seam
from cbgen.models.quantization import (
    Calibrator,
    Quantization,
    _best_scales,
    _in_groups,
    _Inputs,
    _quantized,
    kernels_for,
    resolve_quantization,
)
from cbgen.models.speed import speed_up

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="this installation has no compiled kernels")


def quantized_llama(scheme: str) -> ModelUnderTest:
    """A tiny llama with integer weights, calibrated on random tokens if it needs that."""
    model = build("llama")
    reference = copy.deepcopy(model)
    shape = seam.attach(model, scheme, CONTEXT)
    assert LIBRARY is not None
    calibrator = Calibrator(LIBRARY, Quantization(scheme, "text" if scheme == "w8a8" else None))
    calibrator.observe(model, lambda ids: seam.run_alone(model, ids, CONTEXT), random_ids(200, seed=1))
    assert speed_up(model, LIBRARY, lambda: seam.trial(model, scheme, CONTEXT), calibrator.weight_of) == "layers"
    return ModelUnderTest(scheme, model, reference, shape, frozenset([1]))


@pytest.mark.parametrize(("asked", "scheme"), [("w8a8", "w8a8"), ("w8a16", "w8a16"), ("int8", None)])
def test_names(asked: str, scheme: str | None) -> None:
    """int8 means what this processor is fastest with; only activations of 8 bits come with a text."""
    assert LIBRARY is not None
    found = resolve_quantization(asked, None, LIBRARY)
    assert found is not None
    assert found.scheme == (scheme or ("w8a8" if LIBRARY.multiplies_bytes else "w8a16"))
    assert (found.text is not None) == (found.scheme == "w8a8")
    assert resolve_quantization(None, None, LIBRARY) is None


@pytest.mark.parametrize(
    ("asked", "calibration", "message"),
    [("int4", None, "--quantization int4: not one of int8, w8a8, w8a16"), ("w8a8", "missing.txt", "missing.txt")],
)
def test_what_cannot_be_is_told(asked: str, calibration: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        resolve_quantization(asked, calibration, LIBRARY)


def test_nothing_is_quantized_without_kernels() -> None:
    """Neither in another precision, nor on another device, nor in an install without a compiler."""
    assert kernels_for(CPU, torch.bfloat16) is None
    assert kernels_for(torch.device("cuda"), torch.float32) is None
    with pytest.raises(UsageError, match="needs cbgen's compiled kernels"):
        resolve_quantization("int8", None, None)


def test_results_depend_on_scheme_and_text(tmp_path) -> None:
    """A job goes on only with the text that it was begun with."""
    own = tmp_path / "own.txt"
    own.write_text("Quite another text.", encoding="utf-8")
    variants = [("w8a16", None), ("w8a8", None), ("w8a8", str(own))]
    found = [resolve_quantization(asked, text, LIBRARY) for asked, text in variants]
    assert len({quantization.identity for quantization in found if quantization}) == 3


def test_scales_bring_a_product_with_outlier_channels_closer() -> None:
    """Four input channels fifty times as large as the others: scales of groups keep them from crowding out the other
    half, and moved into the weights they leave room for those of their own group."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(256, 64, generator=generator), torch.randn(48, 64, generator=generator)
    rows[:, :4] *= 50
    scales = _best_scales(weight, _Inputs(rows.abs().amax(0), [rows]))
    exact = rows @ weight.T
    whole, plain, smooth = (
        (own @ _quantized(weight * by).T - exact).square().mean()
        for own, by in ((_quantized(rows), 1), (_in_groups(rows), 1), (_in_groups(rows / scales), scales))
    )
    assert smooth < plain / 4 and plain < 0.7 * whole


@torch.inference_mode()
def test_logits_are_near_those_of_float32() -> None:
    """Sixteen bits of activations come nearer than eight."""
    errors = {}
    for scheme in ("w8a8", "w8a16"):
        under_test = quantized_llama(scheme)
        got = seam.trial(under_test.model, scheme, CONTEXT)[0]
        reference = copy.deepcopy(under_test.reference)
        seam.attach(reference, scheme, CONTEXT)
        expected = seam.trial(reference, scheme, CONTEXT)[0]
        errors[scheme] = float((got - expected).abs().max() / expected.abs().max())
    assert 0 < errors["w8a16"] < errors["w8a8"] < 0.1


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_a_row_does_not_depend_on_its_neighbours(scheme: str, kv_cache_dtype: str) -> None:
    """Alone, in a crowd, in pieces: the same tokens."""
    under_test = quantized_llama(scheme)
    prompts = [Prompt(random_ids(5 + 3 * number, seed=number), 12) for number in range(12)]

    def run(chosen: list[Prompt], **options: object) -> list[list[int]]:
        config = ContinuousBatchingConfig(
            **{"page_size": 16, "num_blocks": 256, "kv_cache_dtype": kv_cache_dtype, **options}
        ).resolve("cpu")
        engine = build_engine(
            under_test.model, under_test.shape, torch.float32, config, under_test.eos_token_ids, CPU, 1 << 30
        )
        return [request.generated_ids for request in run_all(engine, greedy_requests(chosen))]

    together = run(prompts)
    assert [run([prompt])[0] for prompt in prompts] == together
    assert run(prompts, max_batch_tokens=17) == together
