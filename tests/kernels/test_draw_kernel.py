"""The compiled draws against those in torch, which sort: the same tokens, for every instruction set."""

import numpy as np
import pytest
import torch

from cbgen.engine.draws import draw_in_torch
from cbgen.kernels.cpu.library import library_for, runnable_isas
from cbgen.kernels.cpu.sampling import RowDraws, draw_rows

ROWS = 300
ISAS = runnable_isas()
WAYS = {
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 4.0},
    "top_k": {"top_k": 5},
    "top_k of all spans": {"top_k": 3000},
    "top_k above the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.8},
    "narrow top_p": {"top_p": 1e-6},
    "wide top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "min_p of the best": {"min_p": 1.0},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
pytestmark = pytest.mark.skipif(not ISAS, reason="this installation has no compiled kernels")


def draws_of(rows: int, seed: int = 0, **way: float) -> RowDraws:
    return RowDraws(
        np.full(rows, way.get("temperature", 1.0), np.float32),
        np.full(rows, way.get("top_k", 0), np.int64),
        np.full(rows, way.get("top_p", 1.0), np.float64),
        np.full(rows, way.get("min_p", 0.0), np.float32),
        np.random.default_rng(seed).random(rows),
    )


def logits_of(rows: int, vocabulary: int, seed: int = 1) -> torch.Tensor:
    """Like those of models: a few tokens far above many."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 2 + 8 * torch.rand(
        rows, vocabulary, generator=generator
    ).pow(9)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocabulary", [1, 3, 64, 258, 5000])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_as_in_torch(isa: str, vocabulary: int, way: str) -> None:
    """But for draws that fall between two tokens by less than rounding: at most one in a hundred here."""
    logits, draws = logits_of(ROWS, vocabulary), draws_of(ROWS, **WAYS[way])
    found = draw_rows(library_for(isa), logits, draws)
    different = sum(one != other for one, other in zip(found, draw_in_torch(logits, draws), strict=True))
    assert different <= ROWS // 100


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("way", WAYS)
def test_a_banned_token_never_comes(isa: str, way: str) -> None:
    """Tokens at -infinity have no weight, also where almost all tokens are; the ends of the range of draws included."""
    logits = logits_of(ROWS, 700)
    allowed = torch.rand(ROWS, 700, generator=torch.Generator().manual_seed(3)) < 0.01
    allowed[torch.arange(ROWS), torch.arange(ROWS)] = True
    draws = draws_of(ROWS, **WAYS[way])
    draws.uniform[:2] = 0.0, 1 - 2.0**-53
    found = draw_rows(library_for(isa), logits.masked_fill(~allowed, -torch.inf), draws)
    assert allowed[torch.arange(ROWS), torch.tensor(found)].all()


@pytest.mark.parametrize("isa", ISAS)
def test_equal_logits_are_kept_from_the_first_on(isa: str) -> None:
    """Where top-k cuts through equal ones, those with smaller numbers stay, as a stable sort has them."""
    logits = torch.zeros(ROWS, 500)
    logits[:, 450] = 1.0
    found = draw_rows(library_for(isa), logits, draws_of(ROWS, top_k=4))
    assert set(found) == {0, 1, 2, 450}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_drawn_alike_in_any_company(isa: str, way: str) -> None:
    """One row at a time, rows in reverse, and rows of a wider tensor: always the same tokens."""
    logits, draws, library = logits_of(60, 900), draws_of(60, **WAYS[way]), library_for(isa)
    together = draw_rows(library, logits, draws)
    alone = [draw_rows(library, logits[n : n + 1], draws.of(np.array([n])))[0] for n in range(60)]
    backwards = draw_rows(library, logits.flip(0), draws.of(np.arange(60)[::-1].copy()))[::-1]
    padded = draw_rows(library, torch.cat([logits, logits], dim=1)[:, :900], draws)
    assert together == alone == backwards == padded


def test_rows_that_ask_for_different_things_together() -> None:
    """Each row of a batch has parameters of its own."""
    ways = list(WAYS.values())
    logits, each = logits_of(len(ways), 900), [draws_of(1, seed=n, **way) for n, way in enumerate(ways)]
    columns = zip(*((d.temperatures, d.top_ks, d.top_ps, d.min_ps, d.uniform) for d in each), strict=True)
    library = library_for(ISAS[-1])
    together = draw_rows(library, logits, RowDraws(*(np.concatenate(column) for column in columns)))
    assert together == [draw_rows(library, logits[n : n + 1], draws)[0] for n, draws in enumerate(each)]
