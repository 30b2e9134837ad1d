"""Passes that are recorded as graphs, and two of them at a time: the device computes one while the host prepares the
next.

host       lay out 0 │ lay out 1 │ read 0, apply │ lay out 2 │ read 1, apply │
TRANSFER      └► in 0 │     └► in 1 │      ┌► out 0    └► in 2 │      ┌► out 1
COMPUTE              └► pass 0 ═══════════╪═► pass 1 ══════════╪═══════► pass 2 ═══
                          token ids ──────┘──► ids of pass 1, on the device

Pass N takes the buffers of pair N % 2. They are free when it is laid out, because pass N - 2 was read before. What it
lacks is the tokens of pass N - 1, which nobody but the device has: it takes them from there. All that touches KV, the
copies of forks and of the swap pool too, is on COMPUTE, in the order in which the host decided on it; so blocks may be
given away as soon as the host knows that their owner has ended, while a pass launched before still writes them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from cbgen.cache.paged_cache import PagedCache
from cbgen.engine.cuda_graphs import GraphCache
from cbgen.engine.device_sampling import ChoiceBuffers, Choices
from cbgen.engine.failures import named_failures
from cbgen.engine.input_outputs import BatchInputs, InputBuffers, PassShape, max_logits
from cbgen.engine.model_runner import ModelRunner
from cbgen.engine.passes import all_logits, rows_of
from cbgen.engine.requests import RequestState
from cbgen.engine.sampler import Sampled, Sampler
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.streams import COMPUTE, TRANSFER, Event, Streams


class BufferPair:
    """Inputs and outputs of one pass, at addresses that stay.

    logits: [most S, vocab]. token_ids: int64 [2 x most requests], what was chosen for each row (parents and their forks
    are rows), and is_finite: whether its logits were numbers; both are views of the words that the host reads.
    """

    def __init__(self, inputs: InputBuffers, vocab_size: int, dtype: torch.dtype, streams: Streams):
        self.inputs = inputs
        most_logits = max_logits(inputs.max_requests_per_batch, inputs.padding)
        most_rows = most_logits + 2 * inputs.max_requests_per_batch
        self.logits = torch.zeros(most_logits, vocab_size, dtype=dtype, device=streams.device)
        self._host, self._device = streams.allocate(2 * most_rows)
        self.token_ids, self.is_finite = self._device.view(2, most_rows)
        self.choices = ChoiceBuffers(most_rows, streams)
        # Until then the device may use what is here; None: it does not.
        self.in_use: Event | None = None

    def settle(self) -> None:
        """Waits until the buffers are free: they are, unless a pass was launched that nobody has read (it failed while
        it was started, or whoever started it was interrupted)."""
        if self.in_use is not None:
            self.in_use.synchronize()
            self.in_use = None

    @property
    def num_bytes(self) -> int:
        """Of the device."""
        return sum(part.nbytes for part in (self.inputs.device, self.logits, self._device)) + self.choices.num_bytes

    def send_back(self) -> None:
        """Copies what was chosen to the host."""
        if self._device is not self._host:
            self._host.copy_(self._device, non_blocking=True)

    def chosen(self, num_rows: int) -> tuple[list[int], list[bool]]:
        """Token ids and whether there is one, of the first rows, as they were sent back."""
        token_ids, is_finite = self._host.view(2, -1)[:, :num_rows].tolist()
        return token_ids, [bool(flag) for flag in is_finite]


@dataclass
class LaunchedPass:
    """done: when all of it is computed. on_device: whether the tokens were chosen there."""

    pair: BufferPair
    num_logits: int
    done: Event
    rows: list[int] = field(default_factory=list)
    requests: list[RequestState] = field(default_factory=list)
    on_device: bool = False


class StagedPasses:
    """Passes over static buffers: with one pair one at a time, with two overlapping (depth 2).

    graphs: None runs every pass as it is.
    """

    def __init__(
        self,
        pairs: list[BufferPair],
        runner: ModelRunner,
        sampler: Sampler,
        streams: Streams,
        graphs: GraphCache | None,
    ):
        self.depth = len(pairs)
        self.max_batch_tokens = pairs[0].inputs.max_batch_tokens
        self.runner, self.sampler, self.graphs = runner, sampler, graphs
        self._pairs, self._streams = pairs, streams
        self._num_launched = 0
        self._rows_before: dict[int, int] = {}  # of the last pass launched: request -> row of its token

    def lay_out(self, batch: ScheduledBatch, cache: PagedCache) -> BatchInputs:
        """See Passes."""
        self._pair.settle()
        return self._pair.inputs.lay_out(batch, cache, self._rows_before)

    def launch(self, inputs: BatchInputs) -> LaunchedPass:
        """See Passes."""
        pair = self._pair
        try:
            self._start(self._num_launched % len(self._pairs), inputs)
        finally:
            done = pair.in_use = self._streams.record(COMPUTE)
        self._num_launched += 1
        self._rows_before = {}
        return LaunchedPass(pair, inputs.num_logits, done)

    def warm_up(self, cache: PagedCache, max_model_len: int) -> None:
        """Records passes of decodes, from short contexts to long ones, until half of the graphs are used: passes of
        padding, which change nothing. Without graphs afterwards, passes do not overlap either."""
        if self.graphs is None:
            return
        for shape in decode_shapes(self._pairs[0].inputs, max_model_len)[: self.graphs.max_graphs // 2 // self.depth]:
            for number, pair in enumerate(self._pairs):
                self._start(number, pair.inputs.blank(*shape, cache))
                self._streams.record(COMPUTE).synchronize()
        if self.graphs.failure is not None:
            self.depth = 1

    def _start(self, number: int, inputs: BatchInputs) -> None:
        """Hands over a pass that was laid out in pair `number`."""
        pair = self._pairs[number]
        self._streams.submit(TRANSFER, partial(pair.inputs.send, inputs, non_blocking=True))
        self._streams.wait(COMPUTE, self._streams.record(TRANSFER))
        self._run(number, inputs.shape, partial(self._compute, pair, self._before(number), inputs))

    def _before(self, number: int) -> BufferPair | None:
        """The pair of the pass before one of pair `number`."""
        return self._pairs[1 - number] if len(self._pairs) == 2 else None

    @property
    def _pair(self) -> BufferPair:
        return self._pairs[self._num_launched % len(self._pairs)]

    @named_failures()
    def _run(self, number: int, shape: PassShape, work: Callable[[], None]) -> None:
        """The pass of buffer pair `number`."""
        if self.graphs is None:
            self._streams.submit(COMPUTE, work)
        else:
            self.graphs.run((number, shape), work, comes_often=shape.max_query_length == 1)

    @torch.inference_mode()
    def _compute(self, pair: BufferPair, before: BufferPair | None, inputs: BatchInputs) -> None:
        """The pass itself, which may be recorded: it reads and writes static memory, and its sizes are the shape's."""
        if before is not None:
            known = inputs.carried < 0
            ids = torch.where(known, inputs.input_ids[0], before.token_ids[inputs.carried.clamp(min=0)])
            inputs = inputs.with_ids(ids[None])
        logits = self.runner.forward(inputs)
        best, best_ids = logits.max(dim=-1)
        pair.logits[: len(logits)].copy_(logits)
        pair.token_ids[: len(logits)].copy_(best_ids)
        pair.is_finite[: len(logits)].copy_(torch.isfinite(best))

    def choose(self, launched: LaunchedPass, rows: list[int], requests: list[RequestState]) -> None:
        """See Passes. On the device, where passes overlap; rows that need the host wait until it reads them."""
        launched.rows, launched.requests = rows, requests
        if self.depth == 1 or any(request.needs_host for request in requests):
            return
        launched.on_device = True
        self._rows_before = {request.request_id: row for row, request in enumerate(requests)}
        choices = Choices.of(rows, requests)
        if not choices.is_likeliest_of_each(launched.num_logits):
            try:
                self._choose_otherwise(launched.pair, choices)
            finally:
                launched.done = launched.pair.in_use = self._streams.record(COMPUTE)

    def _choose_otherwise(self, pair: BufferPair, choices: Choices) -> None:
        """Rows that are drawn, and rows in another order than the logits: forks, and prompts that are scored."""
        streams = self._streams
        sent = pair.choices.lay_out(choices)
        streams.submit(TRANSFER, partial(pair.choices.send, sent))
        streams.wait(COMPUTE, streams.record(TRANSFER))
        streams.submit(COMPUTE, partial(pair.choices.choose, sent, pair.logits, pair.token_ids, pair.is_finite))

    def read(self, launched: LaunchedPass) -> tuple[torch.Tensor, Sampled]:
        """See Passes. The tokens are fetched now and not before, so that the inputs of a pass do not queue behind."""
        logits, streams = launched.pair.logits[: launched.num_logits], self._streams
        if not launched.on_device:
            launched.done.synchronize()
            launched.pair.in_use = None
            return logits, self.sampler.sample(rows_of(logits, launched.rows), launched.requests)
        streams.wait(TRANSFER, launched.done)
        streams.submit(TRANSFER, launched.pair.send_back)
        streams.record(TRANSFER).synchronize()
        launched.pair.in_use = None
        token_ids, is_finite = launched.pair.chosen(len(launched.rows))
        return logits, self.sampler.described(logits, launched.rows, launched.requests, token_ids, is_finite)

    def logits_of(self, batch: ScheduledBatch, cache: PagedCache) -> torch.Tensor:
        """See Passes."""
        inputs = self.lay_out(batch, cache)
        self._streams.submit(TRANSFER, partial(self._pair.inputs.send, inputs))
        self._streams.record(TRANSFER).synchronize()
        found: list[torch.Tensor] = []
        self._streams.submit(COMPUTE, lambda: found.append(all_logits(inputs, batch, self.runner)))
        self._streams.record(COMPUTE).synchronize()
        return self._streams.handed_over(found[0])

    @contextmanager
    def watched(self, records: bool) -> Iterator[None]:
        """See Passes."""
        depth, graphs = self.depth, self.graphs
        self.depth, self.graphs = 1, graphs if records else None
        try:
            yield
        finally:
            self.depth, self.graphs = depth, graphs

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """See Passes: the storage hands its copies to COMPUTE."""
        self.runner.copy_pages(pairs)

    @property
    def records(self) -> bool:
        """Whether passes become graphs: not any more once one could not be recorded."""
        return self.graphs is not None and self.graphs.failure is None

    def release_memory(self) -> None:
        """See Passes."""
        if self.graphs is not None:
            self.graphs.clear()
        self.runner.release_memory()


def decode_shapes(inputs: InputBuffers, max_model_len: int) -> list[tuple[int, int]]:
    """Query tokens and tokens of KV of passes of decodes, few tokens of KV first, then many requests first."""
    assert inputs.padding is not None
    steps = inputs.padding
    most = max_logits(min(inputs.max_requests_per_batch, inputs.max_batch_tokens), steps)
    counts = range(most, 0, -steps.query_tokens)
    lengths = range(steps.kv_tokens, max_model_len + steps.kv_tokens, steps.kv_tokens)
    return [(count, length) for length in lengths for count in counts]
