"""Numbers by row key, small enough for tens of millions of rows: an open-addressing hash table in two arrays."""

from collections.abc import Sequence

import numpy as np

from cbgen.data.rows import KEY_BYTES

# Slots in use, at most. With fewer, memory grows; with more, searches do.
MOST_LOADED = 0.85
GROWTH = 1.5
MISSING = -1
# What an empty slot holds. That a key of 128 random bits is this one does not happen; it is stored as the next one.
_EMPTY = np.uint64(0)


def key_array(keys: Sequence[bytes] | bytes | bytearray) -> np.ndarray:
    """uint64 [N, 2] from keys of KEY_BYTES, in a list or one after another."""
    joined = keys if isinstance(keys, bytes | bytearray) else b"".join(keys)
    return np.frombuffer(joined, dtype="<u8").reshape(-1, KEY_BYTES // 8)


def sample_keys(keys: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
    """uint64 [N, 2]: names of single samples of rows; that of sample 0 is the row's own."""
    named = keys.copy()
    named[:, 1] += sample_indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return named


class KeyTable:
    """int32 numbers, 0 or more, by keys that are spread evenly; 24 bytes for each key once it is full.

    keys     [ .. | a | .. | c | b | .. ]      slot of a key: its first half, then steps of its second half, modulo a
    values   [ .. | 7 | .. | 0 | 2 | .. ]      prime, until the key or an empty slot is met

    All calls take many keys at once, as uint64 [N, 2], and walk the steps of all of them together.
    """

    def __init__(self, num_expected: int):
        """num_expected: keys that there will be; more make the table grow, with a copy of it for that moment."""
        self._allocate(num_expected)

    def __len__(self) -> int:
        return self._num_keys

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        """int32 [N]: the number of each key, or MISSING."""
        keys = _storable(keys)
        slots = self._slots(keys)
        return np.where(self._is_empty(slots), MISSING, self._values[slots])

    def put(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Sets the number of each key. No key may be there twice in one call."""
        if self._num_keys + len(keys) > MOST_LOADED * len(self._values):
            self._grow(self._num_keys + len(keys))
        keys = _storable(keys)
        left = np.arange(len(keys))
        while left.size:
            slots = self._slots(keys[left])
            empty = self._is_empty(slots)
            self._keys[slots[empty]] = keys[left[empty]]  # of several for one slot, one gets it
            placed = (self._keys[slots] == keys[left]).all(axis=1)
            self._values[slots[placed]] = values[left[placed]]
            self._num_keys += int(np.count_nonzero(placed & empty))
            left = left[~placed]

    def count(self, keys: np.ndarray) -> np.ndarray:
        """int64 [N]: how often each key was counted before, the earlier ones of this call included; counts them."""
        unique, inverse, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        inverse = inverse.reshape(-1)
        before = np.maximum(self.find(unique), 0)
        self.put(unique, before + counts)
        order = np.argsort(inverse, kind="stable")
        first_of_key = np.cumsum(counts) - counts
        within = np.empty(len(keys), dtype=np.int64)
        within[order] = np.arange(len(keys)) - np.repeat(first_of_key, counts)
        return before[inverse] + within

    def values(self) -> np.ndarray:
        """int32: the numbers of all keys, in no order."""
        return self._values[~self._is_empty(np.arange(len(self._values)))]

    def _allocate(self, num_expected: int) -> None:
        capacity = _prime_above(int(num_expected / MOST_LOADED) + 1)
        self._keys = np.zeros((capacity, 2), dtype=np.uint64)
        self._values = np.zeros(capacity, dtype=np.int32)
        self._num_keys = 0

    def _grow(self, num_expected: int) -> None:
        keys, values = self._keys, self._values
        used = np.flatnonzero((keys != _EMPTY).any(axis=1))
        self._allocate(max(num_expected, int(len(used) * GROWTH)))
        self.put(keys[used], values[used])

    def _is_empty(self, slots: np.ndarray) -> np.ndarray:
        return (self._keys[slots] == _EMPTY).all(axis=1)

    def _slots(self, keys: np.ndarray) -> np.ndarray:
        """int64 [N]: for each key the slot that holds it, or the empty one where it belongs."""
        capacity = np.uint64(len(self._values))
        slots = keys[:, 0] % capacity
        steps = keys[:, 1] % (capacity - np.uint64(1)) + np.uint64(1)
        left = np.arange(len(keys))
        while left.size:
            held = self._keys[slots[left]]
            taken = (held != keys[left]).any(axis=1) & (held != _EMPTY).any(axis=1)
            left = left[taken]
            slots[left] = (slots[left] + steps[left]) % capacity
        return slots.astype(np.int64)


def _storable(keys: np.ndarray) -> np.ndarray:
    """The same keys, without the one that means an empty slot."""
    zero = (keys == _EMPTY).all(axis=1)
    return np.where(zero[:, None], np.uint64(1), keys) if zero.any() else keys


def _prime_above(number: int) -> int:
    candidate = max(3, number | 1)
    while any(candidate % divisor == 0 for divisor in range(3, int(candidate**0.5) + 1, 2)):
        candidate += 2
    return candidate
