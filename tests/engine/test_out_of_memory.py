"""A forward pass without enough memory: batches get smaller until it fits, and only then somebody is at fault."""

import pytest
import torch
from engine.fork_harness import assert_as_expected, fork_group, members_of
from engine_harness import assert_parity, engine_for, greedy_requests, mixed_prompts, raising, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.failures import named_failures
from cbgen.engine.requests import FinishReason
from cbgen.errors import (
    EXIT_RESUMABLE,
    CbgenError,
    DeviceFaultError,
    ForwardPassError,
    ModelError,
    PassMemoryError,
    UsageError,
)

MODELS = ["llama", "mistral", "gemma3"]
PROMPTS = mixed_prompts(16, 320, longest=80, most=8, seed=8)
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    torch.AcceleratorError("CUDA error: out of memory"),
]
WAYS = {
    "roomy": {},
    "a small cache": {"num_blocks": 13, "safety_margin": 0.0},
    "a swap pool": {"num_blocks": 13, "safety_margin": 0.0, "cpu_offload_space": 0.01},
}


def holding(under_test: ModelUnderTest, most_tokens: int, error: Exception) -> ModelUnderTest:
    """The same model, for which a pass of more tokens is too large."""
    return raising(under_test, lambda input_ids: error if input_ids.shape[1] > most_tokens else None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_all_rows_come_out_in_smaller_batches(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Budgets are halved as often as needed and no more; every row has the tokens it always has."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    told: list[str] = []
    engine = engine_for(holding(under_test, 50, NO_MEMORY[0]), told.append, max_batch_tokens=256, **WAYS[way])
    assert_parity(under_test, PROMPTS, run_all(engine, greedy_requests(PROMPTS)))
    scheduler, metrics = engine.manager.scheduler, engine.manager.metrics
    assert (metrics.forward_failures, metrics.budget_shrinks, len(told)) == (0, 3, 3)
    assert (scheduler.max_batch_tokens, scheduler.max_requests_per_batch) == (32, 16)
    assert told[-1] == "a forward pass ran out of memory: max_batch_tokens is now 32, max_requests_per_batch 16"
    assert (engine.config.max_batch_tokens, engine.config.max_requests_per_batch) == (256, 128)


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_every_kind_of_want_of_memory(tiny_llama: ModelUnderTest, error: Exception) -> None:
    """However it is said, it counts as such."""
    engine = engine_for(holding(tiny_llama, 200, error))
    assert_parity(tiny_llama, PROMPTS, run_all(engine, greedy_requests(PROMPTS)))
    assert engine.manager.metrics.budget_shrinks == 2


def test_samples_in_smaller_batches(tiny_llama: ModelUnderTest) -> None:
    """Samples that had started beside others come out as well."""
    leaders = [fork_group(random_ids(30 + k, seed=k), 6, first_id=10 * k) for k in range(4)]
    rows = members_of(leaders)
    engine = engine_for(holding(tiny_llama, 12, NO_MEMORY[0]), page_size=4, num_blocks=400)
    run_all(engine, leaders)
    assert_as_expected(tiny_llama, rows)
    assert engine.manager.metrics.forward_failures == 0


@pytest.mark.parametrize("name", MODELS)
def test_never_enough_memory(request: pytest.FixtureRequest, name: str) -> None:
    """At a page of tokens and one request nothing is left to try: each row ends as an error, and the loop ends."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    engine = engine_for(holding(under_test, 0, NO_MEMORY[0]))
    for row in run_all(engine, greedy_requests(PROMPTS)):
        assert row.finish_reason is FinishReason.ERROR
        assert str(row.error).startswith("the forward pass failed: OutOfMemoryError: CUDA out of memory")
    scheduler = engine.manager.scheduler
    assert (scheduler.max_batch_tokens, scheduler.max_requests_per_batch) == (16, 1)
    assert engine.manager.metrics.forward_failures == len(PROMPTS)


def test_budgets_below_a_page_stay(tiny_llama: ModelUnderTest) -> None:
    """Whoever asks for fewer tokens in a batch than a page has does not get more of them."""
    engine = engine_for(tiny_llama, max_batch_tokens=5, max_requests_per_batch=2)
    assert engine.manager.scheduler.shrink_budgets()
    assert (engine.manager.scheduler.max_batch_tokens, engine.manager.scheduler.max_requests_per_batch) == (5, 1)
    assert not engine.manager.scheduler.shrink_budgets()


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: an illegal memory access"), RuntimeError("CUDA error: unknown error")]
)
def test_a_fault_of_the_device_ends_the_process(tiny_llama: ModelUnderTest, error: Exception) -> None:
    """Nothing is tried again: one line for the user, and the exit code of a job that can be continued."""
    engine = engine_for(holding(tiny_llama, 100, error))
    with pytest.raises(DeviceFaultError, match="the same command continues the job") as raised:
        run_all(engine, greedy_requests(PROMPTS))
    assert raised.value.exit_code == EXIT_RESUMABLE == 75
    assert engine.manager.metrics.forward_failures == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((error, PassMemoryError) for error in NO_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), PassMemoryError),
        (RuntimeError("CUDA error: device-side assert triggered\nmore"), DeviceFaultError),
        (RuntimeError("shapes cannot be multiplied"), ForwardPassError),
        (KeyError(), ForwardPassError),
        (ModelError("not served"), ModelError),
        (UsageError("not so"), UsageError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_names_of_failures(error: Exception, kind: type[CbgenError]) -> None:
    """Each failure has one name and one line; cbgen's own keep theirs."""
    with pytest.raises(CbgenError) as raised, named_failures():
        raise error
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
