"""Where the time of a step goes: functions of an engine are wrapped while it is watched, and as they were after."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cbgen.bench.work import Ceilings, ModelCosts, Work, bare_model, is_linear
from cbgen.config import ModelShape
from cbgen.device import synchronize
from cbgen.engine.build import Engine
from cbgen.engine.scheduler import ScheduledBatch
from cbgen.models.loading import ModelDescription
from cbgen.models.quantization import Quantization

LINEAR, ATTENTION, SAMPLING, GLUE = "linear", "attention", "sampling", "glue"
SCHEDULING, REST = "scheduling and layout", "rest"
# A part's time is its own: what it calls of another part is left out, so that the parts add up to the steps.
PARTS = (LINEAR, ATTENTION, SAMPLING, GLUE, SCHEDULING, REST)


@dataclass(frozen=True)
class Profile:
    """One run of the engine watched. seconds: of each of PARTS, together the time of all steps. wall_s: of the run.

    flops, weight_bytes, kv_bytes: what the run computed and read, as `work` counts it. num_blocks: the cache's size.
    """

    seconds: dict[str, float]
    wall_s: float
    work: Work
    flops: float
    weight_bytes: float
    kv_bytes: float
    ceilings: Ceilings
    attention_backend: str
    num_blocks: int

    def share(self, part: str) -> float:
        return self.seconds[part] / sum(self.seconds.values())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Profile":
        """From the fields of one, and of what it holds, as `asdict` and JSON leave them."""
        return cls(**values | {"work": Work(**values["work"]), "ceilings": Ceilings(**values["ceilings"])})


class StepProfiler:
    """Adds up the own time of each part, and counts the work of every batch.

    step          |---------------------------------------------|        rest
    schedule       |---|                                                 scheduling and layout
    forward             |-------------------------------|                glue
    linear, attend       |-----| |-----| |-----| |-----|                 linear, attention
    sample                                               |----|          sampling
    """

    def __init__(self, shape: ModelShape, device: torch.device):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.work = Work.of(shape)
        self._device = device
        self._inner_s = [0.0]  # for each call at work, outermost first, the time of the calls it has made

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which counts its own time to a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            start_s = self._now_s()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed_s = self._now_s() - start_s
                self.seconds[part] += elapsed_s - self._inner_s.pop()
                self._inner_s[-1] += elapsed_s

        return call

    def counted(self, lay_out: Callable[..., Any]) -> Callable[..., Any]:
        """Passes.lay_out, which counts the work of the batches it is given."""

        def call(batch: ScheduledBatch, *args: Any) -> Any:
            self.work.count(batch)
            return lay_out(batch, *args)

        return call

    def _now_s(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


def profiled(
    engine: Engine,
    loaded: tuple[torch.nn.Module, ModelShape],
    described: ModelDescription,
    device: torch.device,
    quantization: Quantization | None,
    run: Callable[[], object],
) -> Profile:
    """Watches the engine while `run` makes it generate, then measures what the machine can do."""
    model, shape = loaded
    with profiling(engine, model, shape, device) as profiler:
        start_s = time.perf_counter()
        run()
        wall_s = time.perf_counter() - start_s
    layout = engine.plan.layout
    kv_token_bytes = engine.plan.chunk_bytes / layout.pages_per_chunk / layout.page_size
    bare = bare_model(described)
    costs = ModelCosts.of(bare, shape, kv_token_bytes, quantization)
    assert engine.config.num_blocks is not None, "the cache is sized when an engine is built"
    return Profile(
        seconds=profiler.seconds,
        wall_s=wall_s,
        work=profiler.work,
        flops=costs.flops(profiler.work),
        weight_bytes=costs.weight_bytes(profiler.work),
        kv_bytes=costs.kv_bytes(profiler.work),
        ceilings=Ceilings.measure(bare, device, quantization),
        attention_backend=engine.kernel,
        num_blocks=engine.config.num_blocks,
    )


@contextmanager
def profiling(
    engine: Engine, model: torch.nn.Module, shape: ModelShape, device: torch.device
) -> Iterator[StepProfiler]:
    """Inside, every step of the engine is watched; on a GPU each part then waits for the device, which costs time."""
    profiler = StepProfiler(shape, device)
    manager = engine.manager
    passes: Any = manager.passes
    runner = passes.runner
    backend = runner._backend
    with ExitStack() as stack:
        stack.enter_context(passes.watched(records=False))
        for owner, name, part in (
            (manager, "step", REST),
            (manager.scheduler, "schedule", SCHEDULING),
            (passes, "lay_out", SCHEDULING),
            (backend, "prepare", SCHEDULING),
            (runner, "forward", GLUE),
            (backend, "attend", ATTENTION),
            (passes.sampler, "sample", SAMPLING),
            *((module, "forward", LINEAR) for module in model.modules() if is_linear(module)),
        ):
            _replace(owner, name, partial(profiler.timed, part), stack)
        _replace(passes, "lay_out", profiler.counted, stack)
        # Layers that attend by themselves would hide it: they leave it to `attend` while they are watched.
        _replace(backend, "direct", lambda _: lambda *_: None, stack)
        yield profiler


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], stack: ExitStack) -> None:
    """Puts a wrapped function in the place of a module's function or an object's method, until the stack unwinds."""
    original = getattr(owner, name)
    if name in vars(owner):
        stack.callback(setattr, owner, name, original)
    else:  # a method stands in the class; without the wrapped one it is visible again
        stack.callback(delattr, owner, name)
    setattr(owner, name, wrap(original))
