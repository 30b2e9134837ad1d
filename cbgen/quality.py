"""`cbgen quality`: what quantized weights or KV cost in quality, measured against float32 on a text."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from cbgen.bench.dataset_files import read_prompts
from cbgen.config import ContinuousBatchingConfig
from cbgen.device import free_memory_bytes
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.errors import UsageError
from cbgen.models.loading import ModelDescription, load
from cbgen.models.quantization import Quantization

REFERENCE = "float32"


@dataclass(frozen=True)
class QualitySpec:
    """The text, how much of it is used, and how many tokens are generated after the first prompt_tokens of each row."""

    text: str
    rows: int
    row_tokens: int
    prompt_tokens: int
    output_len: int

    def check(self) -> None:
        """Raises UsageError."""
        for name in ("rows", "row_tokens", "prompt_tokens", "output_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1 is expected")
        if self.row_tokens < 2:
            raise UsageError("--row-tokens 1: at least 2 are needed, one to follow another")


@dataclass(frozen=True)
class Answers:
    """What one precision says of the text. log_loss: mean of -log p of each next token. best: [N], the likeliest next
    token after each; generated: greedy continuations, one for each row."""

    name: str
    log_loss: float
    best: torch.Tensor
    generated: list[list[int]]


@dataclass(frozen=True)
class Comparison:
    """A precision beside float32: perplexity, and shares between 0 and 1 of what agrees."""

    name: str
    perplexity: float
    perplexity_change: float
    top1_agreement: float
    equal_tokens: float
    equal_rows: float


def run_quality(
    spec: QualitySpec,
    model: ModelDescription,
    device: torch.device,
    config: ContinuousBatchingConfig,
    quantization: Quantization | None,
    notify: Callable[[str], None],
) -> list[Comparison]:
    """Float32, and the same model with this quantization and kind of KV. Raises CbgenError."""
    spec.check()
    config.resolve(device.type)  # wrong options are told before anything is read
    if quantization is None and config.kv_cache_dtype in ("auto", REFERENCE):
        raise UsageError("give --quantization, --kv-cache-dtype or both: there is nothing to compare with float32")
    texts = texts_of(spec, model)
    weights = REFERENCE if quantization is None else quantization.scheme
    name = f"{weights}, {config.kv_dtype_name(REFERENCE)} KV"
    notify(f"{len(texts)} rows, {sum(map(len, texts)):,} tokens of {spec.text}")
    plain = replace(config, kv_cache_dtype=REFERENCE)
    reference = answers_of(REFERENCE, model, device, plain, None, texts, spec)
    other = answers_of(name, model, device, config, quantization, texts, spec)
    return [compare(reference, reference), compare(reference, other)]


def texts_of(spec: QualitySpec, model: ModelDescription) -> list[list[int]]:
    """Token ids of the first rows of the text, row_tokens of each at most. Raises UsageError when there are none."""
    most = min(spec.row_tokens, model.max_model_len)
    texts = [ids[:most] for ids in read_prompts(spec.text, model)]
    texts = [ids for ids in texts if len(ids) > 1][: spec.rows]
    if not texts:
        raise UsageError(f"--text {spec.text}: no row has two tokens")
    return texts


def answers_of(
    name: str,
    model: ModelDescription,
    device: torch.device,
    config: ContinuousBatchingConfig,
    quantization: Quantization | None,
    texts: list[list[int]],
    spec: QualitySpec,
) -> Answers:
    """Loads the model in one precision and asks it."""
    gc.collect()
    loaded, shape = load(model, device, quantization)
    resolved = config.resolve(device.type)
    engine = build_engine(loaded, shape, model.dtype, resolved, model.eos_token_ids, device, free_memory_bytes(device))
    losses, best = zip(*(_teacher_forced(engine, ids) for ids in texts), strict=True)
    num_tokens = sum(map(len, best))
    return Answers(name, sum(losses) / num_tokens, torch.cat(best), _generate(engine, texts, spec, model.max_model_len))


@torch.inference_mode()
def _teacher_forced(engine: Engine, token_ids: list[int]) -> tuple[float, torch.Tensor]:
    """Sum of -log p of all tokens but the first, and the likeliest token in place of each of those."""
    loss, best, start = 0.0, [], 0
    for logits in engine.manager.score(token_ids):
        following = torch.tensor(token_ids[start + 1 : start + 1 + len(logits)], device=logits.device)
        own = logits[: len(following)].float()
        loss -= own.log_softmax(-1).gather(1, following[:, None]).double().sum().item()
        best.append(own.argmax(-1).cpu())
        start += len(logits)
    return loss, torch.cat(best)


def _generate(engine: Engine, texts: list[list[int]], spec: QualitySpec, context: int) -> list[list[int]]:
    requests = []
    for number, ids in enumerate(texts):
        prompt = ids[: min(spec.prompt_tokens, context - 1)]
        params = SamplingParams(min(spec.output_len, context - len(prompt)), ignore_eos=True)
        requests.append(RequestState(number, list(prompt), params))
    for request in engine.manager.run(ListSource(requests)):
        if request.error is not None:
            raise UsageError(f"row {request.request_id + 1} of the text: {request.error}")
    return [request.generated_ids for request in requests]


def compare(reference: Answers, other: Answers) -> Comparison:
    """Other beside the reference, over the same text."""
    pairs = list(zip(reference.generated, other.generated, strict=True))
    common = [_num_common(one, two) for one, two in pairs]
    return Comparison(
        name=other.name,
        perplexity=math.exp(other.log_loss),
        perplexity_change=math.exp(other.log_loss - reference.log_loss) - 1,
        top1_agreement=float((reference.best == other.best).double().mean()),
        equal_tokens=sum(common) / sum(len(one) for one, _ in pairs),
        equal_rows=sum(one == two for one, two in pairs) / len(pairs),
    )


def _num_common(one: list[int], two: list[int]) -> int:
    """Tokens before the first difference."""
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def table_of(comparisons: list[Comparison]) -> Table:
    """A line per precision; equal tokens are those generated before the first that is another."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("precision", no_wrap=True)
    for name in ("perplexity", "change", "top-1", "equal tokens", "equal rows"):
        table.add_column(name, justify="right")
    for own in comparisons:
        table.add_row(
            own.name,
            f"{own.perplexity:.3f}",
            f"{own.perplexity_change:+.2%}",
            f"{own.top1_agreement:.1%}",
            f"{own.equal_tokens:.1%}",
            f"{own.equal_rows:.0%}",
        )
    return table
