"""cbgen's engine, without the job around it: a new one, with an empty cache, for every run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from serve import Generated, Request, Session, serve


class CbgenPeer:
    takes_samples = True

    def __init__(self, options: dict[str, Any]):
        import torch

        from cbgen.cache.sizing import with_memory_utilization
        from cbgen.config import ContinuousBatchingConfig
        from cbgen.device import free_memory_bytes, total_memory_bytes
        from cbgen.models.loading import describe, load
        from cbgen.models.quantization import Quantization

        self._device = torch.device(options["device"])
        self._order: str = options["order"]
        self._described = describe(
            options["model"], options["revision"], options["dtype"], self._device, options["max_model_len"]
        )
        asked = options["quantization"]
        self._quantization = None if asked is None else Quantization(**asked)
        self._model, self._shape = load(self._described, self._device, self._quantization)
        self._free_bytes = free_memory_bytes(self._device)
        self._config = ContinuousBatchingConfig(**options["engine"]).resolve(self._device.type)
        if options["gpu_memory_utilization"] is not None:
            self._config = with_memory_utilization(
                self._config, options["gpu_memory_utilization"], total_memory_bytes(self._device), self._free_bytes
            )

    @contextmanager
    def session(self, requests: list[Request]) -> Iterator[Session]:
        engine = self._engine()
        yield Session(lambda: _generate(engine, requests, self._order))

    def profile(self, requests: list[Request]) -> dict[str, Any]:
        """One more run, watched: the fields of a Profile."""
        from cbgen.bench.profile import profiled

        engine = self._engine()
        return asdict(
            profiled(
                engine,
                (self._model, self._shape),
                self._described,
                self._device,
                self._quantization,
                lambda: _generate(engine, requests, self._order),
            )
        )

    def _engine(self) -> Any:
        from cbgen.engine.build import build_engine

        gc.collect()  # the cache of the engine before may hang on a cycle
        described = self._described
        return build_engine(
            self._model,
            self._shape,
            described.dtype,
            self._config,
            described.eos_token_ids,
            self._device,
            self._free_bytes,
        )


def _generate(engine: Any, requests: list[Request], order: str) -> Generated:
    """The requests as a job would hand them to the engine; putting them in order is part of the time."""
    from cbgen.bench.engine_run import engine_figures, run_engine

    samples = run_engine(engine, [(one.prompt_ids, one.max_tokens, one.n) for one in requests], order)
    return Generated(
        [sample.generated_ids for sample in samples],
        [(sample.timing.first_token_s, sample.timing.finish_s) for sample in samples],
        engine_figures(engine),
    )


if __name__ == "__main__":
    serve(CbgenPeer, ("cbgen", "torch", "transformers"))
