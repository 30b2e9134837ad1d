"""Runs requests through a real engine; after every step the laws of the cache, holdings and accounts are asserted."""

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from tiny_models import ModelUnderTest
from transformers import AutoModelForCausalLM, PretrainedConfig

from cbgen.cache.pool import WRITE_RESERVE_CHUNK
from cbgen.config import ContinuousBatchingConfig, ResolvedConfig
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.execution import attention_backend
from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource

CPU = torch.device("cpu")
FREE_BYTES = 4 << 30
MOST_POISONED_BYTES = 64 << 20
POISON = 2  # no random prompt has it
NAN_BYTE = 0xFF  # four of them are a NaN of float32


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int


def random_ids(count: int, seed: int, vocab_size: int = 320) -> list[int]:
    """Tokens of a tiny model, none of them special."""
    return random.Random(seed).choices(range(3, vocab_size), k=count)


def mixed_prompts(count: int, vocab_size: int, longest: int = 160, most: int = 24, seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to `longest` random tokens that ask for 1 to `most`; one of a single token is always there."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    return [Prompt([rng.randrange(3, vocab_size) for _ in range(n)], rng.randint(1, most)) for n in lengths]


def model_of(name: str, config: PretrainedConfig, **changes: object) -> ModelUnderTest:
    """A tiny random model of a configuration with some of its values changed."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return ModelUnderTest.of(name, model, frozenset([1]))


def poisoned(under_test: ModelUnderTest, token_id: int = POISON) -> ModelUnderTest:
    """The same model, but a row that has this token gets logits of NaN; its reference knows nothing of that."""
    name, model = f"{under_test.name} with a poisoned token", copy.deepcopy(under_test.reference)
    under_test = ModelUnderTest.of(name, model, under_test.eos_token_ids)
    with torch.no_grad():
        under_test.model.get_input_embeddings().weight[token_id] = torch.nan
    return under_test


class RaisingModel(torch.nn.Module):
    """A model some of whose forward passes raise, after they have written nonsense wherever they write."""

    def __init__(self, model: torch.nn.Module, error_of: Callable[[torch.Tensor], Exception | None]):
        super().__init__()
        self.model, self._error_of = model, error_of

    def forward(self, input_ids: torch.Tensor, **keywords: object) -> object:
        error = self._error_of(input_ids)
        output = self.model(input_ids=torch.full_like(input_ids, 7) if error else input_ids, **keywords)
        if error is not None:
            raise error
        return output


def raising(under_test: ModelUnderTest, error_of: Callable[[torch.Tensor], Exception | None]) -> ModelUnderTest:
    """The same model, but a pass raises what `error_of` says for its input ids [1, T]; its reference never does."""
    return replace(under_test, model=RaisingModel(under_test.model, error_of))


def refusing(under_test: ModelUnderTest, token_id: int = POISON) -> ModelUnderTest:
    """The same model, but a pass raises when this token is in it."""

    def error_of(input_ids: torch.Tensor) -> Exception | None:
        return RuntimeError(f"no token {token_id}\nmore about it") if (input_ids == token_id).any() else None

    return raising(under_test, error_of)


def engine_for(
    under_test: ModelUnderTest, notify: Callable[[str], None] = lambda line: None, **options: object
) -> Engine:
    """An engine whose memory is NaN wherever it counts as not initialized (law 8), if that is not too much to fill."""
    config = resolved(options)
    engine = build_engine(
        under_test.model, under_test.shape, torch.float32, config, under_test.eos_token_ids, CPU, FREE_BYTES, notify
    )
    pages = engine.manager.passes.runner._storage.pages
    if pages.numel() <= MOST_POISONED_BYTES:
        pages[WRITE_RESERVE_CHUNK * engine.plan.layout.pages_per_chunk :].fill_(NAN_BYTE)
    return engine


def page_bytes(under_test: ModelUnderTest, **options: object) -> int:
    """Of one page of one layer, as the kernel of such an engine lays it out."""
    return attention_backend(under_test.shape, torch.float32, resolved(options), "cpu").page_bytes


def resolved(options: dict[str, object]) -> ResolvedConfig:
    return ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 512, **options}).resolve("cpu")


def greedy_requests(prompts: list[Prompt], first_id: int = 0) -> list[RequestState]:
    return [
        RequestState(first_id + number, list(prompt.token_ids), SamplingParams(prompt.max_tokens), tag=number)
        for number, prompt in enumerate(prompts)
    ]


def run_all(
    engine: Engine, requests: list[RequestState], between_steps: Callable[[Manager], None] | None = None
) -> list[RequestState]:
    """Runs requests and their forks until each has finished, and returns the requests.

    between_steps: called before every step and after the last, for instance to cancel somebody.
    """
    manager, source = engine.manager, ListSource(requests)
    watch = Watch(engine, requests)
    while manager.scheduler.has_work or not source.exhausted:
        ended = manager.pull(source)
        if between_steps is not None:
            between_steps(manager)
        if manager.scheduler.has_work:
            ended += manager.step()
        watch.check_step(ended)
    if between_steps is not None:
        between_steps(manager)
    watch.check_end()
    return requests


class Watch:
    """Looks on from outside: what must hold after every step, and at the end."""

    def __init__(self, engine: Engine, requests: Iterable[RequestState]):
        self._manager = engine.manager
        self._members = [member for request in requests for member in (request, *request.forks)]
        self._before = replace(self._manager.metrics)
        self._ended: set[int] = set()
        self._seen = {member.request_id: _progress(member) for member in self._members}

    def check_step(self, ended: list[RequestState]) -> None:
        """Nothing is lost, nobody holds too much, and every token is accounted for."""
        for request in ended:
            assert request.is_finished
            assert request.request_id not in self._ended, "a request finished twice"
            self._ended.add(request.request_id)
        self._manager.check_integrity()
        self._check_holdings()
        self._check_progress()
        self._check_accounts()

    def check_end(self) -> None:
        """Everybody came out, and nothing is left behind."""
        cancelled = {member.request_id for member in self._members if member.error == "cancelled"}
        assert self._ended | cancelled == self._seen.keys()
        assert not self._ended & cancelled, "a cancelled request came out all the same"
        assert not any(member.forks for member in self._members)
        self.check_empty()

    def check_empty(self) -> None:
        """An engine without work holds nothing and remembers nobody."""
        assert self._manager.cache.free_share == 1.0, "a finished engine holds no block"
        assert not self._manager._recovery.suspects, "somebody is still suspected"
        assert not self._manager.scheduler._overtaken

    def _check_holdings(self) -> None:
        """Active requests hold exactly the blocks of their tokens that are computed, or about to be."""
        for request in self._manager.scheduler.active:
            for allocator in self._manager.cache.allocators:
                needed = allocator.group.num_blocks_for(request.num_planned_tokens)
                assert allocator.num_owned_blocks(request.request_id) == needed, request

    def _check_progress(self) -> None:
        """Whatever happens to a request, its tokens and its first moments stay."""
        for member in self._members:
            was, now = self._seen[member.request_id], _progress(member)
            assert now["token_ids"][: len(was["token_ids"])] == was["token_ids"]
            assert now["max_computed_tokens"] >= was["max_computed_tokens"]
            for moment in ("first_scheduled_s", "first_token_s"):
                assert was[moment] in (None, now[moment]), moment
            self._seen[member.request_id] = now

    def _check_accounts(self) -> None:
        """Each prompt token that ever had its KV was computed once for the first time, or taken over once."""
        now, before, members = self._manager.metrics, self._before, self._members
        at_hand = sum(min(member.max_computed_tokens, member.num_prompt_tokens) for member in members)
        first_computed = now.computed_prompt_tokens - before.computed_prompt_tokens
        assert first_computed + now.prefix_hit_tokens - before.prefix_hit_tokens == at_hand
        assert now.output_tokens - before.output_tokens == sum(member.num_generated_tokens for member in members)
        assert now.soft_resets - before.soft_resets == sum(member.num_soft_resets for member in members)
        assert now.swaps - before.swaps == sum(member.num_swaps for member in members)
        assert now.offloads == now.soft_resets + now.swaps
        done = [member for member in members if member.is_finished and member.error is None]
        assert now.requests_ok - before.requests_ok == len(done)
        assert now.prompt_tokens - before.prompt_tokens == sum(member.num_prompt_tokens for member in done)


def _progress(request: RequestState) -> dict[str, object]:
    return {
        "token_ids": list(request.token_ids),
        "max_computed_tokens": request.max_computed_tokens,
        "first_scheduled_s": request.timing.first_scheduled_s,
        "first_token_s": request.timing.first_token_s,
    }


def assert_parity(under_test: ModelUnderTest, prompts: list[Prompt], requests: list[RequestState]) -> None:
    """Every request came out as model.generate has it."""
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.error is None
        under_test.assert_parity(prompt.token_ids, prompt.max_tokens, request.generated_ids)
