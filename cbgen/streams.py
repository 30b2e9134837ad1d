"""In which order a device does what it is given, and when the host may read what came of it.

A stream does its work in order; two streams run beside each other, except that one may be told to wait for an event of
the other. Work is handed over as a function, which on a GPU launches kernels and returns at once. The lines that are
CUDA's are in this file; everything above it is the same on every device.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

COMPUTE, TRANSFER = "compute", "transfer"
Work = Callable[[], None]


class Event(Protocol):
    """A moment in a stream: all that it was given before."""

    def synchronize(self) -> None:
        """Returns once the stream has got there."""


class Streams(Protocol):
    """The streams COMPUTE and TRANSFER of one device."""

    device: torch.device

    def allocate(self, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 words of the host and as many of the device, to be copied between; the same where that is one memory.
        All are 0."""

    def submit(self, stream: str, work: Work) -> None:
        """The stream is to do this after all that it was given before. Raises what starting it raises."""

    def record(self, stream: str) -> Event:
        """The moment when the stream has done all that it was given so far."""

    def wait(self, stream: str, event: Event) -> None:
        """What the stream is given from now on is done after the event."""

    def handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that work made on a stream, for use elsewhere: the stream does not get its memory back before that
        is done."""

    def record_graph(self, work: Work) -> Work:
        """Records what the work would launch on COMPUTE, without doing it; returns what does it, at the same addresses
        and without the work's Python. Raises RuntimeError for work that cannot be recorded."""

    def forget_graphs(self) -> None:
        """All recorded graphs are gone: the memory that they shared is not to be used for others."""


class _Done:
    def synchronize(self) -> None:
        """See Event: there is nothing to wait for."""


class InOrderStreams:
    """Both streams are one: each piece of work is done, or launched, before the next is looked at.

    That is a CPU, and a GPU that is used without asynchronous batching.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._graph_memory: Any = None

    def allocate(self, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Streams."""
        host = torch.zeros(num_words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host, host if self.device.type == "cpu" else host.to(self.device)

    def submit(self, stream: str, work: Work) -> None:
        """See Streams."""
        work()

    def record(self, stream: str) -> Event:
        """See Streams."""
        if self.device.type != "cuda":
            return _Done()
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, stream: str, event: Event) -> None:
        """See Streams."""

    def handed_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Streams."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    def record_graph(self, work: Work) -> Work:
        """See Streams. All graphs share one pool of memory, since only one is replayed at a time."""
        if self.device.type != "cuda":
            raise RuntimeError(f"graphs cannot be recorded on {self.device.type}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self._graph_memory = self._graph_memory or torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                # Other threads of the process may go on to use the device.
                graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
                try:
                    work()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a recording that failed. torch's allocator would go on to count it as under way, and fail when memory is
        to be given back."""
        with suppress(RuntimeError):  # which says once more that it failed
            graph.capture_end()
        with suppress(RuntimeError, AttributeError):  # it had ended, or this torch calls it otherwise
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._graph_memory)

    def forget_graphs(self) -> None:
        """See Streams."""
        self._graph_memory = None


class CudaStreams(InOrderStreams):
    """Two streams of a GPU, beside each other."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._streams = {name: torch.cuda.Stream(device) for name in (COMPUTE, TRANSFER)}
        for stream in self._streams.values():  # weights and storage were written elsewhere
            stream.wait_stream(torch.cuda.current_stream(device))

    def submit(self, stream: str, work: Work) -> None:
        """See Streams."""
        with torch.cuda.stream(self._streams[stream]):
            work()

    def record(self, stream: str) -> Event:
        """See Streams."""
        return self._streams[stream].record_event()

    def wait(self, stream: str, event: Event) -> None:
        """See Streams."""
        self._streams[stream].wait_event(event)  # type: ignore[arg-type]
