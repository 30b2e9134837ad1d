"""One call of the Python API: prompts are pulled while few are at work, the engine is stepped, outputs are due.

    iterator ──► [ read, render, tokenize ] ──► engine ──► [ those done, or, in order, waiting for an earlier one ] ──►
                 └────────── at most max_pending samples between the iterator and who takes the outputs ─────────────┘

All of it happens in the caller's thread.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cbgen.data.rows import PromptRow
from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import RowError
from cbgen.length_policy import LengthPolicy
from cbgen.llm_outputs import Pending, RequestOutput, outputs_of
from cbgen.output_rows import OutputTexts
from cbgen.prompting import Prompter, RenderedPrompt, draw_seed
from cbgen.row_keys import RowKeys

# Of the time between two steps that pulling may take at once; one prompt is pulled however long that takes.
PULL_S = 0.05
_END = object()
# The prompter for a prompt as the user gives it, and the columns of its row.
Reader = Callable[[Any], tuple[Prompter, dict[str, Any]]]


@dataclass(frozen=True)
class CallOptions:
    """What the prompts of a call are made into requests by.

    read: see Reader. params: of prompts that bring none. max_pending: samples of prompts that were pulled and not
    yielded, at which no more are pulled. numbers: of requests, never given twice.
    """

    read: Reader
    params: SamplingParams
    lengths: LengthPolicy
    seed: int
    max_pending: int
    numbers: Iterator[int]


class PromptSource:
    """A RequestSource over the user's iterator. It is asked again whenever it gave nothing and is not exhausted.

    num_pending: samples of the prompts pulled, less those that were settled. failed: prompts that cannot become a
    request, until they are taken from here.
    """

    def __init__(self, items: Iterator[Any], options: CallOptions):
        self.exhausted = False
        self.num_pending = 0
        self.failed: list[Pending] = []
        self._items = items
        self._options = options
        self._num_pulled = 0
        self._row_keys = RowKeys(0)

    def take(self, limit: int, wait: bool) -> list[RequestState]:
        """See RequestSource; but it never blocks for longer than the user's iterator does."""
        rendered: list[tuple[Pending, Prompter, RenderedPrompt]] = []
        until_s = time.perf_counter() + PULL_S
        while not self.exhausted and len(rendered) < limit and self.num_pending < self._options.max_pending:
            item = next(self._items, _END)
            if item is _END:
                self.exhausted = True
                break
            self._pull(item, rendered)
            if time.perf_counter() > until_s:
                break
        return self._requests(rendered)

    def _pull(self, item: Any, rendered: list[tuple[Pending, Prompter, RenderedPrompt]]) -> None:
        """Renders one prompt; one that fails is noted."""
        prompt, params = item if is_pair(item) else (item, self._options.params)
        pending = Pending(self._num_pulled, prompt if isinstance(prompt, str) else None)
        self._num_pulled += 1
        pending.num_samples = pending.num_unfinished = params.n
        self.num_pending += params.n
        try:
            prompter, values = self._options.read(prompt)
            own = prompter.render_with(PromptRow(pending.index, values), params)
            pending.prompt = own.text
            rendered.append((pending, prompter, own))
        except RowError as error:
            self._fail(pending, str(error))

    def _fail(self, pending: Pending, reason: str) -> None:
        pending.error = reason
        self.failed.append(pending)

    def _requests(self, rendered: list[tuple[Pending, Prompter, RenderedPrompt]]) -> list[RequestState]:
        if not rendered:
            return []
        prompts = [prompt for _, _, prompt in rendered]
        token_ids = rendered[0][1].tokenize(prompts)
        made = []
        for (pending, _, prompt), ids, key in zip(rendered, token_ids, self._keys(prompts), strict=True):
            if ids:
                made.append(self._request(pending, prompt.params, ids, key))
            else:
                self._fail(pending, "the prompt has no tokens")
        return made

    def _keys(self, prompts: list[RenderedPrompt]) -> list[bytes]:
        """As in a job; those of prompts whose draws do not hang on them are not worked out, which takes memory."""
        drawn = [not prompt.params.is_greedy and prompt.params.seed is None for prompt in prompts]
        keys = iter(self._row_keys.of(list(itertools.compress(prompts, drawn))))
        return [next(keys) if own else b"" for own in drawn]

    def _request(self, pending: Pending, params: SamplingParams, ids: list[int], key: bytes) -> RequestState:
        """The first sample, with the others as its forks."""
        options = self._options
        fitted = options.lengths.fit(ids, params)
        pending.truncated_prompt_tokens, pending.clamped_max_tokens = fitted.num_cut, fitted.clamped_max_tokens
        for sample_index in range(params.n):
            own = fitted.params.with_seed(draw_seed(options.seed, params.seed, key, sample_index))
            pending.requests.append(RequestState(next(options.numbers), list(fitted.token_ids), own, pending))
        first, *first.forks = pending.requests
        return first


class Call:
    """Steps an engine through one iterable of prompts."""

    def __init__(self, manager: Manager, texts: OutputTexts, items: Iterator[Any], options: CallOptions, ordered: bool):
        self._manager: Manager | None = manager
        self._texts = texts
        self._source = PromptSource(items, options)
        self._ordered = ordered
        self._held: dict[int, RequestOutput] = {}
        self._next_index = 0
        self._owed_s = 0.0  # of steps, for the time that pulling took
        self._is_stepping = False

    @property
    def is_done(self) -> bool:
        """Whether all outputs were given out."""
        return self._source.exhausted and not self._source.num_pending

    def advance(self) -> list[RequestOutput]:
        """Pulls, makes a step, and returns the outputs that are due. Raises what the user's iterator raises."""
        assert self._manager is not None
        finished = [*self._pull(self._manager), *self._step(self._manager)]
        done, self._source.failed = self._source.failed, []
        for request in finished:
            request.tag.num_unfinished -= 1
            if not request.tag.num_unfinished:
                done.append(request.tag)
        due = self._in_turn(outputs_of(done, self._texts))
        self._source.num_pending -= sum(len(output.outputs) for output in due)
        return due

    def end(self) -> None:
        """Takes everything unfinished out of the engine, which is ready for another call then."""
        if self._manager is None:
            return
        manager, self._manager = self._manager, None
        if self._is_stepping:  # it was broken off, so that blocks with a name may hold nothing yet
            for request_id in manager.cache.holders:
                manager.cache.distrust(request_id)
        while manager.scheduler.has_work:
            request = next(manager.scheduler.unfinished)
            if request.is_finished:  # and not yet taken out when the step was broken off
                manager.scheduler.remove(request)
            manager.cancel(request)
        for request_id in list(manager.cache.holders):  # of a fork that was about to begin
            manager.cache.release(request_id)
        manager.scheduler.limit_active(None)

    def _pull(self, manager: Manager) -> list[RequestState]:
        """Requests that the engine refuses. An iterator that is slow gets as much time as the steps, no more."""
        if manager.scheduler.has_work and self._owed_s > 0 and not self._source.exhausted:
            return []
        start_s = time.perf_counter()
        refused = manager.pull(self._source)
        self._owed_s = time.perf_counter() - start_s
        return refused

    def _step(self, manager: Manager) -> list[RequestState]:
        if not manager.scheduler.has_work:
            return []
        start_s = time.perf_counter()
        self._is_stepping = True
        finished = manager.step()
        self._is_stepping = False
        self._owed_s -= time.perf_counter() - start_s
        return finished

    def _in_turn(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """These, or, if they are to come in order, those whose turn it is."""
        if not self._ordered:
            return outputs
        self._held.update((output.index, output) for output in outputs)
        due = []
        while self._next_index in self._held:
            due.append(self._held.pop(self._next_index))
            self._next_index += 1
        return due


def is_pair(value: Any) -> bool:
    """Whether it is a prompt with its parameters."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], SamplingParams)
