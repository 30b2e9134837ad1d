"""Models made fast on a CPU answer as before, as whole layers or module by module, or are as they were."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models.causal_zoo import LAYERS, PROMISED, build
from tiny_models import COMMON, CONTEXT, DECODER
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, PreTrainedModel

from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cpu.linear import IntegerWeight, LayerKernel, PackedWeight
from cbgen.models import seam
from cbgen.models.cpu_layer import FastDecoderLayer
from cbgen.models.cpu_modules import PROBE_ROWS, FastRMSNorm, GatedMLP, PackedLinear, gated_mlp
from cbgen.models.speed import MODEL_TOLERANCE, speed_up

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="this installation has no compiled kernels")
# A norm before attention, a gated MLP after another norm, rotary embedding in every layer: the rest is done by modules.
WHOLE_LAYERS = {"llama", "mistral", "qwen2", "qwen3", "granite"}
OURS = (FastDecoderLayer, FastRMSNorm, GatedMLP, PackedLinear)


def sped_up(model: PreTrainedModel, weight_of: object = None) -> str:
    seam.attach(model, "tiny", CONTEXT)
    return speed_up(model, LIBRARY, lambda: seam.trial(model, "tiny", CONTEXT), weight_of)


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return seam.trial(model, "tiny", CONTEXT)[0]


def assert_same(model: PreTrainedModel, before: torch.Tensor) -> None:
    assert (logits(model) - before).abs().max() <= MODEL_TOLERANCE * before.abs().max()


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


def attached(model: PreTrainedModel) -> tuple[PreTrainedModel, torch.Tensor]:
    seam.attach(model, "tiny", CONTEXT)
    return model, logits(model)


def model_of(config: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@contextmanager
def counted_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of outputs of each product of a packed weight."""
    sizes: list[int] = []
    multiply = PackedWeight.multiply

    def counting(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        sizes.append(weight.out_features)
        return multiply(weight, x)

    with monkeypatch.context() as patch:
        patch.setattr(PackedWeight, "multiply", counting)
        yield sizes


@pytest.mark.parametrize("model_type", PROMISED)
def test_families_answer_as_before(model_type: str) -> None:
    """Whole layers where a family is of that kind, modules elsewhere; no linear layer of torch is left."""
    model, before = attached(build(model_type))
    assert sped_up(model) == ("layers" if model_type in WHOLE_LAYERS else "modules")
    assert_same(model, before)
    found = kinds(model)
    assert found["FastDecoderLayer"] == (LAYERS if model_type in WHOLE_LAYERS else 0)
    assert found["Linear"] == 0
    assert found["PackedLinear"] > 0


def test_queries_keys_and_values_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As are gate and up; three products fewer for each layer, and one for the head."""
    model, _ = attached(build("olmo2"))
    assert sped_up(model) == "modules"
    with counted_products(monkeypatch) as sizes:
        logits(model)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    layer = [qkv, config.hidden_size, 2 * config.intermediate_size, config.hidden_size]
    assert sizes == layer * LAYERS + [config.vocab_size]


def test_a_whole_layer_is_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module inside a replaced layer is called any more."""
    model, _ = attached(build("qwen3"))
    own = [module for layer in model.model.layers for module in layer.modules()]
    assert sped_up(model) == "layers"
    calls: list[object] = []
    for module in own:
        module.register_forward_hook(lambda *_: calls.append(1))
    for name in ("begin", "end"):
        method = getattr(LayerKernel, name)
        monkeypatch.setattr(
            LayerKernel, name, lambda *given, name=name, method=method: calls.append(name) or method(*given)
        )
    logits(model)
    assert calls == ["begin", "end"] * LAYERS


def test_convolutions_of_gpt2_stay_untouched() -> None:
    """Its layers are no linear ones by type, and only the head is replaced."""
    model, _ = attached(build("gpt2"))
    before = {name: module for name, module in model.named_modules() if name}
    sped_up(model)
    after = dict(model.named_modules())
    assert [name for name, module in before.items() if after[name] is not module] == ["lm_head"]
    assert kinds(model)["Conv1D"] == 4 * LAYERS


def test_a_tied_head_leaves_the_embedding_alone() -> None:
    model, before = attached(model_of(LlamaConfig(**COMMON, **DECODER, tie_word_embeddings=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding = model.model.embed_tokens
    weight = embedding.weight.clone()
    sped_up(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert model.get_input_embeddings() is embedding
    assert torch.equal(embedding.weight, weight)
    assert_same(model, before)


def test_layers_that_scale_what_they_add_are_done_by_modules() -> None:
    """They have all the parts of a plain layer, and only the logits tell."""
    config = GraniteConfig(**COMMON, **DECODER, residual_multiplier=0.5)
    model, before = attached(model_of(config))
    assert sped_up(model) == "modules"
    assert_same(model, before)
    assert kinds(model)["FastDecoderLayer"] == 0


class LoudMLP(nn.Module):
    """A gated MLP to look at, which gives twice as much."""

    def __init__(self, original: nn.Module):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
            setattr(self, name, getattr(original, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SlyMLP(LoudMLP):
    """One that gives what a gated MLP does, but for rows with a number larger than any of the probe at that place."""

    def __init__(self, original: nn.Module):
        super().__init__(original)
        probe = torch.randn(PROBE_ROWS, self.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
        self.register_buffer("most", probe.amax(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2 + (x - self.most).clamp_min(0).sum(-1, keepdim=True)


class CuriousMLP(LoudMLP):
    """One that looks into the linear layers that it calls, as some of transformers' do for their dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.up_proj.weight.dtype))


def packed(weight: torch.Tensor, bias: torch.Tensor | None, _: str) -> PackedWeight:
    return PackedWeight(LIBRARY, weight, bias)


def all_modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())


def test_a_module_that_answers_otherwise_when_run_puts_everything_back() -> None:
    """Random rows do not show it, the logits do: every module is the very one that it was."""
    model = build("llama")
    model.model.layers[1].mlp = SlyMLP(model.model.layers[1].mlp).eval()
    model, before = attached(model)
    modules = all_modules(model)
    assert gated_mlp(LIBRARY, modules["model.layers.1.mlp"], packed, "") is not None, "it was not sly enough"
    assert sped_up(model) == "none"
    assert all_modules(model) == modules
    assert not any(isinstance(module, OURS) for module in model.modules())
    assert torch.equal(logits(model), before)


def test_a_module_that_fails_without_its_linear_layers_puts_everything_back() -> None:
    """The model is served as it was loaded, and not refused."""
    model = build("llama")
    model.model.layers[1].mlp = CuriousMLP(model.model.layers[1].mlp).eval()
    model, before = attached(model)
    modules = all_modules(model)
    assert sped_up(model) == "none"
    assert all_modules(model) == modules
    assert torch.equal(logits(model), before)


def test_a_module_that_answers_otherwise_keeps_its_place() -> None:
    """It is found out by itself; its linear layers and all other modules are still replaced."""
    model = build("llama")
    model.model.layers[1].mlp = LoudMLP(model.model.layers[1].mlp).eval()
    model, before = attached(model)
    assert sped_up(model) == "layers"
    assert kinds(model)["FastDecoderLayer"] == LAYERS - 1
    assert isinstance(model.model.layers[1].mlp, LoudMLP)
    assert kinds(model)["PackedLinear"] == 4 + 3 + 1
    assert_same(model, before)


def test_another_precision_comes_after_the_check() -> None:
    """Weights in integers stray further than the check allows, yet stay: what is replaced is known by then."""
    model, before = attached(build("llama"))
    paths: list[str] = []

    def in_integers(weight: torch.Tensor, bias: torch.Tensor | None, path: str) -> IntegerWeight:
        paths.append(path)
        return IntegerWeight(LIBRARY, weight, bias, 8)

    assert sped_up(model, in_integers) == "layers"
    parts = ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj")
    assert paths == [f"model.layers.{n}.{part}" for n in range(LAYERS) for part in parts] + ["lm_head"]
    difference = (logits(model) - before).abs().max() / before.abs().max()
    assert MODEL_TOLERANCE < difference < 0.2


def test_a_module_in_two_places() -> None:
    """It cannot be replaced by itself, and both layers answer as before."""
    model = build("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    model, before = attached(model)
    sped_up(model)
    assert_same(model, before)


def test_the_originals_are_let_go() -> None:
    """Only what stands in their places remains in memory."""
    model = build("qwen2")
    linears = [weakref.ref(module) for module in model.modules() if isinstance(module, nn.Linear)]
    sped_up(model)
    gc.collect()
    assert len(linears) == 7 * LAYERS + 1
    assert not any(reference() for reference in linears)
