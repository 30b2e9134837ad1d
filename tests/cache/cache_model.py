"""A plain model of what the cache is for: which tokens' KV lies where, and what of it can be found again.

    memory:  page ──► what each place in it holds: (layer, all tokens up to and including that one)

KV depends on all tokens before it, so that is what a place holds: two requests may read the same page only where their
tokens agree from position 0 on.
"""

from dataclasses import dataclass, field

from cbgen.cache.allocator import CacheAllocator
from cbgen.cache.paged_cache import PagedCache

Prefix = tuple[int, ...]
Place = tuple[int, Prefix]


@dataclass
class Request:
    """num_written of its tokens have their KV in the cache or, swapped out, in the pages that it left with."""

    token_ids: list[int]
    num_written: int = 0
    num_promised: int = 0
    swapped: list[list[Place | None]] = field(default_factory=list)

    def prefix(self, num_tokens: int) -> Prefix:
        return tuple(self.token_ids[:num_tokens])

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - self.num_written


class Memory:
    """The content of every page, for the block tables that a real cache gives out."""

    def __init__(self, cache: PagedCache):
        self._cache = cache
        self._pages: dict[int, list[Place | None]] = {}

    def page(self, number: int) -> list[Place | None]:
        return self._pages.setdefault(number, [None] * self._cache.page_size)

    def copies(self, pages: list[int]) -> list[list[Place | None]]:
        return [list(self.page(number)) for number in pages]

    def paste(self, pages: list[int], contents: list[list[Place | None]]) -> None:
        for number, content in zip(pages, contents, strict=True):
            self._pages[number] = list(content)

    def write(self, request_id: int, request: Request, num_tokens: int) -> None:
        """A pass computes the request's tokens up to num_tokens."""
        for allocator in self._cache.allocators:
            for position in range(request.num_written, num_tokens):
                block, content = self._block(allocator, request_id, position), request.prefix(position + 1)
                for place, layer in enumerate(allocator.group.layers):
                    self.page(block + place)[position % self._cache.page_size] = (layer, content)

    def check_reads(self, request_id: int, request: Request) -> None:
        """All that the last token sees, in every layer, is what the request's own tokens would have written.

        The next one sees no more of it. A ring holds the whole window, the last token included.
        """
        for allocator in self._cache.allocators:
            for position in range(allocator.group.first_visible(request.num_written - 1), request.num_written):
                block, expected = self._block(allocator, request_id, position), request.prefix(position + 1)
                for place, layer in enumerate(allocator.group.layers):
                    found = self.page(block + place)[position % self._cache.page_size]
                    assert found == (layer, expected), f"request {request_id} finds {found} at {position}"

    def _block(self, allocator: CacheAllocator, request_id: int, position: int) -> int:
        """Where a request's token is: the block of its page, or the one of the ring that took that over."""
        number, ring = position // self._cache.page_size, allocator.group.max_blocks
        return allocator.block_table(request_id)[number if ring is None else number % ring]


class Sharing:
    """What a cache with sharing ought to remember: the block that bears each prefix, and the order of release."""

    def __init__(self, cache: PagedCache):
        self._cache = cache
        self.named: dict[Prefix, int] = {}
        self.initialized: list[int] = []
        self.num_demoted = 0

    def owned(self) -> set[int]:
        allocator = self._cache.allocators[0]
        return {block for request_id in allocator.request_ids for block in allocator.block_table(request_id)}

    def match(self, request: Request) -> list[int]:
        """The longest run of named blocks from the first on, with a token left to compute."""
        size, blocks = self._cache.page_size, []
        for end in range(size, len(request.token_ids), size):
            if request.prefix(end) not in self.named:
                break
            blocks.append(self.named[request.prefix(end)])
        return blocks

    def take(self, matched: list[int], num_missing: int) -> None:
        """Before the cache does it: matched blocks are owned, then the last initialized ones make room."""
        self.initialized = [block for block in self.initialized if block not in matched]
        taken = len(self.owned().union(matched)) + len(self.initialized)
        for _ in range(num_missing - (self._cache.num_blocks - taken)):
            block = self.initialized.pop()
            self.named = {prefix: other for prefix, other in self.named.items() if other != block}
            self.num_demoted += 1

    def name(self, request_id: int, request: Request, first_token: int, num_tokens: int) -> None:
        """Blocks that are full with these tokens bear their prefix, unless another block does already."""
        size, table = self._cache.page_size, self._cache.allocators[0].block_table(request_id)
        for number in range(first_token // size, num_tokens // size):
            if table[number] not in self.named.values():
                self.named.setdefault(request.prefix((number + 1) * size), table[number])

    def leave(self, table: list[int]) -> None:
        """After the release of a request that had these blocks: named ones stay, head to tail."""
        self.initialized += [b for b in table if b not in self.owned() and b in self.named.values()]
