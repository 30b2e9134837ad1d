"""How the blocks of both types of attention tile the same chunks, and what a number of tokens costs of each.

    chunk of C pages      | 0                                               C - 1 |
    full, F layers        [ block | block | block | block | block ][ idle ]          C // F blocks
    sliding, S layers     [ block                                         ]          C // S blocks
    block                 one page per layer of its type, side by side
    page                  page_size tokens of KV of one layer

C is the least number of pages for which neither type leaves more than MAX_IDLE_SHARE of a chunk idle. With 10 full
and 52 sliding layers the least common multiple would be 260 pages, half a gigabyte at 2 MiB a page; C = 52 holds five
full blocks, 2 pages idle (3.8 %), or one sliding block, none idle. A model of one type has one block per chunk.

A block is named by the number of its first page in the whole storage; the page of the k-th layer of its type comes
k pages later. Pages, blocks and chunks are thus numbered by one scale, and chunk = page // C.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelShape

MAX_IDLE_SHARE = 0.05


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one type of attention, by their number in the model. `window` is None for full attention."""

    attention_type: str
    layers: tuple[int, ...]
    window: int | None
    page_size: int
    pages_per_chunk: int

    @property
    def pages_per_block(self) -> int:
        return len(self.layers)

    @property
    def blocks_per_chunk(self) -> int:
        return self.pages_per_chunk // len(self.layers)

    @property
    def max_blocks(self) -> int | None:
        """The most blocks that one request holds: the ring over the window; None for full attention."""
        return None if self.window is None else -(-self.window // self.page_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold what later tokens may see of a request's first `num_tokens`."""
        num_blocks = -(-num_tokens // self.page_size)
        return num_blocks if self.max_blocks is None else min(num_blocks, self.max_blocks)

    def first_visible(self, position: int) -> int:
        """The earliest token that the one at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class CacheLayout:
    """The layer groups of a model, full attention first, and the chunk that they tile."""

    groups: tuple[LayerGroup, ...]
    page_size: int
    pages_per_chunk: int

    @classmethod
    def of(cls, shape: ModelShape, page_size: int) -> "CacheLayout":
        layers = {
            attention_type: tuple(number for number, own in enumerate(shape.layer_types) if own == attention_type)
            for attention_type in (FULL_ATTENTION, SLIDING_ATTENTION)
        }
        pages_per_chunk = pages_per_chunk_for([len(members) for members in layers.values() if members])
        groups = tuple(
            LayerGroup(
                attention_type,
                members,
                shape.sliding_window if attention_type == SLIDING_ATTENTION else None,
                page_size,
                pages_per_chunk,
            )
            for attention_type, members in layers.items()
            if members
        )
        return cls(groups, page_size, pages_per_chunk)

    @property
    def supports_sharing(self) -> bool:
        """Blocks can be shared only when every layer keeps all tokens (law 5)."""
        return all(group.window is None for group in self.groups)

    def chunks_for_blocks(self, num_blocks: int) -> int:
        """Data chunks in which every group finds `num_blocks` blocks."""
        return sum(-(-num_blocks // group.blocks_per_chunk) for group in self.groups)

    def blocks_in_chunks(self, num_chunks: int) -> int:
        """The most whole-model blocks that `num_chunks` data chunks hold: the inverse of `chunks_for_blocks`."""
        return _largest(lambda num_blocks: self.chunks_for_blocks(num_blocks) <= num_chunks)

    def chunks_for_tokens(self, num_tokens: int) -> int:
        """Data chunks that one request of `num_tokens` tokens takes of an empty cache."""
        return sum(-(-group.num_blocks_for(num_tokens) // group.blocks_per_chunk) for group in self.groups)

    def max_request_tokens(self, num_chunks: int, most: int) -> int:
        """The longest request, of `most` tokens at most, that fits in `num_chunks` data chunks alone."""
        return min(most, _largest(lambda num_tokens: self.chunks_for_tokens(min(num_tokens, most)) <= num_chunks, most))


def pages_per_chunk_for(layer_counts: list[int]) -> int:
    """C of the drawing above, from the number of layers of each type."""
    pages = max(layer_counts)
    while any(pages % count > MAX_IDLE_SHARE * pages for count in layer_counts):
        pages += 1
    return pages


def _largest(fits: Callable[[int], bool], most: int = 1 << 62) -> int:
    """The largest number up to `most` that fits, for a condition that holds up to some number and not beyond."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
