"""How the time of a decode step grows with the batch and with the context, for SmolLM2 or a random Llama of 1B's shape.

    python benchmarks/growth.py smollm2 [--kv-cache-dtype int8] [--quantization int8]
    python benchmarks/growth.py llama-1b-4-layers

Each figure is the fastest of several steps of one engine in which nothing else happens; a bar is drawn beside it.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from cbgen.config import ContinuousBatchingConfig, ModelShape
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.requests import RequestState, RequestStatus, SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.kernels.cpu.library import load_library
from cbgen.models import seam
from cbgen.models.loading import describe, load
from cbgen.models.quantization import Calibrator, Quantization, kernels_for, resolve_quantization
from cbgen.models.speed import speed_up

CPU = torch.device("cpu")
BATCHES, CONTEXTS = (1, 4, 16, 32, 64, 128), (64, 256, 512, 1024, 2048)
BATCH_OF_CONTEXTS, CONTEXT_OF_BATCHES = 16, 256
STEPS = 6
BAR_MS = 10.0
MAX_BATCH_TOKENS = 4096
# Llama 3.2 1B with four of its sixteen layers: https://huggingface.co/meta-llama/Llama-3.2-1B
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def random_llama(quantization: Quantization | None) -> tuple[PreTrainedModel, ModelShape]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), dtype=torch.float32).eval()
    shape = seam.attach(model, "llama-1b-4-layers", 4096)
    library = load_library()
    if library is not None:
        calibrator = None if quantization is None else Calibrator(library, quantization)
        weight_of = None if calibrator is None else calibrator.weight_of
        speed_up(model, library, lambda: seam.trial(model, "llama-1b-4-layers", 4096), weight_of)
    return model, shape


def decode_step_s(engine: Engine, batch: int, context: int, vocab_size: int) -> float:
    """The fastest step in which `batch` requests of `context` tokens decode one each."""
    generator = torch.Generator().manual_seed(0)
    # The first ones decode while the last ones' prompts are still computed.
    max_tokens = STEPS + -(-batch * context // (MAX_BATCH_TOKENS - batch)) + 1
    requests = [
        RequestState(
            number,
            torch.randint(3, vocab_size, (context,), generator=generator).tolist(),
            SamplingParams(max_tokens, ignore_eos=True),
        )
        for number in range(batch)
    ]
    manager, source = engine.manager, ListSource(requests)
    times = []
    while manager.scheduler.has_work or not source.exhausted:
        manager.pull(source)
        if len(manager.scheduler.active) == batch and all(r.status is RequestStatus.DECODING for r in requests):
            start_s = time.perf_counter()
            manager.step()
            times.append(time.perf_counter() - start_s)
        else:
            manager.step()
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    quantization = resolve_quantization(options.quantization, None, kernels_for(CPU, torch.float32))
    if options.model == "llama-1b-4-layers":
        model, shape = random_llama(quantization)
    else:
        model, shape = load(describe(options.model, None, "float32", CPU), CPU, quantization)
    config = ContinuousBatchingConfig(
        kv_cache_dtype=options.kv_cache_dtype,
        max_batch_tokens=MAX_BATCH_TOKENS,
        balance_tail=False,
        allow_block_sharing=False,
    ).resolve("cpu")
    engine = build_engine(model, shape, torch.float32, config, frozenset(), CPU, 12 << 30)
    cases = [(batch, CONTEXT_OF_BATCHES) for batch in BATCHES] + [(BATCH_OF_CONTEXTS, context) for context in CONTEXTS]
    print("requests  context  ms per step  ms per token")
    for batch, context in cases:
        step_ms = 1e3 * decode_step_s(engine, batch, context, shape.vocab_size)
        print(
            f"{batch:8} {context:8} {step_ms:12.1f} {step_ms / batch:13.2f}  {'#' * round(step_ms / BAR_MS)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
