"""vLLM: its engine in this process's environment, prefix caching on and emptied before every run."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve import Generated, Request, Session, serve

CPU_CACHE_GIB = "4"


class VllmPeer:
    takes_samples = False

    def __init__(self, options: dict[str, Any]):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if options["device"] == "cpu":  # its default is nearly all of the memory, and it ends if that is not free
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
        from vllm import LLM

        share = options["gpu_memory_utilization"]
        memory = {} if share is None else {"gpu_memory_utilization": share}
        self._llm = LLM(
            model=options["model"],
            revision=options["revision"],
            dtype=options["dtype"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_requests"],
            enable_prefix_caching=True,
            disable_log_stats=False,  # outputs have their times only with it
            generation_config="vllm",  # nothing of the model's own: its penalties would be other work
            **memory,
        )

    @contextmanager
    def session(self, requests: list[Request]) -> Iterator[Session]:
        is_empty = self._llm.reset_prefix_cache()
        yield Session(lambda: self._generate(requests), warm_cache=is_empty is False)

    def _generate(self, requests: list[Request]) -> Generated:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        wall_to_clock_s = time.perf_counter() - time.time()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Generated(token_ids, [_moments(output, wall_to_clock_s) for output in outputs])


def _moments(output: Any, wall_to_clock_s: float) -> tuple[float, float] | None:
    """From the request's own statistics, which say when it arrived on the wall clock, how long its first token took,
    and the first and the last token on a clock of their own. None in a version that has none."""
    metrics = getattr(output, "metrics", None)
    names = ("arrival_time", "first_token_latency", "first_token_ts", "last_token_ts")
    values: list[Any] = [getattr(metrics, name, None) for name in names]
    if not all(isinstance(value, float) and value > 0 for value in values):
        return None
    arrival_s, latency_s, first_s, last_s = values
    came_s = arrival_s + wall_to_clock_s + latency_s
    return came_s, came_s + last_s - first_s


if __name__ == "__main__":
    serve(VllmPeer, ("vllm", "torch"))
