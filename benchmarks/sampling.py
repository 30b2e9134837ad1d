"""What parameters of sampling cost: the same requests with each of them, taking turns with plain greedy generation.

64 pieces of a document, 48 output tokens each, through one engine; the last lines compare the 100 schemas of the tests
with as many tokens generated freely, and --deterministic with an engine without.

    OMP_NUM_THREADS=2 PYTHONPATH=tests python benchmarks/sampling.py [--runs 3] [--model smollm2]
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from structured_schemas import SCHEMAS

from cbgen.config import ContinuousBatchingConfig
from cbgen.device import free_memory_bytes
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.grammars import Grammars
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.models import loading

CPU = torch.device("cpu")
DOCUMENT = Path(__file__).parents[1] / "sample_data" / "long_document.jsonl"
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64, 48
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "all penalties, bias, bad words": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 1.0},
        "bad_words": ["never"],
    },
    "stop texts": {"stop": ["\n\n\n\n", "THE END"]},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "regex": {"regex": "[ -~]{2000}", "ignore_eos": False},
}


def engine_of(description: loading.ModelDescription, model: Any, shape: Any, **options: Any) -> Engine:
    config = ContinuousBatchingConfig(allow_block_sharing=False, max_memory_percent=0.3, **options).resolve("cpu")
    tokenizer, eos = description.tokenizer, description.eos_token_ids
    grammars = Grammars(tokenizer, description.vocab_size, eos)
    return build_engine(
        model, shape, torch.float32, config, eos, CPU, free_memory_bytes(CPU), tokenizer=tokenizer, grammars=grammars
    )


def generate(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, list[RequestState]]:
    """Output tokens per second, and the requests."""
    requests = [RequestState(n, list(ids), one) for n, (ids, one) in enumerate(zip(prompts, params, strict=True))]
    start_s = time.perf_counter()
    finished = list(engine.manager.run(ListSource(requests)))
    elapsed_s = time.perf_counter() - start_s
    assert all(request.error is None for request in finished), {request.error for request in finished}
    return sum(request.num_generated_tokens for request in finished) / elapsed_s, requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    description = loading.describe(options.model, None, "float32", CPU)
    model, shape = loading.load(description, CPU)
    ids = description.tokenizer(DOCUMENT.read_text(encoding="utf-8"))["input_ids"]
    prompts = [ids[start * 40 : start * 40 + PROMPT_TOKENS] for start in range(NUM_PROMPTS)]
    engine = engine_of(description, model, shape)
    plain = SamplingParams(OUTPUT_TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {}
    for _ in range(options.runs):
        for name, case in CASES.items():
            greedy, _ = generate(engine, prompts, [plain] * NUM_PROMPTS)
            params = [plain.updated(**case, seed=n) for n in range(NUM_PROMPTS)]
            rates.setdefault(name, []).append(generate(engine, prompts, params)[0] / greedy)
        compare_schemas(engine, prompts, rates)
        rates.setdefault("--deterministic", []).append(
            generate(engine_of(description, model, shape, deterministic=True), prompts, [plain] * NUM_PROMPTS)[0]
            / generate(engine_of(description, model, shape), prompts, [plain] * NUM_PROMPTS)[0]
        )
    print(f"output tokens/s as a share of plain greedy generation, medians of {options.runs}")
    for name, shares in rates.items():
        print(f"{name:32}{statistics.median(shares):.3f}   ({', '.join(f'{share:.3f}' for share in shares)})")


def compare_schemas(engine: Engine, prompts: list[list[int]], rates: dict[str, list[float]]) -> None:
    """A schema for each row, against as many tokens without one."""
    schemas = list(SCHEMAS.values())
    texts = [prompts[number % NUM_PROMPTS] for number in range(len(schemas))]
    params = [SamplingParams(160, temperature=0.8, seed=n, json_schema=schema) for n, schema in enumerate(schemas)]
    structured, requests = generate(engine, texts, params)
    free = [
        SamplingParams(r.num_generated_tokens, temperature=0.8, seed=n, ignore_eos=True) for n, r in enumerate(requests)
    ]
    rates.setdefault("100 JSON schemas", []).append(structured / generate(engine, texts, free)[0])


if __name__ == "__main__":
    main()
