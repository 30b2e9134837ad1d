"""Continuous against static batching on the same requests, in one run: cbgen's engine and transformers' `generate`.

64 prompts whose output lengths spread from 8 to 256, every request generating exactly its length. Static batching takes
them in batches of 32 with left padding, and each batch runs until its longest request is done. The two alternate, so
that what else the machine does falls on both.

    python benchmarks/continuous_vs_static.py [--runs 2] [--model smollm2]
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbgen.config import ContinuousBatchingConfig
from cbgen.device import free_memory_bytes
from cbgen.engine.build import build_engine
from cbgen.engine.requests import RequestState, SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.models import loading

CPU = torch.device("cpu")
DOCUMENT = Path(__file__).parents[1] / "sample_data" / "long_document.jsonl"
NUM_PROMPTS, STATIC_BATCH = 64, 32
SHORTEST, LONGEST = 8, 256


def make_requests(tokenizer_location: str) -> list[tuple[list[int], int]]:
    """Pieces of a document, 16 to 128 tokens long, with output lengths spread evenly over 8 to 256, shuffled."""
    ids = AutoTokenizer.from_pretrained(tokenizer_location)(DOCUMENT.read_text(encoding="utf-8"))["input_ids"]
    rng = random.Random(0)
    lengths = [SHORTEST + round(n * (LONGEST - SHORTEST) / (NUM_PROMPTS - 1)) for n in range(NUM_PROMPTS)]
    rng.shuffle(lengths)
    starts = [rng.randrange(len(ids) - 128) for _ in lengths]
    return [(ids[start : start + rng.randint(16, 128)], length) for start, length in zip(starts, lengths, strict=True)]


@torch.inference_mode()
def run_static(model: torch.nn.Module, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """transformers' `generate` over batches in order, left-padded, each as long as its longest request."""
    outputs: list[list[int]] = []
    for first in range(0, len(requests), STATIC_BATCH):
        group = requests[first : first + STATIC_BATCH]
        width, steps = max(len(ids) for ids, _ in group), max(length for _, length in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(group):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        generated = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs += [generated[row, width : width + length].tolist() for row, (_, length) in enumerate(group)]
    return outputs


def run_continuous(description: loading.ModelDescription, model: torch.nn.Module, shape, requests) -> list[list[int]]:
    """cbgen's engine with its defaults."""
    config = ContinuousBatchingConfig().resolve("cpu")
    eos = description.eos_token_ids
    engine = build_engine(model, shape, description.dtype, config, eos, CPU, free_memory_bytes(CPU))
    states = [RequestState(n, list(ids), SamplingParams(k, ignore_eos=True)) for n, (ids, k) in enumerate(requests)]
    for _ in engine.manager.run(ListSource(states)):
        pass
    return [state.generated_ids for state in states]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    description = loading.describe(options.model, None, "float32", CPU)
    requests = make_requests(description.location)
    tokens = sum(length for _, length in requests)
    ours, shape = loading.load(description, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(description.location, dtype=torch.float32).eval()
    warm = [(ids, 8) for ids, _ in requests[:4]]
    run_continuous(description, ours, shape, warm), run_static(theirs, warm)
    seconds: dict[str, list[float]] = {"cbgen": [], "static": []}
    for number in range(options.runs):
        results = {}
        for name in ("cbgen", "static") if number % 2 == 0 else ("static", "cbgen"):
            start = time.perf_counter()
            if name == "cbgen":
                results[name] = run_continuous(description, ours, shape, requests)
            else:
                results[name] = run_static(theirs, requests)
            seconds[name].append(time.perf_counter() - start)
        equal = sum(a == b for a, b in zip(results["cbgen"], results["static"], strict=True))
        line = ", ".join(f"{name} {tokens / times[-1]:.1f} output tokens/s" for name, times in seconds.items())
        print(f"run {number + 1}: {line}; {equal} of {NUM_PROMPTS} outputs equal", flush=True)
    ratios = [static / ours for ours, static in zip(seconds["cbgen"], seconds["static"], strict=True)]
    spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{tokens} output tokens: continuous is {statistics.median(ratios):.2f} times as fast as static ({spread})")


if __name__ == "__main__":
    main()
