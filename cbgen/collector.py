"""From finished requests to published parts: text is decoded and rows are written beside the engine."""

import queue
import threading
from collections.abc import Callable, Iterator

from cbgen.data.rows import OutputRow, lots_of
from cbgen.data.writers import PartWriter
from cbgen.duplicates import Duplicates
from cbgen.engine.requests import RequestState
from cbgen.output_rows import OutputRows, for_row

COLLECT_ROWS_AHEAD = 4096
POLL_S = 0.2


class Collector:
    """Turns finished requests into output rows and publishes them, in a thread of its own.

    give_up: whether a publication that waits for room on the disk is to wait no longer.
    num_deduplicated: output rows, of those that num_ok and num_failed count, which share the request of another one.
    """

    def __init__(
        self,
        output_rows: OutputRows,
        writer: PartWriter,
        duplicates: Duplicates,
        give_up: Callable[[], bool] = lambda: False,
    ):
        self.num_ok = 0
        self.num_failed = 0
        self.num_deduplicated = 0
        self._output_rows = output_rows
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
                for lot in lots_of(rows):
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
        yield from (item for item in items if isinstance(item, OutputRow))
        for request, row in zip(requests, self._output_rows.of(requests), strict=True):
            tags = self._duplicates.settle(request.tag)
            self.num_deduplicated += len(tags) - 1
            yield from (for_row(row, tag) for tag in tags)

    def _write(self, rows: list[OutputRow]) -> None:
        failed = sum(row.error is not None for row in rows)
        self.num_failed += failed
        self.num_ok += len(rows) - failed
        self._writer.add(rows)
