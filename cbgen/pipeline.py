"""What runs beside the engine: a feeder that makes rows into requests, a collector that makes results into parts.

input ──► [ reader ] ──► [ feeder: render, key, tokenize ] ──► window, in order ──► engine ──► [ collector ] ──► parts
                              │    └─── rows equal to one that waits or is at work: they get its result ───►┤
                              └───────────────── rows that cannot become a request ────────────────────────►┘

[ ] are threads of their own.
"""

import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress

import numpy as np

from cbgen.collector import Collector
from cbgen.data.key_table import key_array, sample_keys
from cbgen.data.published import PublishedResults
from cbgen.data.read_ahead import ReadAhead
from cbgen.data.readers import Input
from cbgen.data.rows import PromptRow
from cbgen.duplicates import Duplicates, Recipients, RowTag, generation_key
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.length_policy import LengthPolicy
from cbgen.ordering import WaitingRequest, arrange, pack_ids, unpack_ids
from cbgen.output_rows import failed_row
from cbgen.prompting import FailedPrompt, Prompter, RenderedPrompt, draw_seed
from cbgen.row_keys import RowKeys, belongs_to_shard
from cbgen.row_window import RowWindow, WindowLimits

FEED_ROWS = 128
# 2 bytes for each row, which hold MAX_SAMPLES.
COUNT_TYPE = "H"


class Feeder:
    """A RequestSource that reads, renders and tokenizes ahead of the engine, and hands over a window of it in order.

    published: what earlier runs have done. shard: (index, count) of the rows that are this job's; None: all.
    num_samples: of every row; None: each has its own n, and one that failed before that was known counts 1.
    deduplicate: whether greedy rows that are equal share a request. truncate_prompt: see LengthPolicy. Once it is
    exhausted, `keys` holds the keys of this job's rows in input order, num_samples their samples, and is_mine, for a
    shard, which rows of the input they are.
    """

    def __init__(
        self,
        source: Input,
        columns: list[str],
        prompter: Prompter,
        *,
        published: PublishedResults,
        shard: tuple[int, int] | None,
        num_samples: int | None,
        job_seed: int,
        max_model_len: int,
        collector: Collector,
        duplicates: Duplicates,
        deduplicate: bool,
        limits: WindowLimits,
        on_first_prompt: Callable[[str], None],
        truncate_prompt: str = "none",
    ):
        self.keys = bytearray()
        self.is_mine = None if shard is None else np.zeros(source.num_rows, dtype=bool)
        self.num_already_done = 0
        self.num_clamped = 0
        self._prompter = prompter
        self._published = published
        self._shard = shard
        self._same_count = num_samples
        self._counts = array(COUNT_TYPE)  # only where they vary
        self._num_counted = 0
        self._job_seed = job_seed
        self._lengths = LengthPolicy(max_model_len, truncate_prompt, prompter.bos_token_id)
        self._collector = collector
        self._duplicates = duplicates
        self._deduplicate = deduplicate
        self._on_first_prompt: Callable[[str], None] | None = on_first_prompt
        self._row_keys = RowKeys(source.num_rows)
        self._num_waiting_made = 0
        self._num_handed_over = 0
        self._window = RowWindow(limits)
        self._rows: ReadAhead[PromptRow] = ReadAhead(source.rows(columns), FEED_ROWS)
        self._thread = threading.Thread(target=self._work, name="cbgen-feeder", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        return self._window.exhausted

    @property
    def num_samples(self) -> int | np.ndarray:
        """Of every row, or integers [rows read so far] in input order."""
        return np.array(self._counts, dtype=COUNT_TYPE) if self._same_count is None else self._same_count

    def samples_of(self, num_rows: int) -> int:
        """Of so many rows: where they vary, of those that were read, and of the others as many on average."""
        if self._same_count is not None:
            return num_rows * self._same_count
        num_read = len(self._counts)
        return self._num_counted + max(0, num_rows - num_read) * self._num_counted // max(1, num_read)

    def arrange(self, order: str, page_tokens: int | None) -> None:
        """How the requests of a window are ordered, to be told before the first take. See ordering.arrange."""
        self._window.arrange = lambda requests: arrange(requests, order, page_tokens)

    def take(self, limit: int, wait: bool) -> list[RequestState]:
        """See RequestSource. Raises what stopped the thread."""
        return [self._hand_over(waiting) for waiting in self._window.take(limit, wait)]

    def wait_for_first(self) -> bool:
        """Blocks until a request is there, and returns whether one is: False when nothing is left to generate."""
        return self._window.wait_for_first()

    def stop(self) -> None:
        """Nothing more is handed over: the source counts as exhausted. For a signal handler as well."""
        self._window.stop()

    def forget(self) -> None:
        """Lets go of what is needed only while rows are read: memory for the assembly."""
        del self._row_keys, self._published

    def close(self) -> None:
        """Stops reading."""
        self._rows.close()
        self._window.close()
        self._duplicates.close()
        self._thread.join()

    def _work(self) -> None:
        try:
            for rows in self._rows:
                self._window.add(self._waiting_requests([self._prompter.render(row) for row in rows]))
                if not self._wait_for_room():
                    return
            self._window.end()
        except BaseException as error:  # noqa: BLE001 (a panic of a Rust library is no Exception)
            self._window.end(error)  # raised in the main thread by the next take

    def _wait_for_room(self) -> bool:
        """False when the feeder was closed meanwhile."""
        return self._window.wait_for_room() and self._duplicates.wait_for_room()

    def _waiting_requests(self, prompts: list[RenderedPrompt | FailedPrompt]) -> list[WaitingRequest]:
        """Of the samples still to be generated, what others do not generate; failed rows go to the collector."""
        wanted: list[tuple[RenderedPrompt, bytes, list[int]]] = []
        for prompt, key, samples in self._pending(prompts):
            if isinstance(prompt, FailedPrompt):
                self._fail(key, prompt.index, samples, prompt.error)
            elif samples:
                wanted.append((prompt, key, samples))
        made = []
        token_ids = self._prompter.tokenize([prompt for prompt, _, _ in wanted])
        for (prompt, key, samples), ids in zip(wanted, token_ids, strict=True):
            if not ids:
                self._fail(key, prompt.index, samples, "the prompt has no tokens")
                continue
            made += self._waiting_request(prompt, ids, [RowTag(key, prompt.index, sample) for sample in samples])
        return made

    def _pending(
        self, prompts: list[RenderedPrompt | FailedPrompt]
    ) -> Iterator[tuple[RenderedPrompt | FailedPrompt, bytes, list[int]]]:
        """This job's rows among these, their keys, and the samples that are not done."""
        keys = self._row_keys.of(prompts)
        if self._shard is not None and self.is_mine is not None:
            mine = belongs_to_shard(keys, *self._shard)
            self.is_mine[[prompt.index for prompt in prompts]] = mine
            prompts, keys = list(compress(prompts, mine)), list(compress(keys, mine))
        self.keys += b"".join(keys)
        counts = self._counts_of(prompts)
        ends = np.cumsum(counts)
        samples = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        pending = self._published.are_pending(sample_keys(np.repeat(key_array(keys), counts, axis=0), samples))
        self.num_already_done += int(np.count_nonzero(~pending))
        for prompt, key, row in zip(prompts, keys, np.split(pending, ends)[:-1], strict=True):
            yield prompt, key, np.flatnonzero(row).tolist()

    def _counts_of(self, prompts: list[RenderedPrompt | FailedPrompt]) -> np.ndarray:
        """int64: samples of the next of this job's rows, which are kept where they vary."""
        if self._same_count is not None:
            return np.full(len(prompts), self._same_count)
        counts = [prompt.params.n if isinstance(prompt, RenderedPrompt) else 1 for prompt in prompts]
        self._counts.extend(counts)
        self._num_counted += sum(counts)
        return np.array(counts, dtype=np.int64)

    def _show_first(self, prompt: RenderedPrompt, cut_ids: list[int] | None) -> None:
        if self._on_first_prompt is not None:
            self._on_first_prompt(self._prompter.preview(prompt, cut_ids))
            self._on_first_prompt = None

    def _fail(self, key: bytes, index: int, samples: list[int], error: str) -> None:
        """Hands the samples of a row that cannot become a request to the collector."""
        for sample_index in samples:
            self._collector.put(failed_row(RowTag(key, index, sample_index), error))

    def _waiting_request(self, prompt: RenderedPrompt, ids: list[int], rows: list[RowTag]) -> list[WaitingRequest]:
        """The request for the samples of a row; none if they joined the one of another row."""
        fitted = self._lengths.fit(ids, prompt.params)
        params, clamped, num_cut = fitted.params, fitted.clamped_max_tokens, fitted.num_cut
        self._show_first(prompt, fitted.token_ids if num_cut else None)
        self.num_clamped += len(rows) if clamped is not None else 0
        if clamped is not None or num_cut:
            rows = [replace(row, clamped_max_tokens=clamped, truncated_prompt_tokens=num_cut) for row in rows]
        packed = pack_ids(fitted.token_ids)
        key = generation_key(packed, params) if self._deduplicate else None
        members: list[tuple[SamplingParams, Recipients]]
        if key is None:
            seeds = [draw_seed(self._job_seed, params.seed, row.key, row.sample_index) for row in rows]
            members = [(params.with_seed(seed), Recipients([row])) for seed, row in zip(seeds, rows, strict=True)]
        else:
            recipients = self._duplicates.join(key, rows)
            members = [] if recipients is None else [(params, recipients)]
        if not members:
            return []
        self._num_waiting_made += 1
        return [WaitingRequest(self._num_waiting_made, packed, members)]

    def _hand_over(self, waiting: WaitingRequest) -> RequestState:
        """Numbered now, because the engine takes a smaller number for an earlier arrival."""
        ids = unpack_ids(waiting.packed_ids)
        requests = []
        for params, recipients in waiting.members:
            self._num_handed_over += 1
            requests.append(RequestState(self._num_handed_over, list(ids), params, recipients))
        first, *first.forks = requests
        return first
