"""Attention in C over scattered pages against float64, and to the bit: what a request gets hangs on nobody else."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from kernels.paged_bench import Kind, PagedBench, Sequence

from cbgen.cache.pool import WRITE_RESERVE_CHUNK
from cbgen.kernels.cpu import attention
from cbgen.kernels.cpu.attention import SPLIT_TOKENS
from cbgen.kernels.cpu.library import runnable_isas

ISAS = runnable_isas()
NUM_PAGES = 600
pytestmark = pytest.mark.skipif(not ISAS, reason="this installation has no compiled kernels")
# Pages of whole and of broken tiles, heads of whole and of broken vectors, with and without a ring.
KINDS = [
    pytest.param(Kind(), id="plain"),
    pytest.param(Kind(kv_heads=1, group=7, head_dim=20, page_size=5), id="odd sizes"),
    pytest.param(Kind(page_size=24, window=40, head_dim=8), id="sliding"),
    pytest.param(Kind(page_size=32, kv_dtype=torch.bfloat16, softcap=1.5, sinks=True), id="bfloat16"),
    pytest.param(Kind(kv_heads=3, group=1, head_dim=80, kv_dtype=torch.int8), id="int8"),
]
FULL_KINDS = [kind for kind in KINDS if kind.values[0].window is None]


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads there are, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_kind(rng: random.Random) -> Kind:
    return Kind(
        kv_heads=rng.choice([1, 2, 3]),
        group=rng.choice([1, 2, 3, 4, 7, 9]),
        head_dim=rng.choice([8, 16, 20, 40, 64, 80]),
        page_size=rng.choice([1, 4, 5, 16, 24, 32, 64, 200]),
        window=rng.choice([None, None, 1, 7, 40, 130]),
        kv_dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.int8]),
        softcap=rng.choice([None, None, 1.5]),
        sinks=rng.random() < 0.3,
    )


def run_random(isa: str, seed: int) -> None:
    """A few passes over requests of random lengths, some of which share the pages of their first tokens."""
    rng = random.Random(seed)
    kind = random_kind(rng)
    bench = PagedBench(isa, kind, 12 * 700 // kind.page_size + 40, seed)
    shared = rng.randint(1, 300) // kind.page_size * kind.page_size if kind.window is None and seed % 2 else 0
    source = bench.sequence(400, shared)
    members = []
    for _ in range(rng.randint(1, 12)):
        own = bench.sequence(800, rng.choice([0, rng.randint(0, 400)]))
        if shared and rng.random() < 0.8:
            own.keys[:shared], own.values[:shared] = source.keys[:shared], source.values[:shared]
            bench.fill(own, shared + rng.randint(0, 100), source.pages)
        members.append(own)
    for _ in range(2):
        chosen = rng.sample(members, rng.randint(1, len(members)))
        bench.check([(own, rng.choice([1, 1, rng.randint(1, 150)])) for own in chosen], fused=rng.random() < 0.5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(40))
def test_random_passes_equal_float64(isa: str, seed: int) -> None:
    """Any shape of heads and pages, decodes and pieces of prompts together, every option of a layer."""
    run_random(isa, seed)


@pytest.mark.long
@pytest.mark.parametrize("isa", ISAS)
def test_very_many_random_passes_equal_float64(isa: str) -> None:
    for seed in range(100, 1500):
        run_random(isa, seed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [6, 16, 20])
def test_rings_over_a_whole_life(isa: str, kv_dtype: torch.dtype, window: int) -> None:
    """A prompt longer than its ring, pieces that overwrite what they read, decodes; each reads before it writes."""
    bench = PagedBench(isa, Kind(page_size=8, window=window, kv_dtype=kv_dtype), NUM_PAGES)
    first, second = bench.sequence(200, 0), bench.sequence(200, 0)
    ring = -(-window // 8)
    for lengths in [(70, 1), (1, 1), (ring * 8, 3), (2, 90), (1, 1), (40, 5), (1, 1)]:
        bench.check(list(zip((first, second), lengths, strict=True)))
    assert len(first.pages) == len(second.pages) == ring
    assert not bench.pages[0].any(), "the read reserve stays zero"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("page_size, head_dim", [(2048, 16), (16, 20), (16, 3), (16, 256)])
def test_int8_sums_do_not_overflow(isa: str, page_size: int, head_dim: int) -> None:
    """Every level of queries, keys, weights and values at its limit, over one split and over several."""
    bench = PagedBench(isa, Kind(page_size=page_size, head_dim=head_dim, kv_dtype=torch.int8), 200)
    own = bench.sequence(2000, 0)
    for half in (own.queries, own.keys, own.values):
        half.fill_(1.0)
    own.queries[1::2] = -1.0
    for length in (1990, 2):
        for output in bench.attend([(own, length)]):
            torch.testing.assert_close(output, torch.ones_like(output), rtol=1e-4, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_a_pass_writes_its_own_tokens_alone(isa: str) -> None:
    """Storing a pass or its pieces one by one leaves the same bytes; nothing outside is touched."""
    whole, pieces = (PagedBench(isa, Kind(page_size=5, head_dim=20), NUM_PAGES) for _ in range(2))
    before = whole.pages.clone()
    for bench, lengths in ((whole, [33]), (pieces, [1, 7, 25])):
        own = bench.sequence(33, 0)
        for length in lengths:
            bench.attend([(own, length)])
    assert torch.equal(whole.pages, pieces.pages)
    others = [page for page in range(len(before)) if page not in own.pages]
    assert torch.equal(whole.pages[others], before[others])


@pytest.mark.parametrize("isa", ISAS)
def test_half_precision_queries(isa: str) -> None:
    """A bfloat16 model gets what a float32 one gets for the same numbers, rounded."""
    bench = PagedBench(isa, Kind(kv_dtype=torch.bfloat16), NUM_PAGES)
    own = bench.sequence(90, 60)
    parts = [getattr(own, name)[60:].bfloat16() for name in ("queries", "keys", "values")]
    plan = bench.backend.prepare(bench.batch([(own, 30)]))
    half = bench.backend.attend(*parts, bench.pages, plan, bench.options)
    single = bench.backend.attend(*(part.float() for part in parts), bench.pages, plan, bench.options)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, single.bfloat16())


def crowd(bench: PagedBench, shared_tokens: int = 0, as_copies: bool = False) -> list[tuple[Sequence, int]]:
    """Eight requests, the same in every bench of one kind and seed; some begin with the same tokens.

    as_copies: each has pages of its own for them.
    """
    source = bench.sequence(1000, shared_tokens)
    members = []
    contexts, lengths = (0, 300, 17, 700, 301, 0, 350, 511), (1, 1, 150, 1, 60, 131, 1, 2)
    for number, length in enumerate(lengths):
        own = bench.sequence(1000, 0, (source, shared_tokens))
        shares = number % 2 == 1 and shared_tokens > 0
        context = max(contexts[number], shared_tokens if shares else 0)
        bench.fill(own, context, source.pages if shares and not as_copies else None)
        members.append((own, length))
    return members


def kinds_and_isas(kinds: list = KINDS) -> Callable:
    isas = pytest.mark.parametrize("isa", ISAS)
    return lambda test: isas(pytest.mark.parametrize("kind", kinds)(test))


def equal_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def watched_plans(bench: PagedBench) -> list:
    """The plans that the bench makes from now on."""
    plans, prepare = [], bench.backend.prepare
    bench.backend.prepare = lambda batch: plans.append(prepare(batch)) or plans[-1]
    return plans


@kinds_and_isas(FULL_KINDS)
def test_a_shared_prefix_changes_no_bit(isa: str, kind: Kind) -> None:
    """Its pages are read once for all who share them, or by each from pages of its own."""
    shared_tokens = 5 * SPLIT_TOKENS // 2 // kind.page_size * kind.page_size
    outputs = []
    for as_copies in (False, True):
        bench = PagedBench(isa, kind, NUM_PAGES + 9000 // kind.page_size)
        plans, members = watched_plans(bench), crowd(bench, shared_tokens, as_copies)
        outputs.append(bench.attend(members))
        assert (plans[0].paged.call.num_prefix_items > 0) == (not as_copies)
    assert equal_bits(*outputs)


@kinds_and_isas()
def test_neighbours_change_no_bit(isa: str, kind: Kind) -> None:
    """A request alone, and in a crowd; long ones alone are cut into splits for the threads."""
    together = PagedBench(isa, kind, NUM_PAGES + 9000 // kind.page_size)
    outputs = together.attend(crowd(together))
    alone = PagedBench(isa, kind, NUM_PAGES + 9000 // kind.page_size)
    assert equal_bits(outputs, [alone.attend([member])[0] for member in crowd(alone)])


@kinds_and_isas()
def test_the_number_of_threads_changes_no_bit(isa: str, kind: Kind, threads: Callable[[int], None]) -> None:
    outputs = []
    for count in (1, 2, 3):
        threads(count)
        bench = PagedBench(isa, kind, NUM_PAGES + 9000 // kind.page_size)
        outputs.append(bench.attend(crowd(bench, 128 if kind.window is None else 0)))
    assert equal_bits(outputs[0], outputs[1])
    assert equal_bits(outputs[0], outputs[2])


@kinds_and_isas()
def test_single_splits_change_no_bit(isa: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few long requests are cut into splits that any thread works out, or not."""
    outputs = []
    for items_per_thread in (1000, 0):
        monkeypatch.setattr(attention, "ITEMS_PER_THREAD", items_per_thread)
        bench = PagedBench(isa, kind, NUM_PAGES + 3000 // kind.page_size)
        plans = watched_plans(bench)
        outputs.append(bench.attend([(bench.sequence(800, 700), 1), (bench.sequence(800, 395), 3)]))
        singles = sum(part.call.num_single_items for part in (plans[0].paged, plans[0].sliding) if part)
        assert (singles > 0) == (items_per_thread > 0)
    assert equal_bits(*outputs)


@kinds_and_isas()
def test_pieces_of_a_prompt_change_no_bit(isa: str, kind: Kind) -> None:
    """What comes out, and what lies in the pages, is the same for a prompt at once and in pieces of any size."""
    whole, pieces = (PagedBench(isa, kind, NUM_PAGES) for _ in range(2))
    own = pieces.sequence(300, 0)
    outputs = [pieces.attend([(own, length)])[0] for length in (1, 100, 29, 1, 1, 167, 1)]
    assert torch.equal(torch.cat(outputs), whole.attend([(whole.sequence(300, 0), 300)])[0])
    for bench in (whole, pieces):
        bench.pages[WRITE_RESERVE_CHUNK] = 0
    assert torch.equal(whole.pages, pieces.pages)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["queries", "keys", "values"])
@kinds_and_isas()
def test_a_strange_number_harms_its_own_request_alone(isa: str, kind: Kind, name: str, strange: float) -> None:
    """Also where others attend over the same prefix, in the same item of work."""
    outputs = []
    for number in (1.0, strange):
        bench = PagedBench(isa, kind, NUM_PAGES + 9000 // kind.page_size)
        members = crowd(bench, 128 if kind.window is None else 0)
        for victim in (3, 4):
            own, length = members[victim]
            getattr(own, name)[own.context + length - 1, 0, 2] = number
        outputs.append(bench.attend(members))
    well, ill = outputs
    for number, (first, second) in enumerate(zip(well, ill, strict=True)):
        if number not in (3, 4):
            assert torch.equal(first, second)
        elif strange is torch.nan or name == "values":
            assert not second[-1, 0].isfinite().all()
        else:  # an infinite score hides all others, or is hidden by them
            assert not torch.equal(first[-1, 0], second[-1, 0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sinks", [False, True])
def test_where_no_score_is_above_minus_infinity(isa: str, sinks: bool) -> None:
    """Nothing that others left behind comes out: a sink takes all the weight, and without one all is NaN."""
    bench = PagedBench(isa, replace(Kind(), sinks=sinks), NUM_PAGES)
    bench.attend(crowd(bench))
    own = bench.sequence(40, 0)
    own.queries[:, :, 0], own.keys[:, :, 0] = 1.0, -torch.inf
    output = bench.attend([(own, 40)])[0]
    assert torch.equal(output, torch.zeros_like(output)) if sinks else output.isnan().all()
