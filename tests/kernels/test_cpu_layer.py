"""A decoder layer with its attention in one call, to the bit as in three: before, attention, after."""

import pytest
import torch
from kernels.layer_parts import DIM, HEADS, KV_HEADS, WIDTH, layer_parts, randn
from kernels.paged_bench import Kind, PagedBench

from cbgen.kernels.cpu.library import library_for, runnable_isas
from cbgen.kernels.cpu.linear import IntegerWeight, LayerKernel, PackedWeight

ISAS = runnable_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="this installation has no compiled kernels")
WEIGHTS = {"float32": PackedWeight, "int8": lambda *given: IntegerWeight(*given, 16)}


class LayerBench:
    """A layer, the pages of its attention, and one pass over two decodes and a piece of a prompt."""

    def __init__(self, isa: str, weights: str, kv_dtype: torch.dtype, window: int | None = None):
        library = library_for(isa)
        parts, _ = layer_parts(library, WEIGHTS[weights], True, "silu")
        self.kernel = LayerKernel(library, parts, parts.workspace())
        kind = Kind(KV_HEADS, HEADS // KV_HEADS, DIM, window=window, kv_dtype=kv_dtype, softcap=20.0, sinks=True)
        self.bench = PagedBench(isa, kind, 300)
        self.members = [(self.bench.sequence(60 + length, context), length) for context, length in SPANS]
        self.plan = self.bench.backend.prepare(self.bench.batch(self.members))
        self.rows = sum(length for _, length in SPANS)
        angles = randn(self.rows, DIM, seed=5)
        self.x, self.cosine, self.sine = randn(self.rows, WIDTH), angles.cos(), angles.sin()

    def in_three(self) -> torch.Tensor:
        qkv = self.kernel.begin(self.x, self.cosine, self.sine)
        query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        attended = self.bench.backend.attend(query, key, value, self.bench.pages, self.plan, self.bench.options)
        return self.kernel.end(self.x, attended.reshape(self.rows, -1))

    def in_one(self, wanted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the pages after it."""
        pages = self.bench.pages.clone()
        direct = self.bench.backend.direct(pages, self.plan, self.bench.options)
        return self.kernel.run(self.x, self.cosine, self.sine, direct, wanted), pages


SPANS = [(50, 1), (0, 40), (17, 1)]  # tokens in the pages before, and in this pass
KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_call_is_three(isa: str, weights: str, kv_dtype: torch.dtype) -> None:
    bench = LayerBench(isa, weights, kv_dtype)
    output, pages = bench.in_one(None)
    assert torch.equal(output, bench.in_three())
    assert torch.equal(pages, bench.bench.pages), "what is stored for later passes"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("wanted", [[], [0], [41], [0, 40, 41], [3, 4, 5, 20], list(range(42))])
def test_rows_that_nobody_reads_are_not_finished(isa: str, weights: str, wanted: list[int]) -> None:
    """Those that somebody reads are the same to the bit, and so is what is stored of all."""
    bench = LayerBench(isa, weights, torch.float32)
    rows = torch.tensor(wanted, dtype=torch.int64)
    output, pages = bench.in_one(rows)
    assert torch.equal(output[rows], bench.in_three()[rows])
    assert torch.equal(pages, bench.bench.pages)


@pytest.mark.parametrize("isa", ISAS)
def test_pieces_of_prompts_in_sliding_layers_go_in_three(isa: str) -> None:
    bench = LayerBench(isa, "float32", torch.float32, window=24)
    assert bench.bench.backend.direct(bench.bench.pages, bench.plan, bench.bench.options) is None
