"""memory_case.py '{"device": ..., "dtype": ..., "graphs": ..., "overlaps": ...}': one run of an engine that may take a
small share of a device's free memory. Prints what it took at most, as JSON.

On a CPU, where torch counts nothing, the same run is small and takes "0".
"""

import json
import random
import sys

import torch
from cuda_harness import EOS, REHEARSAL, World
from engine_harness import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig

from cbgen.cache.sizing import FLOAT32_BYTES, LOGITS_COPIES
from cbgen.device import free_memory_bytes, release_unused_memory
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.models import seam

CONTEXT = 32_768
SHARE_BYTES = 6 << 30  # of the device, for everything: small beside the cache that would be useful
LARGE = {"vocab_size": 65_536, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
SMALL = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": CONTEXT}
MEASURED_STEPS = 16  # how often the device is asked what is free


def model_for(world: World) -> torch.nn.Module:
    config = LlamaConfig(**(SMALL if world.is_rehearsal else LARGE), **HEADS)
    with torch.device(world.device):
        return AutoModelForCausalLM.from_config(config, dtype=world.dtype).eval()


def requests_for(engine: Engine, vocabulary: int) -> list[RequestState]:
    """A third more than a full batch; every second is drawn from filtered probabilities, which takes most memory."""
    rng = random.Random(0)
    count = engine.config.max_requests_per_batch * 4 // 3
    sampled = {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    return [
        RequestState(
            number,
            random_ids(rng.randint(1, 40 if vocabulary < 4096 else 700), number, vocabulary),
            SamplingParams(rng.randint(4, 24), ignore_eos=True, seed=number, **(sampled if number % 2 else {})),
        )
        for number in range(count)
    ]


def main() -> None:
    case = json.loads(sys.argv[1])
    rehearses = case["device"] == "cpu"
    world = REHEARSAL if rehearses else World(torch.device(case["device"]), getattr(torch, case["dtype"]))
    on_cuda = not rehearses
    model = model_for(world)
    shape = seam.attach(model, "a large vocabulary", CONTEXT)
    release_unused_memory(world.device)
    world.synchronize()
    free_bytes = free_memory_bytes(world.device)
    before_bytes = torch.cuda.memory_reserved(world.device) if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    share = min(1.0, SHARE_BYTES / free_bytes)
    options = {"max_memory_percent": share, "num_blocks": None if on_cuda else 64}
    if not on_cuda:
        options["max_requests_per_batch"] = 8
    config = world.config(case["graphs"], case["overlaps"], options)
    execution = None if on_cuda else world.execution(shape, config, case["graphs"], case["overlaps"])
    engine = build_engine(model, shape, world.dtype, config, EOS, world.device, free_bytes, print, execution=execution)
    least_free_bytes, finished = free_memory_bytes(world.device), 0
    requests = requests_for(engine, shape.vocab_size)
    manager, source = engine.manager, ListSource(requests)
    while manager.scheduler.has_work or not source.exhausted:
        finished += len(manager.pull(source))
        finished += len(manager.step())
        if on_cuda and manager.metrics.num_steps % MEASURED_STEPS == 0:
            least_free_bytes = min(least_free_bytes, free_memory_bytes(world.device))
    world.synchronize()
    graphs = getattr(manager.passes, "graphs", None)
    figures = {
        "requests": len(requests),
        "finished": finished,
        "failed": sum(request.error is not None for request in requests),
        "mean_requests": manager.metrics.mean_batch_requests,
        "allowed_bytes": int(free_bytes * share),
        "cache_bytes": engine.plan.cache_bytes,
        "planned_bytes": engine.plan.cache_bytes + engine.plan.activation_bytes + engine.plan.buffer_bytes,
        "logits_bytes": config.max_requests_per_batch * shape.vocab_size * FLOAT32_BYTES * LOGITS_COPIES,
        "reserved_bytes": torch.cuda.max_memory_reserved(world.device) - before_bytes if on_cuda else 0,
        "used_bytes": free_bytes - min(least_free_bytes, free_memory_bytes(world.device)) if on_cuda else 0,
        "num_replayed": graphs.num_replayed if graphs is not None else 0,
        "failure": graphs.failure if graphs is not None else None,
    }
    assert not figures["failed"], next(request.error for request in requests if request.error is not None)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
