"""The table of row keys gives what a dictionary gives, within its memory."""

import random
from collections import Counter

import numpy as np
import pytest

from cbgen.data.key_table import MISSING, KeyTable, key_array, sample_keys
from cbgen.data.rows import KEY_BYTES


def random_keys(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(KEY_BYTES) for _ in range(count)]


@pytest.mark.parametrize("num_expected", [0, 1, 300, 1000])
def test_as_a_dictionary(num_expected: int) -> None:
    """Numbers put, overwritten and looked up in lots of any size, whether the table must grow or not."""
    keys, strangers = random_keys(1000, seed=1), random_keys(1000, seed=2)
    table, expected, rng = KeyTable(num_expected), {}, random.Random(3)
    for _ in range(200):
        lot = rng.sample(keys, rng.randint(0, 30))
        values = [rng.randrange(2**31) for _ in lot]
        table.put(key_array(lot), np.array(values, dtype=np.int64))
        expected |= dict(zip(lot, values, strict=True))
        assert len(table) == len(expected)
    assert table.find(key_array(keys)).tolist() == [expected.get(key, MISSING) for key in keys]
    assert set(table.find(key_array(strangers))) == {MISSING}
    assert Counter(table.values().tolist()) == Counter(expected.values())


def test_occurrences() -> None:
    """Each key is told how often it came before, in the same call or an earlier one."""
    keys, rng = random_keys(20, seed=4), random.Random(5)
    drawn = rng.choices(keys, k=500)
    table, seen, told = KeyTable(20), Counter(), []
    for start in range(0, len(drawn), 7):
        told += table.count(key_array(drawn[start : start + 7])).tolist()
    for key, number in zip(drawn, told, strict=True):
        assert number == seen[key]
        seen[key] += 1


def test_keys_that_collide() -> None:
    """Keys of one slot, of one half, and the key of nothing but zeros are told apart."""
    halves = [0, 1, 2**64 - 1, 7, 7 + 59, 7 + 2 * 59]
    keys = [high.to_bytes(8, "little") + low.to_bytes(8, "little") for high in halves for low in halves]
    keys.remove((0).to_bytes(8, "little") + (0).to_bytes(8, "little"))
    table = KeyTable(50)
    table.put(key_array(keys), np.arange(len(keys)))
    assert table.find(key_array(keys)).tolist() == list(range(len(keys)))
    empty = KeyTable(1)
    assert empty.find(key_array(bytes(KEY_BYTES))).tolist() == [MISSING]
    empty.put(key_array(bytes(KEY_BYTES)), np.array([5]))
    assert empty.find(key_array(bytes(KEY_BYTES))).tolist() == [5]


def test_samples_have_keys_of_their_own() -> None:
    """No two samples of any rows share a key, and the first one's is the row's."""
    rows = key_array(random_keys(100, seed=6))
    named = [sample_keys(rows, np.full(100, sample)) for sample in range(5)]
    assert (named[0] == rows).all()
    assert len(np.unique(np.concatenate(named), axis=0)) == 500


def test_memory() -> None:
    """A table of the size that was expected takes at most 24 bytes a key, full as it is."""
    count = 100_000
    table = KeyTable(count)
    table.put(np.random.default_rng(0).integers(1, 2**63, (count, 2), dtype=np.uint64), np.arange(count))
    assert len(table) == count
    assert table.nbytes <= 24 * count
