"""Devices for tests on the CPU: one that does its work as late as it may, one that writes down what it is told."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from engine_harness import CPU, FREE_BYTES, MOST_POISONED_BYTES, NAN_BYTE, resolved
from kernels.varlen_reference import varlen_reference
from tiny_models import ModelUnderTest

from cbgen.cache.pool import WRITE_RESERVE_CHUNK
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.execution import Execution
from cbgen.kernels.cuda import VarlenAttention
from cbgen.streams import COMPUTE, TRANSFER, InOrderStreams, Work


class _Moment:
    """An event of a DeferredStreams."""

    def __init__(self, streams: "DeferredStreams"):
        self._streams = streams
        self.has_come = False

    def synchronize(self) -> None:
        while not self.has_come:
            self._streams.go_on()


class DeferredStreams:
    """Nothing is done until somebody waits for it, and then in any order of the two streams that their events allow.

    What reads too early, or is overwritten too early, reads something else here: host and device have their own memory,
    and work looks at it when it is done, not when it is handed over.
    """

    device = CPU

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._queues: dict[str, deque[Work | _Moment | tuple[str, _Moment]]] = {COMPUTE: deque(), TRANSFER: deque()}
        self.num_postponed = 0  # work that was not done yet when more was handed over

    def allocate(self, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(num_words, dtype=torch.int64), torch.zeros(num_words, dtype=torch.int64)

    def submit(self, stream: str, work: Work) -> None:
        self.num_postponed += bool(self._queues[stream])
        self._queues[stream].append(work)

    def record(self, stream: str) -> _Moment:
        moment = _Moment(self)
        self._queues[stream].append(moment)
        return moment

    def wait(self, stream: str, event: _Moment) -> None:
        self._queues[stream].append(("wait", event))

    def record_graph(self, work: Work) -> Work:
        """The eager recorder: it keeps the function, with the static memory that it reads, and calls it again."""
        return work

    def forget_graphs(self) -> None:
        pass

    def handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def go_on(self) -> None:
        """One thing more of either stream."""
        ready = [name for name, queue in self._queues.items() if queue and not _is_blocked(queue[0])]
        assert ready, "the streams wait for each other"
        thing = self._queues[self._rng.choice(ready)].popleft()
        if isinstance(thing, _Moment):
            thing.has_come = True
        elif not isinstance(thing, tuple):
            thing()


def _is_blocked(thing: object) -> bool:
    return isinstance(thing, tuple) and not thing[1].has_come


@dataclass(frozen=True)
class _Noted:
    number: int
    log: list[str]

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.number}")


class LoggedStreams(InOrderStreams):
    """Work is done at once, as on a CPU, and all that the streams are told is written down."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []
        self._num_events = 0

    def restart(self) -> None:
        """What is told from now on is written down, events numbered from 1."""
        self.log.clear()
        self._num_events = 0

    def submit(self, stream: str, work: Work) -> None:
        self.log.append(f"{stream} {_name(work)}")
        super().submit(stream, work)

    def record(self, stream: str) -> _Noted:
        self._num_events += 1
        self.log.append(f"{stream} event {self._num_events}")
        return _Noted(self._num_events, self.log)

    def wait(self, stream: str, event: _Noted) -> None:
        self.log.append(f"{stream} waits for {event.number}")

    def record_graph(self, work: Work) -> Work:
        self.log.append("a graph is recorded")

        def replay() -> None:
            work()

        return replay


def _name(work: Callable[..., None]) -> str:
    return _name(work.func) if isinstance(work, partial) else work.__name__


def staged_engine(
    under_test: ModelUnderTest,
    depth: int = 2,
    streams: DeferredStreams | LoggedStreams | None = None,
    graphs: bool = True,
    notify: Callable[[str], None] = lambda line: None,
    **options: object,
) -> Engine:
    """An engine as for a GPU, on the CPU: attention reads tensors alone, passes are recorded, depth 2 overlaps them."""
    asked = {name: options.pop(name, None) for name in ("use_cuda_graph", "use_async_batching")}
    sizes = resolved(
        {
            "q_padding_interval_size": 8,
            "kv_padding_interval_size": 64,
            "max_cached_graphs": 12,
            "max_requests_per_batch": 16,
            **options,
        }
    )
    config = replace(sizes, **asked)  # which a CPU would be refused
    shape = under_test.shape
    backend = VarlenAttention(
        config.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.float32, kernel=varlen_reference
    )
    execution = Execution(backend, streams or DeferredStreams(0), depth, graphs)
    engine = build_engine(
        under_test.model,
        shape,
        torch.float32,
        config,
        under_test.eos_token_ids,
        CPU,
        FREE_BYTES,
        notify,
        execution=execution,
    )
    pages = engine.manager.passes.runner._storage.pages
    if pages.numel() <= MOST_POISONED_BYTES:
        pages[WRITE_RESERVE_CHUNK * engine.plan.layout.pages_per_chunk :].fill_(NAN_BYTE)
    return engine
