"""OpenVINO GenAI: its continuous batching on the CPU, with prefix caching and a new pipeline for every run.

It computes a prefix once for every request that is admitted before it is in the cache. Where prompts have a long
prefix in common, the first of each goes before the rest, therefore, which is fastest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serve import Generated, Request, Session, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CACHE_GIB, BATCH_TOKENS = 4, 2048
LONG_PREFIX = 256


class OpenvinoPeer:
    takes_samples = False

    def __init__(self, options: dict[str, Any]):
        import openvino_genai

        self._genai: Any = openvino_genai
        self._options = options

    @contextmanager
    def session(self, requests: list[Request]) -> Iterator[Session]:
        pipeline = self._pipeline()
        yield Session(lambda: self._generate(pipeline, requests))

    def _pipeline(self) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = self._options["max_requests"]
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        hint = {"INFERENCE_PRECISION_HINT": PRECISIONS[self._options["dtype"]]}
        return self._genai.ContinuousBatchingPipeline(self._options["model"], scheduler, "CPU", hint)

    def _generate(self, pipeline: Any, requests: list[Request]) -> Generated:
        import numpy
        import openvino

        token_ids: list[list[int]] = [[] for _ in requests]
        for places in in_turn(requests):
            own = [requests[place] for place in places]
            prompts = [openvino.Tensor(numpy.array([request.prompt_ids], dtype=numpy.int64)) for request in own]
            outputs = pipeline.generate(prompts, [self._settings(request) for request in own])
            for place, output in zip(places, outputs, strict=True):
                token_ids[place] = [int(token_id) for token_id in output.m_generation_ids[0]]
        return Generated(token_ids, [None] * len(requests))  # it tells times of all requests together

    def _settings(self, request: Request) -> Any:
        settings = self._genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos = request.max_tokens, True
        settings.do_sample, settings.num_beams = False, 1
        settings.apply_chat_template = False
        return settings


def in_turn(requests: list[Request]) -> list[list[int]]:
    """Places of the requests that go together: all, or those that bring a long prefix first, if they are few."""
    places = list(range(len(requests)))
    firsts: dict[tuple[int, ...], int] = {}
    for place in places:
        firsts.setdefault(tuple(requests[place].prompt_ids[:LONG_PREFIX]), place)
    longest = max(len(prefix) for prefix in firsts)
    if longest < LONG_PREFIX or 2 * len(firsts) > len(requests):
        return [places]
    first = sorted(firsts.values())
    return [first, sorted(set(places) - set(first))]


if __name__ == "__main__":
    serve(OpenvinoPeer, ("openvino_genai", "openvino"))
