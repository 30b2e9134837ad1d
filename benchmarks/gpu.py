"""Throughput on a GPU: cbgen with and without graphs and overlapping passes, beside transformers' continuous batching.

    python benchmarks/gpu.py [--requests 512] [--prompt-len 256] [--output-len 128] [--repeats 2] [--budget-s 110]
        [--layers 32] [--device cuda] [--dtype bfloat16] [--small] [--skip-transformers] [--json FILE]

Weights are random, made on the device, in the shape of a Llama of 8B; every engine gets the same prompts of random
tokens, and generates as many tokens for each. The engines take turns, and each is warm before its time is taken. Prints
a table of each engine's median run, and a line of JSON with all runs.

    output tokens/s     of the whole run, prompts included
    decode step         median time from the end of a pass to the end of the next where both only decode
    of bandwidth        what such a pass must read, weights and KV, over that time, as a share of what a copy moves

On a CPU, which has no graphs, cbgen runs as it does there: to try the script.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel
from transformers import ContinuousBatchingConfig as TransformersConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from cbgen.bench.work import ModelCosts
from cbgen.cache.paged_cache import PagedCache
from cbgen.config import ContinuousBatchingConfig, ModelShape
from cbgen.device import free_memory_bytes, peak_memory_bytes, release_unused_memory, synchronize
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.metrics import EngineMetrics
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.scheduler import ScheduledBatch, Scheduler
from cbgen.engine.sources import ListSource
from cbgen.engine.step_log import StepClock, StepLog
from cbgen.errors import CbgenError
from cbgen.models import seam

LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# use_cuda_graph and use_async_batching of each of cbgen's engines.
MODES = {"cbgen": (False, False), "cbgen, graphs": (True, False), "cbgen, graphs, overlapping": (True, True)}
CPU_MODE, TRANSFORMERS = "cbgen", "transformers"
NO_EOS, PADDING_ID = -1, 0
COPY_BYTES, COPY_TRIES = {"cuda": 4 << 30, "cpu": 64 << 20}, 10


@dataclass(frozen=True)
class Pass:
    """A forward pass that was collected. end_s: on the monotonic clock. kv_tokens: of one layer, that it read."""

    end_s: float
    num_requests: int
    only_decodes: bool
    kv_tokens: int


class NotedLog(StepLog):
    """A StepLog that also keeps every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Pass] = []

    def add(
        self, batch: ScheduledBatch, clock: StepClock, metrics: EngineMetrics, scheduler: Scheduler, cache: PagedCache
    ) -> None:
        entries = batch.scheduled
        only_decodes = all(entry.query_length == 1 for entry in entries)
        kv_tokens = sum(entry.kv_length for entry in entries)
        self.passes.append(Pass(time.perf_counter(), len(entries), only_decodes, kv_tokens))
        super().add(batch, clock, metrics, scheduler, cache)


@dataclass(frozen=True)
class Run:
    """One engine over all requests once. complete: whether it was left to finish."""

    engine: str
    seconds: float
    output_tokens: int
    complete: bool = True
    decode_step_ms: float | None = None
    bandwidth_share: float | None = None
    mean_requests: float | None = None
    graphs_replayed: int = 0
    graphs_recorded_meanwhile: int = 0
    note: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def decode_steps(passes: list[Pass]) -> list[tuple[float, int]]:
    """Seconds and tokens of KV of each pass that decodes for as many requests as any, after another that does: what
    lies between their ends is one pass, whether or not the host was a pass ahead."""
    most = max((one.num_requests for one in passes if one.only_decodes), default=0)
    full = [one.only_decodes and one.num_requests == most for one in passes]
    return [
        (passes[place].end_s - passes[place - 1].end_s, passes[place].kv_tokens)
        for place in range(1, len(passes))
        if full[place] and full[place - 1]
    ]


def bandwidth_share(
    steps: list[tuple[float, int]], weight_bytes: int, kv_token_bytes: float, bytes_per_s: float
) -> float:
    """The median share of the bandwidth that steps reach; kv_token_bytes: of one token in all layers."""
    return statistics.median((weight_bytes + kv * kv_token_bytes) / seconds / bytes_per_s for seconds, kv in steps)


def copy_bytes_per_s(device: torch.device) -> float:
    """What the fastest of some copies within the device moves: bytes read and bytes written."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(COPY_TRIES):
        synchronize(device)
        begun_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 2 * len(source) / best_s


class Bench:
    """A model, the requests that every engine gets, and what the device can do."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.device = given, torch.device(given.device)
        self.dtype = getattr(torch, given.dtype)
        self.context = given.prompt_len + given.output_len
        self.bytes_per_s = copy_bytes_per_s(self.device)
        release_unused_memory(self.device)
        self.model = self._model()
        self.shape: ModelShape = seam.attach(self.model, "random weights", self.context)
        rng = random.Random(0)
        self.prompts = [rng.choices(range(3, self.shape.vocab_size), k=given.prompt_len) for _ in range(given.requests)]

    def _model(self) -> PreTrainedModel:
        config = LlamaConfig(
            **(SMALL if self.given.small else LARGE),
            num_hidden_layers=self.given.layers,
            max_position_embeddings=max(8192, self.context),
        )
        with torch.device(self.device):  # drawn there, which takes no time
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()

    def run(self, name: str, until_s: float) -> Run:
        """One of MODES or TRANSFORMERS. until_s: when transformers is cut off."""
        release_unused_memory(self.device)
        try:
            return self._run_transformers(until_s) if name == TRANSFORMERS else self._run_cbgen(name)
        finally:
            release_unused_memory(self.device)

    def _engine(self, name: str, told: list[str]) -> Engine:
        config = ContinuousBatchingConfig(
            max_requests_per_batch=self.given.requests_per_batch, allow_block_sharing=False, num_blocks=None
        )
        if self.device.type == "cuda":
            graphs, overlaps = MODES[name]
            config = ContinuousBatchingConfig(
                **asdict(config) | {"use_cuda_graph": graphs, "use_async_batching": overlaps}
            )
        self.model.set_attn_implementation(seam.IMPLEMENTATION)
        resolved = config.resolve(self.device.type)
        free_bytes = free_memory_bytes(self.device)
        return build_engine(
            self.model, self.shape, self.dtype, resolved, frozenset(), self.device, free_bytes, told.append
        )

    def _run_cbgen(self, name: str) -> Run:
        told: list[str] = []
        engine = self._engine(name, told)
        self._warm(engine)
        manager = engine.manager
        manager.log = log = NotedLog()
        params = SamplingParams(self.given.output_len, ignore_eos=True)
        requests = [RequestState(number, list(prompt), params) for number, prompt in enumerate(self.prompts)]
        graphs = getattr(manager.passes, "graphs", None)
        recorded, replayed = (graphs.num_recorded, graphs.num_replayed) if graphs is not None else (0, 0)
        synchronize(self.device)
        begun_s = time.perf_counter()
        finished = list(manager.run(ListSource(requests)))
        seconds = time.perf_counter() - begun_s
        failed = [request.error for request in finished if request.error is not None]
        if failed:
            raise RuntimeError(f"{name}: {len(failed)} requests failed: {failed[0]}")
        steps = decode_steps(log.passes)
        costs = ModelCosts.of(self.model, self.shape, self._kv_token_bytes(engine))
        weight_bytes, kv_bytes = costs.layer_bytes + costs.head_bytes, costs.kv_token_bytes * self.shape.num_layers
        return Run(
            name,
            seconds,
            sum(request.num_generated_tokens for request in finished),
            decode_step_ms=1e3 * statistics.median(step_s for step_s, _ in steps) if steps else None,
            bandwidth_share=bandwidth_share(steps, weight_bytes, kv_bytes, self.bytes_per_s) if steps else None,
            mean_requests=statistics.fmean(one.num_requests for one in log.passes),
            graphs_replayed=graphs.num_replayed - replayed if graphs is not None else 0,
            graphs_recorded_meanwhile=graphs.num_recorded - recorded if graphs is not None else 0,
            note="; ".join(told) or None,
        )

    def _kv_token_bytes(self, engine: Engine) -> float:
        """Of one token in one layer."""
        return engine.plan.chunk_bytes / engine.plan.layout.pages_per_chunk / engine.config.page_size

    def _warm(self, engine: Engine) -> None:
        """Some requests with other prompts, so that no kernel is loaded while time is taken."""
        count, params = min(8, self.given.requests), SamplingParams(4, ignore_eos=True)
        warming = [RequestState(-2 - number, self.prompts[number][::-1], params) for number in range(count)]
        for _ in engine.manager.run(ListSource(warming)):
            pass

    def _run_transformers(self, until_s: float) -> Run:
        """Its manager as it chooses to run on this device and for these requests."""
        given = self.given
        self.model.set_attn_implementation("sdpa")
        settings = GenerationConfig(
            do_sample=False, eos_token_id=NO_EOS, pad_token_id=PADDING_ID, max_new_tokens=given.output_len
        )
        on_cpu = {"num_blocks": 50, "max_batch_tokens": 256} if self.device.type == "cpu" else {}
        hints = WorkloadHints(given.prompt_len, given.output_len, given.requests)
        with (
            torch.inference_mode(),
            self.model.continuous_batching_context_manager(
                generation_config=settings,
                continuous_batching_config=TransformersConfig(allow_block_sharing=False, **on_cpu),
                block=True,
                warmup=self.device.type == "cuda",
                workload_hints=hints,
            ) as manager,
        ):
            attention = self.model.config._attn_implementation
            begun_s = time.perf_counter()
            for prompt in self.prompts:
                manager.add_request(prompt, max_new_tokens=given.output_len, eos_token_id=NO_EOS)
            num_finished = output_tokens = 0
            while num_finished < len(self.prompts) and time.perf_counter() < until_s:
                output = manager.get_result(timeout=0.5)
                if output is not None and output.error is not None:
                    raise RuntimeError(f"transformers failed: {output.error}")
                if output is not None and output.is_finished():
                    num_finished, output_tokens = num_finished + 1, output_tokens + len(output.generated_tokens)
                if output is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before all requests were done")
            seconds = time.perf_counter() - begun_s
        complete = num_finished == len(self.prompts)
        note = f"attention: {attention}" + ("" if complete else "; cut off, of finished requests alone")
        return Run(TRANSFORMERS, seconds, output_tokens, complete, note=note)


def table(runs: list[Run]) -> list[str]:
    """A line for each engine, of its median run; of an even number, the slower one in the middle."""
    middle = {run.engine: run for run in _middle_runs(runs)}
    peer = middle[TRANSFORMERS].tokens_per_s if TRANSFORMERS in middle else 0.0
    lines = [f"{'engine':<28}{'output tokens/s':>16}{'to transformers':>16}{'decode step':>13}{'of bandwidth':>13}"]
    for name, run in middle.items():
        ratio = f"{run.tokens_per_s / peer:.2f}" if peer else "-"
        step = f"{run.decode_step_ms:.2f} ms" if run.decode_step_ms is not None else "-"
        share = f"{run.bandwidth_share:.0%}" if run.bandwidth_share is not None else "-"
        lines.append(f"{name:<28}{run.tokens_per_s:>16,.0f}{ratio:>16}{step:>13}{share:>13}")
    return lines


def _middle_runs(runs: list[Run]) -> Iterator[Run]:
    for name in dict.fromkeys(run.engine for run in runs):
        own = sorted((run for run in runs if run.engine == name), key=lambda run: run.tokens_per_s)
        yield own[(len(own) - 1) // 2]


def measure(bench: Bench, given: argparse.Namespace, started_s: float) -> tuple[list[Run], list[str]]:
    """Runs of all engines in turn, and what was said about those that are missing."""
    names = list(MODES) if given.device == "cuda" else [CPU_MODE]
    names += [] if given.skip_transformers else [TRANSFORMERS]
    runs: list[Run] = []
    remarks: list[str] = []
    for number in range(given.repeats):
        for name in names:
            elapsed_s = time.perf_counter() - started_s
            if elapsed_s > given.budget_s:
                remarks.append(f"run {number + 1} of {name} was not started: {elapsed_s:.0f} s of --budget-s are over")
                continue
            try:
                run = bench.run(name, started_s + given.budget_s + given.grace_s)
            except (RuntimeError, TypeError, CbgenError) as error:  # also of out of memory: the others go on
                remarks.append(f"run {number + 1} of {name} failed: {type(error).__name__}: {error}")
                continue
            runs.append(run)
            note = f"  ({run.note})" if run.note else ""
            print(f"{name}: {run.tokens_per_s:,.0f} output tokens/s in {run.seconds:.1f} s{note}", flush=True)
    return runs, remarks


def main() -> None:
    started_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--requests-per-batch", type=int, default=512, help="cbgen's --max-requests-per-batch")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a tiny model instead of the shape of 8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=110.0, help="no run is started after so many seconds")
    parser.add_argument("--grace-s", type=float, default=20.0, help="so long after that transformers is cut off")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", type=Path, help="where the line of JSON is written, too")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    bench = Bench(given)
    loaded_s = time.perf_counter() - started_s
    print(f"loaded in {loaded_s:.1f} s; a copy moves {bench.bytes_per_s / 1e9:,.0f} GB/s", flush=True)
    runs, remarks = measure(bench, given, started_s)
    print("\n".join(table(runs) + remarks))
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": {name: value for name, value in vars(given).items() if name != "json"},
        "copy_bytes_per_s": bench.bytes_per_s,
        "peak_memory_bytes": peak_memory_bytes(bench.device),
        "runs": [asdict(run) | {"tokens_per_s": run.tokens_per_s} for run in runs],
        "remarks": remarks,
    }
    line = json.dumps(figures)
    print(line)
    if given.json is not None:
        given.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
