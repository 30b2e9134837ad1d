"""From finished requests to published parts: text is decoded and rows are written beside the engine."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from cbgen.data.rows import OutputRow
from cbgen.data.writers import PartWriter
from cbgen.duplicates import Duplicates, RowTag
from cbgen.engine.metrics import request_times
from cbgen.engine.requests import FinishReason, RequestState
from cbgen.prompting import Prompter

COLLECT_ROWS_AHEAD = 4096
# Output rows are handed to the writer in lots of this size: one request may have many.
WRITE_ROWS = 1024
POLL_S = 0.2


class Collector:
    """Turns finished requests into output rows and publishes them, in a thread of its own.

    give_up: whether a publication that waits for room on the disk is to wait no longer.
    num_deduplicated: output rows, of those that num_ok and num_failed count, which share the request of another one.
    """

    def __init__(
        self,
        prompter: Prompter,
        writer: PartWriter,
        duplicates: Duplicates,
        give_up: Callable[[], bool] = lambda: False,
    ):
        self.num_ok = 0
        self.num_failed = 0
        self.num_deduplicated = 0
        self._prompter = prompter
        self._writer = writer
        self._duplicates = duplicates
        self._give_up = give_up
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
                self._abandon_if_late()

    def close(self) -> None:
        """Publishes everything handed over so far."""
        if self._failure is None:
            self.put(None)
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            self._abandon_if_late()
        if self._failure is not None:
            raise self._failure

    def _abandon_if_late(self) -> None:
        if self._give_up():
            self._writer.patience.abandon()

    def _work(self) -> None:
        try:
            while (items := self._next_items()) is not None:
                rows = self._rows(items)
                while lot := list(islice(rows, WRITE_ROWS)):
                    self._write(lot)
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

    def _rows(self, items: list[RequestState | OutputRow]) -> Iterator[OutputRow]:
        """The failed rows among the items, and a row for everyone who gets a request's result."""
        requests = [item for item in items if isinstance(item, RequestState)]
        texts = self._prompter.decode([_text_ids(request) for request in requests])
        yield from (item for item in items if isinstance(item, OutputRow))
        for request, text in zip(requests, texts, strict=True):
            first, *others = self._duplicates.settle(request.tag)
            self.num_deduplicated += len(others)
            row = _output_row(request, first, text)
            yield row
            yield from (replace(row, key=o.key, index=o.index, sample_index=o.sample_index) for o in others)

    def _write(self, rows: list[OutputRow]) -> None:
        failed = sum(row.error is not None for row in rows)
        self.num_failed += failed
        self.num_ok += len(rows) - failed
        self._writer.add(rows)


def _text_ids(request: RequestState) -> list[int]:
    """The generated ids that make the text: an end-of-sequence token is none of it, whether marked special or not."""
    return request.generated_ids[:-1] if request.finish_reason is FinishReason.STOP else request.generated_ids


def _output_row(request: RequestState, tag: RowTag, text: str) -> OutputRow:
    times = request_times(request)
    failed = request.finish_reason is FinishReason.ERROR
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


def failed_row(tag: RowTag, error: str) -> OutputRow:
    """The result of a row that never became a request: no tokens, no times."""
    return OutputRow(
        key=tag.key,
        index=tag.index,
        sample_index=tag.sample_index,
        completion=None,
        finish_reason=FinishReason.ERROR.value,
        error=error,
    )
