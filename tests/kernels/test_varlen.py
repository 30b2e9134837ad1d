"""VarlenAttention on a reference of torch's kernel, through padded passes, against SDPA and dense attention."""

import inspect

import pytest
import torch
from kernels.bench import FULL, SLIDING, drive
from kernels.varlen_bench import Sizes, on_device, sizes_of, tensors_of, varlen_bench, with_tensors
from kernels.varlen_reference import varlen_reference

from cbgen.kernels.backend import AttentionBatch, AttentionOptions
from cbgen.kernels.cuda import VarlenAttention, torch_varlen_attn, varlen_problem
from cbgen.kernels.sdpa import SdpaAttention

PAGE_SIZES = [1, 4, 16]
WINDOWS = [None, 1, 5, 16, 24]
# What recorded passes are padded to: with several query tokens of a request, and with one of each.
RECORDED = {False: Sizes(256, 8, 90, 400, 256), True: Sizes(8, 8, 90, None, 1)}
# What reads a number on the CPU, has a size that depends on numbers, or makes a tensor of numbers on the CPU.
CANNOT_BE_RECORDED = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.lift_fresh_copy.default",
}
needs_kernel = pytest.mark.skipif(torch_varlen_attn() is None, reason="this torch has no varlen_attn")


def layers_of(window: int | None) -> list[str]:
    return [FULL if window is None else SLIDING] * 2


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("group", [1, 3])
def test_random_passes_equal_dense_attention(group, window, page_size):
    """Single tokens and pieces up to far beyond the ring, in any order, padded by anything."""
    reach = 24 if window is None else window
    bench = varlen_bench(layers_of(window), window, page_size, group=group, seed=group)
    lengths = [1, 2, reach, reach + 1, 3 * reach + 2, *bench.rng.integers(1, 4 * reach + 4, size=5).tolist()]
    drive(bench, bench.rng.permutation(lengths).tolist(), longest_piece=2 * reach + 3)
    assert bench.cache.free_share == 1.0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_recording_follows_the_numbers_in_its_tensors(window, page_size):
    """Operations recorded once, of each size, serve every later pass: nothing was taken from a list or a number."""
    bench = varlen_bench(layers_of(window), window, page_size, RECORDED)
    drive(bench, [1, 60, 33, 41, 2, 75, 26, 80], longest_piece=40)
    assert len(bench.backend.graphs) == 2
    assert bench.backend.num_replays >= 12
    recorded = {str(node.target) for graph, _ in bench.backend.graphs.values() for node in graph.graph.nodes}
    assert "cbgen_tests.varlen_reference.default" in recorded
    assert not recorded & CANNOT_BE_RECORDED


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("window", [None, 5, 24])
@pytest.mark.parametrize("recorded", [None, RECORDED], ids=["eager", "recorded"])
def test_pieces_longer_than_the_ring_beside_decodes(recorded, window, page_size):
    """A decode whose ring has wrapped, a first piece, a later one and one beyond the ring, all in one pass."""
    bench = varlen_bench(layers_of(window), window, page_size, recorded)
    old, new, later, long = (bench.add(length) for length in (44, 7, 61, 99))
    bench.run([(old, 40), (later, 33), (long, 9)])
    for piece in (2, 3):
        bench.run([(old, 1), (new, piece), (later, 13), (long, 45 if piece == 3 else 35)])
    bench.run([(later, 1), (old, 1), (long, 2), (new, 1)])
    bench.run([(sequence, 1) for sequence in (old, new, later, long)])


@pytest.mark.parametrize("recorded", [None, RECORDED], ids=["eager", "recorded"])
def test_hybrids_equal_dense_attention(recorded):
    """Layers of both types in the same pass, each with its own tables, on pages of one storage."""
    bench = varlen_bench([SLIDING, FULL, SLIDING], 10, 4, recorded, head_dim=8)
    drive(bench, [1, 11, 25, 40, 26, 33], longest_piece=30, num_at_once=3)
    assert bench.cache.free_share == 1.0


@pytest.mark.parametrize("window", [None, 24])
def test_a_batch_invariant_backend_asks_the_kernel_the_same_in_every_pass(window):
    """Neither the splits nor the way that query heads are laid out nor the kind of window depend on the neighbours."""
    bench = varlen_bench(layers_of(window), window, 4, batch_invariant=True)
    drive(bench, [1, 60, 33, 3], longest_piece=40)
    sequences = [bench.add(20), bench.add(20)]
    for _ in range(20):  # with one token each there would be another way, which padding decides
        bench.run([(sequence, 1) for sequence in sequences])
    assert bench.backend.varlen.is_batch_invariant
    expected = (-1, 0) if window is None else (window - 1, 0)
    assert {(call["window_size"], call["num_splits"]) for call in bench.backend.calls} == {(expected, 1)}
    assert all(call["max_k"] >= (window or 0) for call in bench.backend.calls)


@pytest.mark.parametrize(("group", "folded"), [(1, False), (2, True)])
def test_query_heads_are_folded_where_every_request_has_one_token(group, folded):
    """The kernel does so for calls without a window; any other call has one. None splits its KV."""
    bench = varlen_bench([FULL], None, 4, RECORDED, group=group)
    sequences = [bench.add(60), bench.add(70)]
    bench.run([(sequence, 4) for sequence in sequences])
    while len(bench.backend.graphs) < 2:
        bench.run([(sequence, 1) for sequence in sequences])
    assert not bench.backend.varlen.is_batch_invariant
    asked = {call["max_q"]: (call["window_size"], call["num_splits"]) for call in bench.backend.calls}
    assert asked == {256: ((-1, 0), 1), 1: ((-1, -1) if folded else (-1, 0), 1)}


def test_pages_are_those_of_the_sdpa_backend():
    """The same bytes, so that a cache does not depend on which of the two attends."""
    own = VarlenAttention(16, 6, 2, 24, torch.bfloat16, kernel=varlen_reference)
    other = SdpaAttention(16, 2, 24, torch.bfloat16)
    assert own.page_bytes == other.page_bytes == 2 * 16 * 2 * 24 * 2
    raw = torch.randint(0, 255, (3, own.page_bytes), dtype=torch.uint8)
    for half, expected in zip(own.view_pages(raw), other.view_pages(raw), strict=True):
        assert torch.equal(half.view(torch.int16), expected.view(torch.int16))
    assert own.direct(None, None, AttentionOptions(1.0)) is None


def test_the_workspace_grows_with_the_pass_and_the_context():
    """At least what one call holds: three copies of the longest request's KV, two outputs, the table of each token."""
    backend = VarlenAttention(16, 6, 2, 24, torch.bfloat16, kernel=varlen_reference)
    token_bytes = backend.page_bytes // 16
    longer = backend.workspace_bytes(512, 100_000) - backend.workspace_bytes(512, 1600)
    wider = backend.workspace_bytes(1024, 1600) - backend.workspace_bytes(512, 1600)
    assert longer == 98_400 * 3 * token_bytes + 4 * 512 * (98_400 // 16)
    assert wider == 512 * (3 * token_bytes + 2 * 6 * (24 * 2 + 4) + 4 * 100)


@needs_kernel
def test_the_reference_takes_what_torch_takes():
    """Parameter for parameter, in order."""
    parameters = {
        kernel: [(one.name, one.kind, one.default) for one in inspect.signature(kernel).parameters.values()]
        for kernel in (varlen_reference, torch_varlen_attn())
    }
    assert parameters[varlen_reference] == parameters[torch_varlen_attn()]


@needs_kernel
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("query_lengths", [[1, 1], [1, 400]], ids=["decodes", "mixed"])
def test_torch_takes_the_calls(query_lengths, window):
    """Its own function, on tensors without numbers, gives an output of the right shape and dtype."""
    num_tokens, batch_tables = sum(query_lengths), torch.zeros(2, 4, dtype=torch.int64)
    places = torch.zeros(num_tokens, dtype=torch.int64)
    batch = AttentionBatch(query_lengths, [700, 900], [0, 0], batch_tables, places, places, window)
    laid_out = on_device(batch, 256, sizes_of(batch, 256), 1)
    backend = VarlenAttention(256, 4, 2, 64, torch.bfloat16)
    pages = backend.view_pages(torch.empty(8, backend.page_bytes, dtype=torch.uint8, device="meta"))
    query, key, value = (
        torch.empty(heads, num_tokens, 64, dtype=torch.bfloat16, device="meta").transpose(0, 1) for heads in (4, 2, 2)
    )
    without_numbers = with_tensors(laid_out, [tensor.to("meta") for tensor in tensors_of(laid_out)])
    output = backend.attend(query, key, value, pages, backend.prepare(without_numbers), AttentionOptions(0.125))
    assert (output.shape, output.dtype, output.device.type) == (query.shape, torch.bfloat16, "meta")


def test_the_reference_gives_nothing_where_there_is_nothing_to_see():
    """Requests without keys, without queries, and queries before the first key; the others as dense attention."""
    query, key = torch.randn(6, 2, 8), torch.randn(5, 1, 8)
    starts = {"cu_seq_q": [0, 1, 1, 4, 6], "cu_seq_k": [0, 0, 2, 3, 5]}
    tensors = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in starts.items()}
    output = varlen_reference(
        query, key, key, **tensors, max_q=3, max_k=2, scale=1.0, window_size=(-1, 0), enable_gqa=True
    )
    assert not output[:3].any(), "no keys at all, and two queries before the only key"
    torch.testing.assert_close(output[3], key[2].expand(2, 8))
    torch.testing.assert_close(output[4], key[3].expand(2, 8))
    weights = torch.einsum("hd,kd->hk", query[5], key[3:5, 0]).softmax(-1)
    torch.testing.assert_close(output[5], weights @ key[3:5, 0])


def test_the_reference_shows_what_a_call_reads_beyond_its_requests():
    """A request longer than its row of pages, and NaN within a request though the window hides it."""
    pages = torch.zeros(3, 4, 1, 8)
    pages[1, 0] = torch.nan
    query, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    used, table = torch.tensor([4], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    options = {"window_size": (1, 0), "num_splits": 1}
    assert (
        varlen_reference(query, pages, pages, starts, starts, 1, 4, seqused_k=used, block_table=table, **options)
        .isnan()
        .all()
    )
    with pytest.raises(AssertionError, match="no pages"):
        varlen_reference(query, pages, pages, starts, starts, 1, 9, seqused_k=used + 1, block_table=table, **options)


SERVED = {
    "kernel": varlen_reference,
    "capability": (8, 0),
    "dtype": torch.bfloat16,
    "page_size": 256,
    "head_dim": 64,
    "special_attention": (),
}
PROBLEMS = [
    ({"kernel": None}, "too old"),
    ({"kernel": lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k: None}, "too old"),
    ({"capability": (7, 5)}, "compute capability 8.0, and this one has 7.5"),
    ({"dtype": torch.float32}, "takes float16 and bfloat16, not float32"),
    ({"special_attention": ("softcap",)}, "no soft caps, which"),
    ({"special_attention": ("softcap", "sinks")}, "no soft caps and no sinks, which"),
    ({"head_dim": 84}, "not of 84"),
    ({"head_dim": 264}, "256 at most, not of 264"),
    ({"page_size": 128}, "multiple of 256 tokens, not of 128"),
]


@pytest.mark.parametrize("but", [{}, {"dtype": torch.float16}, {"capability": (12, 0)}, {"head_dim": 256}], ids=str)
def test_nothing_is_in_the_way_of_what_the_kernel_takes(but):
    assert varlen_problem(**SERVED | but) is None


@pytest.mark.parametrize(("but", "words"), PROBLEMS, ids=[words for _, words in PROBLEMS])
def test_each_problem_is_told_in_words(but, words):
    """One line, to end a warning or an error with."""
    problem = varlen_problem(**SERVED | but)
    assert words in problem
    assert "\n" not in problem


@needs_kernel
def test_torch_has_the_kernel():
    assert varlen_problem(**SERVED | {"kernel": torch_varlen_attn()}) is None
