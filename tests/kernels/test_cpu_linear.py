"""Linear layers in C, in float32 and in integers, and what stands between them, against float64 and exact integers."""

import random
from collections.abc import Callable

import pytest
import torch
from kernels.layer_parts import DIM, HEADS, KV_HEADS, WIDTH, layer_parts, randn
from torch.nn import functional

from cbgen.kernels.cpu.library import Library, library_for, runnable_isas
from cbgen.kernels.cpu.linear import BYTES_WEIGHT, GROUP, IntegerWeight, LayerKernel, PackedWeight, gated, rms_norm

ISAS = runnable_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="this installation has no compiled kernels")
# Outputs, inputs and rows around the sizes of panels, pieces of panels and blocks of rows.
OUTPUTS = [1, 3, 8, 15, 16, 17, 31, 33, 64, 100]
INPUTS = [1, 2, 3, 5, 64, 287, 288, 289, 700]
ROWS = [1, 2, 5, 6, 7, 12, 13, 95, 97, 200]
FLOAT_EPSILON = 2e-6  # of a sum of products, relative to the sum of their sizes
Maker = Callable[..., PackedWeight]


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest) -> Library:
    return library_for(request.param)


class Watched(IntegerWeight):
    """Keeps the last input as it was quantized."""

    def _levels(self, rows: int) -> torch.Tensor:
        self.quantized = super()._levels(rows)
        return self.quantized

    @property
    def input_levels(self) -> torch.Tensor:
        """int64 [rows, groups, numbers that share a scale], zeros after the last of a row"""
        if self._kind == BYTES_WEIGHT:
            return self.quantized[:, : self._depth].reshape(-1, self._depth // GROUP, GROUP).long()
        return self.quantized[:, : 2 * self._depth].contiguous().view(torch.int16)[:, None].long()

    @property
    def input_scales(self) -> torch.Tensor:
        """float32 [rows, groups]"""
        begin, groups = (self._depth, self._depth // GROUP) if self._kind == BYTES_WEIGHT else (2 * self._depth, 1)
        return self.quantized[:, begin : begin + 4 * groups].contiguous().view(torch.float32)

    @property
    def limit(self) -> int:
        """The largest level."""
        return 127 if self._kind == BYTES_WEIGHT else int(self.struct.limit)

    @property
    def _depth(self) -> int:
        unit = GROUP if self._kind == BYTES_WEIGHT else 4
        return -(-self.in_features // unit) * unit


INTEGER_KINDS = [
    pytest.param(lambda *given: Watched(*given[:3], 8, *given[3:]), id="8 bits"),
    pytest.param(lambda *given: Watched(*given[:3], 16, *given[3:]), id="16 bits"),
]
EVERY_KIND = [pytest.param(PackedWeight, id="float32"), *INTEGER_KINDS]


def sizes(count: int) -> list[tuple[int, int, int]]:
    rng = random.Random(0)
    return [(rng.choice(OUTPUTS), rng.choice(INPUTS), rng.choice(ROWS)) for _ in range(count)]


@pytest.mark.parametrize("n, k, m", sizes(60))
@pytest.mark.parametrize("with_bias", [False, True])
def test_float32_equals_float64(library: Library, n: int, k: int, m: int, with_bias: bool) -> None:
    """Any number of outputs, inputs and rows; rows may lie apart, and nothing beside the output is written."""
    weight, x, bias = randn(n, k), randn(m, k + 5, seed=1)[:, :k], randn(n, seed=2) if with_bias else None
    packed = PackedWeight(library, weight, bias)
    out = torch.full((m, n + 3), torch.nan)
    packed._multiply(packed.struct, x.data_ptr(), x.stride(0), m, out.data_ptr(), n + 3, None)
    assert out[:, n:].isnan().all()
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    bound = functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    assert ((out[:, :n] - exact).abs() <= FLOAT_EPSILON * bound).all()
    assert torch.equal(packed.multiply(x), out[:, :n])


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("k", [5, 300, 2500])
def test_a_row_does_not_depend_on_the_others(library: Library, kind: Maker, k: int) -> None:
    """To the bit: alone, among few, among many, and beside rows of NaN or infinity."""
    weight = kind(library, randn(50, k), randn(50, seed=1))
    x = randn(200, k, seed=2)
    whole = weight.multiply(x)
    for count in (1, 2, 6, 7, 13, 97):
        assert torch.equal(weight.multiply(x[:count]), whole[:count])
        assert torch.equal(weight.multiply(x[-count:]), whole[-count:])
    strange = {3: torch.nan, 10: torch.inf, 11: -torch.inf, 199: torch.nan}
    for row, number in strange.items():
        x[row, row % k] = number
    out = weight.multiply(x)
    others = [row for row in range(200) if row not in strange]
    assert torch.equal(out[others], whole[others])
    assert not out[list(strange)].isfinite().any()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_number_of_threads(library: Library, kind: Maker) -> None:
    """More than there is work for, too: every panel is taken by somebody, and the bits are the same."""
    own = kind(library, randn(1100, 40), None)
    x = randn(150, 40, seed=1)
    before, expected = torch.get_num_threads(), own.multiply(x)
    try:
        for threads in (1, 2, 3, 8, 70):
            torch.set_num_threads(threads)
            assert torch.equal(own.multiply(x), expected), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_shapes_and_zeros(library: Library, kind: Maker) -> None:
    """Any dimensions in front, no rows at all, other float types; of zeros the bias alone remains."""
    weight, bias = kind(library, randn(9, 20), randn(9, seed=1)), randn(9, seed=1)
    x = randn(2, 3, 20, seed=2)
    out = weight.multiply(x)
    assert out.shape == (2, 3, 9)
    assert torch.equal(out[1, 2], weight.multiply(x[1, 2:])[0])
    assert torch.equal(weight.multiply(x.double()), out)
    assert weight.multiply(x[:0]).shape == (0, 3, 9)
    assert torch.equal(weight.multiply(torch.zeros(4, 20)), bias.expand(4, 9))
    assert torch.equal(kind(library, torch.zeros(9, 20), bias).multiply(x), bias.expand(2, 3, 9))


@pytest.mark.parametrize("kind", INTEGER_KINDS)
@pytest.mark.parametrize("n, k, m", sizes(30))
@pytest.mark.parametrize("with_scales", [False, True])
def test_integers_are_exact(library: Library, kind: Maker, n: int, k: int, m: int, with_scales: bool) -> None:
    """Input levels are the nearest ones, and what comes out is their products, each group of them times its scale."""
    weight, x = randn(n, k), randn(m, k, seed=1) * torch.logspace(-3, 3, m)[:, None]
    scales_in = randn(k, seed=2).abs() + 0.1 if with_scales else None
    layer = kind(library, weight, None, scales_in)
    out = layer.multiply(x)
    levels, scales = layer.input_levels, layer.input_scales
    padding = levels[0].numel() - k
    scaled = functional.pad(x if scales_in is None else x * scales_in, (0, padding)).view(levels.shape)
    assert torch.equal(scales, scaled.abs().amax(2) / layer.limit)
    assert (levels.abs().amax(2) == layer.limit).all()
    assert ((levels - scaled.double() / scales.double()[..., None]).abs() < 0.5 + 1e-6 * layer.limit).all()
    assert (levels.flatten(1)[:, k:] == 0).all()
    largest = weight.abs().amax(1, keepdim=True)
    weight_levels = functional.pad((weight * (127 / largest)).round().long(), (0, padding)).view(n, *levels.shape[1:])
    groups = torch.einsum("mgi,ngi->mng", levels, weight_levels) * scales.double()[:, None]
    exact = (groups.sum(2) * (largest.double() / 127).T).float()
    bound = FLOAT_EPSILON * groups.abs().sum(2) * (largest.double() / 127).T
    assert ((out - exact).abs() <= bound).all()
    with_bias = kind(library, weight, randn(n, seed=3), scales_in).multiply(x)
    torch.testing.assert_close(with_bias, exact + randn(n, seed=3), rtol=1e-6, atol=1e-6 * exact.abs().max().item())


@pytest.mark.parametrize("kind", INTEGER_KINDS)
@pytest.mark.parametrize("k", [4, 5000, 16384, 40000])
def test_the_largest_sums_do_not_overflow(library: Library, kind: Maker, k: int) -> None:
    """Every level at its limit, of one sign or of both."""
    ones = torch.ones(3, k)
    layer = kind(library, torch.cat([ones[:1], -ones[:1]]), None)
    out = layer.multiply(torch.stack([ones[0], -ones[0], 2 * ones[0]]))
    assert (layer.input_levels.flatten(1)[:, :k].abs() == layer.limit).all()
    expected = torch.tensor([[k, -k], [-k, k], [2 * k, -2 * k]])
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=0)


def test_sixteen_bits_are_closer_than_eight(library: Library) -> None:
    """What is left of the difference to float64 is that of the weights alone."""
    weight, x = randn(40, 256), randn(30, 256, seed=1)
    weight /= weight.abs().amax(1, keepdim=True) / 127
    weight = weight.round()  # held exactly
    exact = x.double() @ weight.double().T
    eight, sixteen = (
        (IntegerWeight(library, weight, None, bits).multiply(x) - exact).abs().max() / exact.abs().max()
        for bits in (8, 16)
    )
    assert sixteen < 2e-4
    assert 1e-3 < eight < 2e-2


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 100, 576])
def test_rms_norm(library: Library, dim: int) -> None:
    """Of rows and of heads that lie apart, against float64; a NaN harms its own row."""
    weight, x = randn(dim), 3 * randn(2, 40, dim + 7, seed=1)[..., :dim]
    x[0, 5] = 0
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    out = rms_norm(library, x, weight, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    x[1, 3, 0] = torch.nan
    ill = rms_norm(library, x, weight, 1e-5)
    assert ill[1, 3].isnan().all()
    ill[1, 3] = out[1, 3]
    assert torch.equal(ill, out)


ACTIVATIONS = {"silu": functional.silu, "gelu_pytorch_tanh": lambda g: functional.gelu(g, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 5, 16, 96, 1001])
def test_gated(library: Library, activation: str, width: int) -> None:
    """act(gate) * up for small and large numbers."""
    gate, up = randn(30, width) * torch.logspace(-3, 2.3, 30)[:, None], randn(30, width, seed=1)
    out = gated(library, torch.cat([gate, up], dim=1), activation)
    exact = ACTIVATIONS[activation](gate.double()) * up
    assert ((out - exact).abs() <= 1e-6 * (gate * up).abs() + 1e-30).all()
    gate[4, 0] = torch.nan
    ill = gated(library, torch.cat([gate, up], dim=1), activation)
    assert ill[4, 0].isnan()
    ill[4, 0] = out[4, 0]
    assert torch.equal(ill, out)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("rotary", [DIM, 8])
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_a_decoder_layer(library: Library, rows: int, rotary: int, head_norms: bool, activation: str) -> None:
    """Before and after attention, against float64; the heads of values are neither normed nor turned."""
    parts, weights = layer_parts(library, PackedWeight, head_norms, activation)
    x, angles, attended = randn(rows, WIDTH), randn(rows, rotary, seed=1), randn(rows, HEADS * DIM, seed=2)
    kernel = LayerKernel(library, parts, parts.workspace())

    def norm(values: torch.Tensor, own: tuple[torch.Tensor, float]) -> torch.Tensor:
        return values / (values.pow(2).mean(-1, keepdim=True) + own[1]).sqrt() * own[0].double()

    def linear(values: torch.Tensor, number: int) -> torch.Tensor:
        return functional.linear(values, *(part.double() for part in weights[number]))

    heads = linear(norm(x.double(), parts.input_norm), 0).view(rows, -1, DIM)
    turned = heads[:, : HEADS + KV_HEADS]
    if head_norms:
        turned = torch.cat([norm(turned[:, :HEADS], parts.query_norm), norm(turned[:, HEADS:], parts.key_norm)], dim=1)
    low, high = turned[..., :rotary].chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    rotated = turned[..., :rotary] * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None]
    turned = torch.cat([rotated, turned[..., rotary:]], dim=-1)
    expected = torch.cat([turned, heads[:, HEADS + KV_HEADS :]], dim=1)
    torch.testing.assert_close(kernel.begin(x, cosine, sine).double(), expected, rtol=1e-4, atol=1e-5)

    middle = x.double() + linear(attended.double(), 1)
    gate, up = linear(norm(middle, parts.mlp_norm), 2).chunk(2, dim=-1)
    expected = middle + linear(ACTIVATIONS[activation](gate) * up, 3)
    torch.testing.assert_close(kernel.end(x, attended).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_layer_is_the_sum_of_its_parts(library: Library, kind: Maker) -> None:
    """To the bit, whatever its weights are, when its workspace grows, and when another layer uses that in between."""
    parts, _ = layer_parts(library, kind, False, "silu")
    workspace = parts.workspace()
    kernel, other = (LayerKernel(library, parts, workspace) for _ in range(2))
    for rows in (3, 30, 7):
        x, attended = randn(rows, WIDTH), randn(rows, HEADS * DIM, seed=2)
        cosine, sine = torch.ones(rows, DIM), torch.zeros(rows, DIM)
        expected = parts.qkv.multiply(rms_norm(library, x, *parts.input_norm))
        assert torch.equal(kernel.begin(x, cosine, sine).flatten(1), expected)
        other.begin(-x, cosine, sine)
        middle = x + parts.out.multiply(attended)
        gate_up = parts.gate_up.multiply(rms_norm(library, middle, *parts.mlp_norm))
        expected = middle + parts.down.multiply(gated(library, gate_up, "silu"))
        assert torch.equal(kernel.end(x, attended), expected)
