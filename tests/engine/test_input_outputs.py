"""What a batch looks like in tensors, against what its requests are, token by token."""

import copy
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from cbgen.cache.layout import CacheLayout, LayerGroup
from cbgen.cache.paged_cache import PagedCache
from cbgen.cache.pool import NUM_RESERVED_CHUNKS, READ_RESERVE_CHUNK, WRITE_RESERVE_CHUNK
from cbgen.config import FULL_ATTENTION, SLIDING_ATTENTION, ModelShape
from cbgen.engine.input_outputs import BatchInputs, InputBuffers, Padding, PassShape
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, ScheduledRequest
from cbgen.kernels.backend import AttentionBatch
from cbgen.streams import InOrderStreams

CPU = torch.device("cpu")
MAX_BATCH_TOKENS, MAX_REQUESTS, MAX_MODEL_LEN = 256, 8, 1200
FULL, SLIDING = FULL_ATTENTION, SLIDING_ATTENTION
LAYERS = {"full": [FULL] * 2, "sliding": [SLIDING] * 2, "hybrid": [SLIDING, FULL, SLIDING, SLIDING, FULL]}
Place = tuple[int, int]  # page, offset


class World:
    """Requests in a cache, the buffers that lay them out, and which token each place in the pages holds by now."""

    def __init__(self, layer_types: list[str], page_size: int = 4, window: int = 6, share: bool = False):
        shape = ModelShape(tuple(layer_types), window if SLIDING in layer_types else None, 1, 1, 1, 1, 1, 1, 1)
        self.layout = CacheLayout.of(shape, page_size)
        num_chunks = self.layout.chunks_for_blocks(1200 // page_size) + NUM_RESERVED_CHUNKS
        self.cache = PagedCache(self.layout, num_chunks, share)
        self.buffers = InputBuffers(MAX_BATCH_TOKENS, MAX_REQUESTS, self.layout, MAX_MODEL_LEN, InOrderStreams(CPU))
        self.requests: list[RequestState] = []
        self.memory: list[dict[Place, tuple[int, int]]] = [{} for _ in self.layout.groups]  # place -> request, token

    def add(self, length: int, token_ids: list[int] | None = None) -> RequestState:
        ids = token_ids or [1000 * len(self.requests) + place for place in range(length)]
        self.requests.append(RequestState(len(self.requests), ids, SamplingParams(1)))
        return self.requests[-1]

    def plan(self, pieces: list[tuple[RequestState, int]]) -> ScheduledBatch:
        """A batch of the next so many tokens of each request, allocated as the scheduler does it."""
        batch = ScheduledBatch()
        for request, query_length in pieces:
            request_id, start, num_matched = request.request_id, request.num_computed_tokens, 0
            if request_id in self.cache.holders:
                assert self.cache.allocate(request_id, start + query_length)
            else:
                match = self.cache.match(request_id, request.token_ids)
                start = num_matched = len(match.blocks) * self.cache.page_size
                assert self.cache.admit(request_id, request.token_ids, start + query_length, match)
            end = start + query_length
            self.cache.register(request_id, request.token_ids, end)
            samples = end == len(request.token_ids)
            batch.scheduled.append(ScheduledRequest(request, start, query_length, num_matched, samples))
        return batch

    def advance(self, batch: ScheduledBatch) -> None:
        """The pass is over."""
        for entry in batch.scheduled:
            if entry in batch.admitted:
                entry.request.admit(entry.start, 0.0)
            entry.request.advance(entry.query_length)

    def step(self, pieces: list[tuple[RequestState, int]]) -> BatchInputs:
        """One pass, checked on every side."""
        batch = self.plan(pieces)
        inputs = self.buffers.lay_out(batch, self.cache)
        check_tokens(batch, inputs)
        for group, memory, attention in zip(self.layout.groups, self.memory, inputs.attention, strict=True):
            check_attention(batch, group, memory, attention)
        self.advance(batch)
        return inputs


def check_tokens(batch: ScheduledBatch, inputs: BatchInputs) -> None:
    """Ids, positions and the places that give logits, one token after another."""
    ids, positions, logits = [], [], []
    for entry in batch.scheduled:
        for position in range(entry.start, entry.kv_length):
            ids.append(entry.request.token_ids[position])
            positions.append(position)
        if entry.samples:
            logits.append(len(ids) - 1)
    assert inputs.input_ids.tolist() == [ids]
    assert inputs.position_ids.tolist() == [positions]
    assert inputs.logits_indices.tolist() == logits
    assert {t.dtype for t in (inputs.input_ids, inputs.position_ids, inputs.logits_indices)} == {torch.int64}


def check_attention(
    batch: ScheduledBatch, group: LayerGroup, memory: dict[Place, tuple[int, int]], attention: AttentionBatch
) -> None:
    """Every token that a query token sees is where the layout says, and stays there for those that come later."""
    assert attention.query_lengths == [entry.query_length for entry in batch.scheduled]
    assert attention.kv_lengths == [entry.kv_length for entry in batch.scheduled]
    assert attention.window == group.window
    written = dict(zip(_query_tokens(batch), _written_places(attention), strict=True))
    before = dict(memory)
    for token, place in written.items():
        if place[0] != WRITE_RESERVE_CHUNK * group.pages_per_chunk:
            assert place[0] >= NUM_RESERVED_CHUNKS * group.pages_per_chunk
            assert place[1] == token[1] % group.page_size
            memory[place] = token
    for row, entry in enumerate(batch.scheduled):
        request_id = entry.request.request_id
        first, table = attention.first_tokens[row], attention.page_tables[row].tolist()
        assert first % group.page_size == 0
        # A single token is stored before it attends; of several, what they see in the pages is read before.
        at_hand = memory if entry.query_length == 1 or group.window is None else before
        seen_from = 0 if group.window is None else max(0, entry.start - group.window + 1)
        last_in_pages = entry.kv_length if at_hand is memory else entry.start
        for token in range(seen_from, last_in_pages):
            page, offset = table[(token - first) // group.page_size], token % group.page_size
            assert at_hand[page, offset] == (request_id, token)
        num_pages = -(-(last_in_pages - first) // group.page_size)
        assert set(table[num_pages:]) <= {READ_RESERVE_CHUNK * group.pages_per_chunk}, "rows end with the read reserve"
        needed_from = 0 if group.window is None else max(0, entry.kv_length - group.window + 1)
        kept = {token for owner, token in memory.values() if owner == request_id}
        assert kept >= set(range(needed_from, entry.kv_length)), "a token that later ones see was overwritten"


def _query_tokens(batch: ScheduledBatch) -> Iterator[tuple[int, int]]:
    for entry in batch.scheduled:
        for position in range(entry.start, entry.kv_length):
            yield entry.request.request_id, position


def _written_places(attention: AttentionBatch) -> list[Place]:
    """Where each query token's KV goes; no place but those in the reserve gets two."""
    return list(zip(attention.write_pages.tolist(), attention.write_offsets.tolist(), strict=True))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 24])
def test_random_batches(layers: str, page_size: int, window: int) -> None:
    """Requests taken through pieces of any length, single tokens and pieces beyond the ring among them."""
    rng = random.Random(window)
    world = World(LAYERS[layers], page_size, window)
    requests = [world.add(rng.choice([1, 2, page_size, window + 1, rng.randint(1, 120)])) for _ in range(12)]
    while unfinished := [request for request in requests if request.num_remaining_tokens]:
        chosen = rng.sample(unfinished, min(len(unfinished), rng.randint(1, 5)))
        wishes = [(r, rng.choice([1, 1, 2, rng.randint(1, 50), 50])) for r in chosen]
        world.step([(request, min(wish, request.num_remaining_tokens)) for request, wish in wishes])


def test_an_example_of_full_attention() -> None:
    """A whole prompt, a decode and the second piece of a prompt, page size 4, read off by eye."""
    world = World([FULL], page_size=4)
    whole, decode, piece = world.add(5), world.add(10), world.add(20)
    world.step([(decode, 9), (piece, 6)])
    inputs = world.step([(whole, 5), (decode, 1), (piece, 2)])
    (attention,) = inputs.attention
    assert inputs.input_ids.tolist() == [[0, 1, 2, 3, 4, 1009, 2006, 2007]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 9, 6, 7]]
    assert inputs.logits_indices.tolist() == [4, 5]
    assert (attention.query_lengths, attention.kv_lengths) == ([5, 1, 2], [5, 10, 8])
    # Blocks are handed out from page 2 on: three to the decode, two to the piece, then two to the whole prompt.
    assert attention.page_tables.tolist() == [[7, 8, 0], [2, 3, 4], [5, 6, 0]]
    assert attention.write_pages.tolist() == [7, 7, 7, 7, 8, 4, 6, 6]
    assert attention.write_offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert attention.first_tokens == [0, 0, 0]


def test_an_example_of_a_ring() -> None:
    """Window 6 and page size 4: token t lives in block t // 4 % 2, and the first of many tokens nowhere."""
    world = World([SLIDING], page_size=4, window=6)
    many, decode, piece = world.add(11), world.add(10), world.add(20)
    first_of_ring = {request.request_id: 2 + 2 * place for place, request in enumerate((decode, piece, many))}
    world.step([(decode, 9), (piece, 9)])
    (attention,) = world.step([(many, 11), (decode, 1), (piece, 3)]).attention
    a, b, c = (first_of_ring[request.request_id] for request in (many, decode, piece))
    assert attention.write_pages.tolist() == [1, 1, 1, a, *[a + 1] * 4, a, a, a, b, c, c, c]
    assert attention.write_offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 1, 1, 2, 3]
    # Token 9 sees 4 to 9; tokens 9 to 11 see 4 to 8 of the ring. Nothing is before the first piece.
    assert attention.first_tokens == [0, 4, 4]
    assert attention.page_tables.tolist() == [[0, 0], [b + 1, b], [c + 1, c]]


def test_a_window_over_three_pages_of_a_ring_of_two() -> None:
    """The oldest and the newest page are one: the row names it twice, and positions tell which of it is which."""
    world = World([SLIDING], page_size=4, window=6)
    request = world.add(9)
    world.step([(request, 8)])
    (attention,) = world.step([(request, 1)]).attention
    assert attention.first_tokens == [0]
    assert attention.page_tables.tolist() == [[2, 3, 2]]


def test_tokens_that_no_later_one_sees_go_to_the_write_reserve() -> None:
    """In each group's own reserve, and only where a later token of the pass takes the place."""
    world = World(LAYERS["hybrid"], page_size=4, window=6)
    request = world.add(30)
    (full, sliding), size = world.step([(request, 25)]).attention, world.layout.pages_per_chunk
    assert WRITE_RESERVE_CHUNK * size not in full.write_pages.tolist()
    assert [page == WRITE_RESERVE_CHUNK * size for page in sliding.write_pages.tolist()] == [True] * 17 + [False] * 8


def test_a_matched_prefix_is_not_laid_out_again() -> None:
    """Of a request that takes over blocks of its own pass, only the rest is computed; the table names them all."""
    world = World([FULL], page_size=4, share=True)
    first, second = world.add(10), world.add(0, [*range(8), 50, 51, 52])
    inputs = world.buffers.lay_out(world.plan([(first, 10), (second, 3)]), world.cache)
    assert inputs.position_ids.tolist() == [[*range(10), 8, 9, 10]]
    (attention,) = inputs.attention
    assert attention.page_tables.tolist() == [[2, 3, 4], [2, 3, 5]]
    assert (attention.query_lengths, attention.kv_lengths) == ([10, 3], [10, 11])
    assert attention.write_pages[10:].tolist() == [5, 5, 5]


def test_no_request_reaches_its_end() -> None:
    """The index of logits is then an empty tensor, which asks for none."""
    world = World([FULL])
    inputs = world.step([(world.add(20), 7), (world.add(9), 8)])
    assert inputs.logits_indices.shape == (0,)
    assert inputs.logits_indices.dtype == torch.int64


@pytest.mark.parametrize("layers", LAYERS)
def test_addresses_are_static(layers: str) -> None:
    """Batches of one shape lie at one place, whatever was in between: a recorded graph may read it there."""
    world = World(LAYERS[layers])
    addresses: dict[PassShape, set[tuple[int, ...]]] = {}
    for lengths in ([3, 1], [200, 9], [1] * MAX_REQUESTS, [3, 1], [1] * MAX_REQUESTS, [200, 9]):
        requests = [world.add(length) for length in lengths]
        inputs = world.step([(request, request.num_remaining_tokens) for request in requests])
        tensors = [inputs.input_ids, inputs.position_ids, inputs.carried, inputs.logits_indices]
        for own in inputs.attention:
            tensors += [own.write_pages, own.write_offsets, own.page_tables]
        assert all(tensor.is_contiguous() for tensor in tensors)
        own_addresses = tuple(tensor.data_ptr() for tensor in tensors)
        assert len(set(own_addresses)) == len(tensors), "no two lie at the same place"
        addresses.setdefault(inputs.shape, set()).add(own_addresses)
    assert len(addresses) == 3
    assert all(len(places) == 1 for places in addresses.values())


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("query_step", "kv_step"), [(8, 16), (16, 64)])
def test_padding_changes_no_number_of_a_batch(layers: str, query_step: int, kv_step: int) -> None:
    """Beside a layout without it, for random batches: the same numbers, and what is added belongs to nobody."""
    rng = random.Random(query_step)
    world = World(LAYERS[layers])
    padding = Padding(query_step, kv_step)
    padded = InputBuffers(MAX_BATCH_TOKENS, MAX_REQUESTS, world.layout, MAX_MODEL_LEN, InOrderStreams(CPU), padding)
    requests = [world.add(rng.choice([1, 2, 7, rng.randint(1, 90)])) for _ in range(10)]
    while unfinished := [request for request in requests if request.num_remaining_tokens]:
        chosen = rng.sample(unfinished, min(len(unfinished), rng.randint(1, 5)))
        lengths = [1] * len(chosen) if rng.random() < 0.5 else [rng.randint(1, 40) for _ in chosen]
        batch = world.plan([(r, min(n, r.num_remaining_tokens)) for r, n in zip(chosen, lengths, strict=True)])
        check_padding(
            world.buffers.lay_out(batch, world.cache), padded.lay_out(batch, world.cache), batch, world.layout
        )
        world.advance(batch)


def check_padding(plain: BatchInputs, padded: BatchInputs, batch: ScheduledBatch, layout: CacheLayout) -> None:
    num_tokens, num_requests = batch.num_query_tokens, len(batch.scheduled)
    assert padded.shape.query_tokens == padded.input_ids.shape[1] >= num_tokens
    assert padded.num_logits == len(plain.logits_indices)
    for one, other in ((plain.input_ids, padded.input_ids), (plain.position_ids, padded.position_ids)):
        assert torch.equal(one, other[:, :num_tokens])
    assert torch.equal(plain.logits_indices, padded.logits_indices[: padded.num_logits])
    assert (padded.carried == -1).all()
    for group, one, other in zip(layout.groups, plain.attention, padded.attention, strict=True):
        width = min(one.page_tables.shape[1], other.page_tables.shape[1])
        assert torch.equal(one.page_tables[:, :width], other.page_tables[:num_requests, :width])
        reserve = READ_RESERVE_CHUNK * group.pages_per_chunk
        assert (one.page_tables[:, width:] == reserve).all()
        assert (other.page_tables[:num_requests, width:] == reserve).all()
        assert (other.page_tables[num_requests:] == reserve).all()
        assert torch.equal(one.write_pages, other.write_pages[:num_tokens])
        assert torch.equal(one.write_offsets, other.write_offsets[:num_tokens])
        assert (other.write_pages[num_tokens:] == WRITE_RESERVE_CHUNK * group.pages_per_chunk).all()
        check_on_device(other, batch, group)


def check_on_device(attention: AttentionBatch, batch: ScheduledBatch, group: LayerGroup) -> None:
    """See DeviceBatch: every query token, padding too, is of exactly one request."""
    device, num_requests = attention.on_device, len(batch.scheduled)
    assert device is not None
    starts = device.query_starts.tolist()
    assert len(starts) == len(attention.page_tables) + 1
    assert (starts[0], starts[-1]) == (0, len(attention.write_pages))
    lengths = [last - first for first, last in pairwise(starts)]
    assert lengths[:num_requests] == attention.query_lengths
    assert min(lengths) >= 0
    assert max(lengths) <= device.max_query_length
    kv_lengths = device.kv_lengths.tolist()
    expected = [kv - first for kv, first in zip(attention.kv_lengths, attention.first_tokens, strict=True)]
    assert kv_lengths[:num_requests] == expected
    assert all(
        kv == (1 if length else 0) for kv, length in zip(kv_lengths[num_requests:], lengths[num_requests:], strict=True)
    )
    assert device.max_kv_length == attention.page_tables.shape[1] * group.page_size
    several = [row for row, length in enumerate(attention.query_lengths) if length > 1]
    assert (device.gather is not None) == (group.window is not None and bool(several))
    if device.gather is None or device.gather_starts is None:
        return
    bounds = device.gather_starts.tolist()
    assert len(bounds) == len(starts)
    for row, entry in enumerate(batch.scheduled):
        own = device.gather[bounds[row] : bounds[row + 1]].tolist()
        assert len(own) <= device.max_gathered
        assert bool(own) == (row in several)
        if own:
            assert own[-entry.query_length :] == [-1 - token for token in range(starts[row], starts[row + 1])]
            history = own[: -entry.query_length]
            seen = range(entry.start - len(history), entry.start)
            assert not history or (seen[0] <= group.first_visible(entry.start) and seen[0] % group.page_size == 0)
            table = attention.page_tables[row].tolist()
            for token, place in zip(seen, history, strict=True):
                page = table[(token - attention.first_tokens[row]) // group.page_size]
                assert place == page * group.page_size + token % group.page_size


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("padding", [None, Padding(8, 16), Padding(64, 2048)])
def test_the_largest_batches_have_room(layers: str, padding: Padding | None) -> None:
    """As many tokens, requests and tokens of KV as there may be, in one batch."""
    for lengths in ([MAX_BATCH_TOKENS], [1] * MAX_REQUESTS, [MAX_BATCH_TOKENS // MAX_REQUESTS] * MAX_REQUESTS):
        world = World(LAYERS[layers])
        world.buffers = InputBuffers(
            MAX_BATCH_TOKENS, MAX_REQUESTS, world.layout, MAX_MODEL_LEN, InOrderStreams(CPU), padding
        )
        requests = [world.add(MAX_MODEL_LEN // len(lengths) - 8) for _ in lengths]
        for request, length in zip(requests, lengths, strict=True):
            before = min(request.num_remaining_tokens - length, MAX_BATCH_TOKENS)
            if before > 0:
                world.advance(world.plan([(request, before)]))
        batch = world.plan([(r, min(n, r.num_remaining_tokens)) for r, n in zip(requests, lengths, strict=True)])
        assert world.buffers.lay_out(batch, world.cache).num_words <= len(world.buffers.host)


def test_tokens_that_are_awaited_come_from_the_pass_before() -> None:
    """Their rows there are laid out, and no id."""
    world = World([FULL])
    first, second = world.add(3), world.add(2)
    world.step([(first, 3), (second, 2)])
    batch = ScheduledBatch([_next_token(world, second), _next_token(world, first)])
    inputs = world.buffers.lay_out(batch, world.cache, {first.request_id: 0, second.request_id: 1})
    assert inputs.carried.tolist() == [1, 0]
    assert inputs.position_ids.tolist() == [[2, 3]]


def _next_token(world: World, request: RequestState) -> ScheduledRequest:
    start = len(request.token_ids)
    assert world.cache.allocate(request.request_id, start + 1)
    return ScheduledRequest(request, start, 1, 0, samples=True)


def test_request_state_is_read_only() -> None:
    """Laying out the same batch twice gives the same, and no request or block changes by it."""
    world = World(LAYERS["hybrid"])
    requests = [world.add(30), world.add(9)]
    world.step([(requests[0], 20), (requests[1], 8)])
    batch = world.plan([(requests[0], 10), (requests[1], 1)])
    before = copy.deepcopy((batch, [a._tables for a in world.cache.allocators]))
    first = copy.deepcopy(world.buffers.lay_out(batch, world.cache))
    again = world.buffers.lay_out(batch, world.cache)
    assert (batch, [a._tables for a in world.cache.allocators]) == before
    assert torch.equal(first.input_ids, again.input_ids)
    for one, other in zip(first.attention, again.attention, strict=True):
        assert torch.equal(one.page_tables, other.page_tables)
        assert torch.equal(one.write_pages, other.write_pages)
