"""float32 on a GPU: varlen_attn does not take it, so that attention runs through SDPA, and says so. Law 9 holds."""

import re

import pytest
import torch
from cuda_harness import EOS, PAGE, VOCABULARY, HalfModel, World, assert_complete, logits_after, model_of
from engine_harness import Prompt, greedy_requests, mixed_prompts, run_all
from tiny_models import NEAR_TIE, PARITY

from cbgen.errors import UsageError
from cbgen.kernels.cuda import torch_varlen_attn, varlen_problem

KINDS = ["llama", "mistral", "gemma3"]


@torch.inference_mode()
def generated(under_test: HalfModel, prompt: Prompt) -> list[int]:
    """transformers' greedy tokens for one prompt alone."""
    ids = torch.tensor([prompt.token_ids], device=under_test.reference.device)
    output = under_test.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_tokens,
        do_sample=False,
        eos_token_id=sorted(EOS),
        pad_token_id=2,
    )
    return output[0, len(prompt.token_ids) :].tolist()


def assert_equal_or_near_tie(under_test: HalfModel, prompt: Prompt, ours: list[int], label: str) -> None:
    """Law 9: token for token, or the reference's two best logits are close at the first difference; counted."""
    expected = generated(under_test, prompt)
    if ours == expected:
        PARITY[f"{label}: equal throughout"] += 1
        return
    place = next(n for n, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1])
    best = logits_after(under_test, prompt.token_ids, expected[: place + 1])[-1].topk(2).values
    assert best[0] - best[1] < NEAR_TIE, (place, ours[place], expected[place])
    PARITY[f"{label}: differed at a near tie"] += 1


def problem_in_float32() -> str:
    """Why varlen_attn does not serve here: it does not take float32, if it is there at all."""
    capability = torch.cuda.get_device_capability()
    problem = varlen_problem(torch_varlen_attn(), capability, torch.float32, PAGE, 64, ())
    assert problem is not None
    return problem


@pytest.mark.parametrize("name", KINDS)
def test_float32_goes_through_sdpa_with_parity(float32_world: World, name: str) -> None:
    """Prompts in pieces, in a cache that some of them have to leave."""
    world, told = float32_world, []
    under_test = model_of(world, name)
    count, longest, most = (3, 290, 4) if world.is_rehearsal else (8, 600, 24)
    prompts = mixed_prompts(count, VOCABULARY, longest, most)
    engine = world.engine(under_test, None, None, told.append, max_batch_tokens=200, num_blocks=9, safety_margin=0.0)
    requests = run_all(engine, greedy_requests(prompts))
    if not world.is_rehearsal:
        assert engine.kernel == "sdpa"
        assert len(told) == 1
        assert "SDPA" in told[0]
        assert problem_in_float32() in told[0]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_complete(request)
        label = f"{world.device.type} {name} in float32"
        assert_equal_or_near_tie(under_test, prompt, request.generated_ids, label)


@pytest.mark.cuda
def test_graphs_that_are_asked_for_in_float32_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or a torch without CUDA")
    world = World(torch.device("cuda"), torch.float32)
    with pytest.raises(UsageError, match=f"--use-cuda-graph.*{re.escape(problem_in_float32())}"):
        world.engine(model_of(world, "llama"), True, None)
