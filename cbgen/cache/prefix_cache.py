"""Which block holds which tokens: hashes chained from position 0, reference counts, and blocks kept for reuse.

written by a request      [ owned, registered ]  ◄──match── another request     references: one per owner
                                    │    ▲
           last owner leaves        ▼    │ match
                          [ initialized ]   in order of release
                                    │
   room is needed: newest first     ▼
                          [ uninitialized ]  hash forgotten
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

HASH_BYTES = 16


@dataclass(frozen=True)
class BlockContent:
    """A full block's tokens and the hash of everything from position 0 to their end."""

    hash: bytes
    tokens: bytes


@dataclass
class Chain:
    """The contents of a request's full blocks from the first on, as far as they were asked for."""

    contents: list[BlockContent] = field(default_factory=list)
    num_registered: int = 0
    has_collided: bool = False


@dataclass(frozen=True)
class PrefixMatch:
    """Blocks whose KV a request can take instead of computing it; must_wait: more of them are being computed now."""

    blocks: list[int]
    must_wait: bool = False


class PrefixCache:
    """Content and owners of full-attention blocks. Who frees blocks and hands them out is the allocator.

    An active request promises the blocks of its known tokens that it has yet to write: who shares them waits for it
    instead of computing them too.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, BlockContent] = {}
        self._num_owners: dict[int, int] = {}
        self._initialized: dict[int, None] = {}  # in order of release
        self._promised_by: dict[bytes, int] = {}
        self._chains: dict[int, Chain] = {}

    @property
    def num_initialized(self) -> int:
        return len(self._initialized)

    def num_initialized_among(self, blocks: list[int]) -> int:
        return sum(block in self._initialized for block in blocks)

    def match(self, request_id: int, token_ids: list[int]) -> PrefixMatch:
        """The blocks at hand for the request's first tokens. At least one token is left to compute (law 3)."""
        blocks: list[int] = []
        for content in self._contents(request_id, token_ids, (len(token_ids) - 1) // self._page_size):
            block = self._block_of.get(content.hash)
            if block is None:
                return PrefixMatch(blocks, must_wait=self._promised_by.get(content.hash, request_id) != request_id)
            if self._content_of[block].tokens != content.tokens:  # two contents with one hash
                break
            blocks.append(block)
        return PrefixMatch(blocks)

    def own(self, block: int) -> None:
        """One more request owns the block."""
        self._num_owners[block] = self._num_owners.get(block, 0) + 1
        self._initialized.pop(block, None)

    def disown(self, block: int) -> bool:
        """One request less owns the block. True when it is of no use to anybody: no owner, no content."""
        self._num_owners[block] -= 1
        if self._num_owners[block]:
            return False
        del self._num_owners[block]
        if block not in self._content_of:
            return True
        self._initialized[block] = None
        return False

    def num_owners(self, block: int) -> int:
        return self._num_owners.get(block, 0)

    def demote(self) -> int:
        """Forgets the content of the initialized block released last, and returns it."""
        block, _ = self._initialized.popitem()
        del self._block_of[self._content_of.pop(block).hash]
        return block

    def unname(self, block: int) -> None:
        """Forgets what a block holds, whoever owns it: nobody else is to take it over."""
        content = self._content_of.pop(block, None)
        if content is not None:
            del self._block_of[content.hash]

    def promise(self, request_id: int, token_ids: list[int]) -> None:
        """The request is going to write all full blocks of the tokens it has."""
        for content in self._contents(request_id, token_ids, len(token_ids) // self._page_size):
            if content.hash not in self._block_of:
                self._promised_by.setdefault(content.hash, request_id)

    def register(self, request_id: int, token_ids: list[int], table: list[int], num_tokens: int) -> None:
        """Names those of the request's blocks that are full when its first `num_tokens` tokens are written.

        Also called for the pass that is about to write them: whoever matches them in the same pass reads what was
        written before, since in every layer all of a pass is stored before any of it attends.
        """
        num_full = min(num_tokens, len(token_ids)) // self._page_size
        chain = self._chains.setdefault(request_id, Chain())
        if num_full <= chain.num_registered or chain.has_collided:
            return
        contents = self._contents(request_id, token_ids, num_full)
        for block, content in zip(
            table[chain.num_registered : num_full], contents[chain.num_registered :], strict=True
        ):
            named = self._content_of.get(self._block_of.get(content.hash, -1), content)
            if named.tokens != content.tokens:  # two contents with one hash: what follows is named by neither
                chain.has_collided = True
                return
            self._promised_by.pop(content.hash, None)
            if content.hash not in self._block_of and block not in self._content_of:
                self._block_of[content.hash] = block
                self._content_of[block] = content
        chain.num_registered = num_full

    def adopt_chain(self, parent_id: int, child_id: int, num_blocks: int) -> None:
        """The child begins with the parent's first `num_blocks` full blocks."""
        parent = self._chains.get(parent_id, Chain())
        registered = min(num_blocks, parent.num_registered)
        self._chains[child_id] = Chain(parent.contents[:num_blocks], registered, parent.has_collided)

    def forget(self, request_id: int) -> None:
        """The request leaves: nobody waits for its promises any more. Registered blocks keep their names."""
        chain = self._chains.pop(request_id, Chain())
        for content in chain.contents[chain.num_registered :]:
            if self._promised_by.get(content.hash) == request_id:
                del self._promised_by[content.hash]

    def _contents(self, request_id: int, token_ids: list[int], num_blocks: int) -> list[BlockContent]:
        """The contents of the first `num_blocks` blocks; hashed once per request."""
        contents = self._chains.setdefault(request_id, Chain()).contents
        first = len(contents)
        if num_blocks > first:
            size = self._page_size
            parent = contents[-1].hash if contents else b""
            for start in range(first * size, num_blocks * size, size):
                tokens = array("i", token_ids[start : start + size]).tobytes()
                parent = blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
                contents.append(BlockContent(parent, tokens))
        return contents[:num_blocks]

    @property
    def initialized_blocks(self) -> list[int]:
        """In order of release."""
        return list(self._initialized)

    @property
    def known_ids(self) -> set[int]:
        """The requests whose tokens were asked for and that did not leave since."""
        return set(self._chains)

    def check_integrity(self, tables: dict[int, list[int]]) -> None:
        """Asserts laws 1 to 4 for contents and owners."""
        counted: dict[int, int] = {}
        for table in tables.values():
            assert len(set(table)) == len(table), "a request owns a block twice"
            for block in table:
                counted[block] = counted.get(block, 0) + 1
        assert counted == self._num_owners, "reference counts are not those of the block tables"
        assert not counted.keys() & self._initialized.keys(), "a block is owned and initialized"
        assert self._initialized.keys() <= self._content_of.keys(), "an initialized block without content"
        assert self._content_of.keys() <= counted.keys() | self._initialized.keys(), "content of a freed block"
        assert self._block_of == {content.hash: block for block, content in self._content_of.items()}
        assert set(self._promised_by.values()) <= tables.keys(), "a promise of a request that holds nothing"
        assert not self._promised_by.keys() & self._block_of.keys(), "a promise that is kept already"
        for request_id, table in tables.items():
            chain = self._chains.get(request_id, Chain())
            for block, content in zip(table, chain.contents[: chain.num_registered], strict=False):
                assert self._content_of.get(block, content) == content, "a block bears another's content"
