"""What runs beside the engine: a feeder that makes rows into requests, a collector that makes results into parts.

input ──► [ feeder thread: render, key, tokenize ] ──► engine ──► [ collector thread: decode, publish ] ──► parts
                    └──────────────── rows that cannot become a request ──────────────►┘
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from cbgen.data.readers import Input
from cbgen.data.rows import OutputRow
from cbgen.data.writers import PartWriter
from cbgen.engine.metrics import request_times
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt, draw_seed, row_key

FEED_ROWS = 128
FEED_BATCHES_AHEAD = 4
COLLECT_ROWS_AHEAD = 4096
POLL_S = 0.2


@dataclass(frozen=True)
class RowTag:
    """Which sample of which row a request is for."""

    key: bytes
    index: int
    sample_index: int


def sample_key(key: bytes, sample_index: int) -> bytes:
    """Names one sample of a row, as the set of finished ones holds it."""
    return key + sample_index.to_bytes(4, "little")


class Collector:
    """Turns finished requests into output rows and publishes them, in a thread of its own."""

    def __init__(self, prompter: Prompter, writer: PartWriter):
        self.num_ok = 0
        self.num_failed = 0
        self._prompter = prompter
        self._writer = writer
        self._queue: queue.Queue[RequestState | OutputRow | None] = queue.Queue(COLLECT_ROWS_AHEAD)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="cbgen-collector", daemon=True)
        self._thread.start()

    def put(self, item: RequestState | OutputRow | None) -> None:
        """Hands over a finished request or a failed row. Raises what stopped the thread, such as a full disk."""
        while True:
            if self._failure is not None:
                raise self._failure
            assert self._thread.is_alive(), "the collector ended before its input did"
            try:
                return self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue

    def close(self) -> None:
        """Publishes everything handed over so far."""
        if self._failure is None:
            self.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while (items := self._next_items()) is not None:
                self._writer.add(self._rows(items))
                self._writer.flush_if_due()
            self._writer.flush()
        except BaseException as error:  # noqa: BLE001 (a panic of a Rust library is no Exception)
            self._failure = error  # raised in the main thread by the next put or close

    def _next_items(self) -> list[RequestState | OutputRow] | None:
        """What is in the queue, at once; empty after a pause; None at the end."""
        items: list[RequestState | OutputRow] = []
        try:
            item = self._queue.get(timeout=POLL_S)
            while item is not None:
                items.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return items
        if items:
            self._queue.put(None)  # the end comes again after these
        return items or None

    def _rows(self, items: list[RequestState | OutputRow]) -> list[OutputRow]:
        requests = [item for item in items if isinstance(item, RequestState)]
        texts = self._prompter.decode([_text_ids(request) for request in requests])
        rows = [item for item in items if isinstance(item, OutputRow)]
        rows += [_output_row(request, text) for request, text in zip(requests, texts, strict=True)]
        failed = sum(row.error is not None for row in rows)
        self.num_failed += failed
        self.num_ok += len(rows) - failed
        return rows


class Feeder:
    """A RequestSource that reads, renders and tokenizes ahead of the engine, in a thread of its own.

    done: sample keys that published parts hold already. `keys` holds the row keys in input order once it is exhausted.
    """

    def __init__(
        self,
        source: Input,
        columns: list[str],
        prompter: Prompter,
        *,
        done: set[bytes],
        num_samples: int,
        job_seed: int,
        max_model_len: int,
        collector: Collector,
        on_first_prompt: Callable[[str], None],
    ):
        self.keys = bytearray()
        self.num_already_done = 0
        self.num_clamped = 0
        self._source = source
        self._columns = columns
        self._prompter = prompter
        self._done = done
        self._num_samples = num_samples
        self._job_seed = job_seed
        self._max_model_len = max_model_len
        self._collector = collector
        self._on_first_prompt: Callable[[str], None] | None = on_first_prompt
        self._occurrences: Counter[bytes] = Counter()
        self._next_request_id = 0
        self._queue: queue.Queue[list[RequestState] | BaseException | None] = queue.Queue(FEED_BATCHES_AHEAD)
        self._ready: list[RequestState] = []
        self._ended = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="cbgen-feeder", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        return self._ended and not self._ready

    def take(self, limit: int, wait: bool) -> list[RequestState]:
        """See RequestSource. Raises what stopped the thread."""
        self._fetch(limit, wait)
        taken, self._ready = self._ready[:limit], self._ready[limit:]
        return taken

    def wait_for_first(self) -> bool:
        """Blocks until a request is ready, and returns whether one is: False when nothing is left to generate."""
        self._fetch(1, wait=True)
        return bool(self._ready)

    def close(self) -> None:
        """Stops reading."""
        self._stop.set()
        self._thread.join()

    def _fetch(self, limit: int, wait: bool) -> None:
        while len(self._ready) < limit and not self._ended:
            try:
                item = self._queue.get(block=wait and not self._ready)
            except queue.Empty:
                return
            if isinstance(item, BaseException):
                raise item
            if item is None:
                self._ended = True
            else:
                self._ready += item

    def _work(self) -> None:
        try:
            rows = self._source.rows(self._columns)
            while batch := list(islice(rows, FEED_ROWS)):
                requests = list(self._requests([self._prompter.render(row) for row in batch]))
                if requests and not self._put(requests):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 (a panic of a Rust library is no Exception)
            self._put(error)  # raised in the main thread by the next take

    def _put(self, item: list[RequestState] | BaseException | None) -> bool:
        """False when the feeder was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _requests(self, prompts: list[RenderedPrompt | FailedPrompt]) -> Iterator[RequestState]:
        """One request per row for the samples still to be generated; failed rows go to the collector."""
        wanted: list[tuple[RenderedPrompt, bytes, list[int]]] = []
        for prompt in prompts:
            key = row_key(prompt.digest, self._occurrences[prompt.digest])
            self._occurrences[prompt.digest] += 1
            self.keys += key
            samples = [s for s in range(self._num_samples) if sample_key(key, s) not in self._done]
            self.num_already_done += self._num_samples - len(samples)
            if isinstance(prompt, FailedPrompt):
                self._fail(key, prompt.index, samples, prompt.error)
            elif samples:
                wanted.append((prompt, key, samples))
        token_ids = self._prompter.tokenize([prompt for prompt, _, _ in wanted])
        for (prompt, key, samples), ids in zip(wanted, token_ids, strict=True):
            if not ids:
                self._fail(key, prompt.index, samples, "the prompt has no tokens")
                continue
            if self._on_first_prompt is not None:
                self._on_first_prompt(self._prompter.preview(prompt))
                self._on_first_prompt = None
            first, *others = (self._request(prompt, ids, RowTag(key, prompt.index, sample)) for sample in samples)
            first.forks = others
            yield first

    def _fail(self, key: bytes, index: int, samples: list[int], error: str) -> None:
        """Hands the samples of a row that cannot become a request to the collector."""
        for sample_index in samples:
            self._collector.put(_failed_row(RowTag(key, index, sample_index), error))

    def _request(self, prompt: RenderedPrompt, ids: list[int], tag: RowTag) -> RequestState:
        room = self._max_model_len - len(ids)
        max_tokens = prompt.params.max_tokens
        if 0 < room < max_tokens:
            max_tokens = room
            self.num_clamped += 1
        seed = draw_seed(self._job_seed, prompt.seed, tag.key, tag.sample_index)
        self._next_request_id += 1
        params = replace(prompt.params, max_tokens=max_tokens, seed=seed)
        return RequestState(self._next_request_id, list(ids), params, tag)


def _text_ids(request: RequestState) -> list[int]:
    """The generated ids that make the text: an end-of-sequence token is none of it, whether marked special or not."""
    return request.generated_ids[:-1] if request.finish_reason is FinishReason.STOP else request.generated_ids


def _output_row(request: RequestState, text: str) -> OutputRow:
    times = request_times(request)
    tag, failed = request.tag, request.finish_reason is FinishReason.ERROR
    assert request.finish_reason is not None
    return OutputRow(
        key=tag.key,
        index=tag.index,
        sample_index=tag.sample_index,
        completion=None if failed else text,
        finish_reason=request.finish_reason.value,
        error=request.error,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=0 if failed else request.num_generated_tokens,
        completion_ids=[] if failed else request.generated_ids,
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        arrival_time=times.arrival_time,
        finish_time=times.finish_time,
    )


def _failed_row(tag: RowTag, error: str) -> OutputRow:
    """The result of a row that never became a request: no tokens, no times."""
    return OutputRow(
        key=tag.key,
        index=tag.index,
        sample_index=tag.sample_index,
        completion=None,
        finish_reason=FinishReason.ERROR.value,
        error=error,
        prompt_tokens=0,
        completion_tokens=0,
        completion_ids=[],
        queue_s=None,
        prefill_s=None,
        decode_s=None,
        ttft_s=None,
        tpot_s=None,
        arrival_time=None,
        finish_time=None,
    )
