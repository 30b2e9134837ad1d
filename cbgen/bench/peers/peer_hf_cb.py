"""transformers' own continuous batching."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_model import PADDING_ID, plain_model
from serve import Generated, Request, Session, serve

# On CPUs: the fastest of the sizes that were tried with SmolLM2-135M on two cores.
PAGE_SIZE, MIN_BLOCKS, BATCH_TOKENS, BATCH_REQUESTS = 128, 200, 256, 16
NO_EOS = -1


class HfContinuousPeer:
    takes_samples = False

    def __init__(self, options: dict[str, Any]):
        self._model = plain_model(options)

    @contextmanager
    def session(self, requests: list[Request]) -> Iterator[Session]:
        import torch
        from transformers import GenerationConfig

        settings = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=PADDING_ID)
        config = self._batching_config(max(len(one.prompt_ids) + one.max_tokens for one in requests))
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=settings, continuous_batching_config=config, block=True, warmup=False
            ) as manager,
        ):
            yield Session(lambda: _generate(manager, requests))

    def _batching_config(self, longest_tokens: int) -> Any:
        from transformers import ContinuousBatchingConfig

        if self._model.device.type == "cuda":
            return ContinuousBatchingConfig()  # it sizes itself to the memory there
        full_batch = BATCH_REQUESTS * (longest_tokens // PAGE_SIZE + 1)
        return ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=max(MIN_BLOCKS, full_batch),
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=BATCH_REQUESTS,
        )


def _generate(manager: Any, requests: list[Request]) -> Generated:
    names = [
        manager.add_request(request.prompt_ids, max_new_tokens=request.max_tokens, eos_token_id=NO_EOS)
        for request in requests
    ]
    finished: dict[str, tuple[list[int], float]] = {}
    while len(finished) < len(names):
        output = manager.get_result(timeout=1.0)
        if output is not None and output.error is not None:
            raise RuntimeError(f"continuous batching failed: {output.error}")
        if output is not None and output.is_finished():
            finished[output.request_id] = output.generated_tokens, time.perf_counter()
        if output is None and not manager.is_running():
            raise RuntimeError("continuous batching stopped before all requests were done")
    done = [finished[name] for name in names]
    return Generated([ids for ids, _ in done], [(None, last_s) for _, last_s in done])


if __name__ == "__main__":
    serve(HfContinuousPeer, ("transformers", "torch"))
