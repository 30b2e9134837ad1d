"""Recorded passes: what a pass of some shape launches is recorded once, and replayed for every pass of that shape."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from cbgen.errors import CbgenError, PassMemoryError, first_line
from cbgen.streams import COMPUTE, Streams, Work

SHAPES_REMEMBERED_PER_GRAPH = 16


class GraphCache:
    """The graphs recorded so far, by all that must be equal for one to be replayed; the one not used longest goes.

    decodes     first pass of a shape    done as it is, then recorded: recording computes nothing, and a pass cannot be
                                         done twice, since sliding layers write over what they read
                later ones               replayed: the same kernels at the same addresses, over what lies there now
    others      first pass of a shape    done as it is: pieces of prompts come in so many shapes that most come once
                second, later ones       like the first and the later ones of decodes
    """

    def __init__(self, streams: Streams, max_graphs: int, notify: Callable[[str], None]):
        """notify: told in one line when recording failed and passes go on without graphs."""
        self._streams, self.max_graphs, self._notify = streams, max_graphs, notify
        self._graphs: OrderedDict[Hashable, Work] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()  # shapes that were not recorded at first sight
        self.num_recorded = self.num_replayed = 0
        self.failure: str | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Work, comes_often: bool) -> None:
        """Does the work, as a replay if it was recorded under this key. comes_often: whether to record it at first
        sight. Raises what the work raises."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            self._streams.submit(COMPUTE, graph)
            self.num_replayed += 1
            return
        self._streams.submit(COMPUTE, work)
        if self.failure is None and (comes_often or self._was_seen(key)):
            self._record(key, work)

    def _was_seen(self, key: Hashable) -> bool:
        if key in self._seen:
            del self._seen[key]
            return True
        self._seen[key] = None
        if len(self._seen) > SHAPES_REMEMBERED_PER_GRAPH * self.max_graphs:
            self._seen.popitem(last=False)
        return False

    def _record(self, key: Hashable, work: Work) -> None:
        if len(self._graphs) >= self.max_graphs:
            self._graphs.popitem(last=False)
        try:
            graph = self._streams.record_graph(work)
        except (RuntimeError, CbgenError) as error:  # torch has no type of its own for what cannot be recorded
            if isinstance(error, (PassMemoryError, torch.OutOfMemoryError)) and self._graphs:
                self.max_graphs = len(self._graphs)  # there is no room for more
                return
            self.failure = first_line(error)
            self._notify(f"a pass could not be recorded as a CUDA graph, so none is from now on: {self.failure}")
            return
        self._graphs[key] = graph
        self.num_recorded += 1

    def clear(self) -> None:
        """Gives up all graphs, and the memory that they hold."""
        self._graphs.clear()
        self._streams.forget_graphs()
