"""transformers' `generate`: batches of STATIC_BATCH in order, padded on the left, each as long as its longest."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_model import PADDING_ID, plain_model
from serve import Generated, Request, Session, serve

STATIC_BATCH = 32


class HfPeer:
    takes_samples = False

    def __init__(self, options: dict[str, Any]):
        self._model = plain_model(options)

    def session(self, requests: list[Request]) -> AbstractContextManager[Session]:
        return nullcontext(Session(lambda: self._generate(requests)))

    def _generate(self, requests: list[Request]) -> Generated:
        import torch

        token_ids: list[list[int]] = []
        moments: list[tuple[float | None, float] | None] = []
        with torch.inference_mode():
            for first in range(0, len(requests), STATIC_BATCH):
                batch = requests[first : first + STATIC_BATCH]
                token_ids += self._generate_batch(batch)
                moments += [(None, time.perf_counter())] * len(batch)
        return Generated(token_ids, moments)

    def _generate_batch(self, batch: list[Request]) -> list[list[int]]:
        import torch

        width = max(len(request.prompt_ids) for request in batch)
        padding = [width - len(request.prompt_ids) for request in batch]
        pairs = list(zip(padding, batch, strict=True))
        input_ids = torch.tensor([[PADDING_ID] * padded + request.prompt_ids for padded, request in pairs])
        mask = torch.tensor([[0] * padded + [1] * (width - padded) for padded in padding])
        longest = max(request.max_tokens for request in batch)
        output = self._model.generate(
            input_ids=input_ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PADDING_ID,
        )
        generated = output[:, width:].tolist()
        return [ids[: request.max_tokens] for ids, request in zip(generated, batch, strict=True)]


if __name__ == "__main__":
    serve(HfPeer, ("transformers", "torch"))
