"""Modules that compute what a model's own do, faster on a CPU, and how they come to stand in their places.

Nothing is known of a model by name. A forward pass tells which linear layers it calls and which of them read the same
input: those become one product. Norms and gated MLPs are replaced where they answer as ours do. In the end the whole
model must answer as it did before, or everything is put back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cbgen.kernels.cpu.library import Library
from cbgen.kernels.cpu.linear import ACTIVATIONS, PackedWeight, gated, rms_norm

# A replaced norm or MLP must agree with the original so far on random input, relative to the largest output.
MODULE_TOLERANCE = 1e-5
PROBE_ROWS = 5

Multiplier = Callable[[torch.Tensor, torch.Tensor | None, str], Any]


class FusedProducts:
    """The product of one input with the weights of several layers that follow each other and read that same tensor."""

    def __init__(self, weight: Any, sizes: list[int]):
        self.weight = weight
        self._sizes = sizes
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `number` gives for x. All are worked out by the first that asks, and kept for the others alone."""
        if self._input is not x:
            self._parts = self.weight.multiply(x).split(self._sizes, dim=-1)
            self._input = x
        if number == len(self._sizes) - 1:
            parts, self._input, self._parts = self._parts, None, ()
            return parts[number]
        return self._parts[number]


class PackedLinear(nn.Module):
    """A linear layer, or one of several that share an input."""

    is_cbgen_linear = True

    def __init__(self, products: FusedProducts, number: int):
        super().__init__()
        self.products = products
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products.part(self.number, x)


class FastRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, library: Library, weight: torch.Tensor, epsilon: float):
        super().__init__()
        self._library, self.scale, self.epsilon = library, weight.detach().float().contiguous(), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(self._library, x, self.scale, self.epsilon)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), where gate and up are one product."""

    is_cbgen_linear = True

    def __init__(self, library: Library, gate_up: Any, down: Any, activation: str):
        super().__init__()
        self._library, self.gate_up, self.down, self.activation = library, gate_up, down, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.multiply(gated(self._library, self.gate_up.multiply(x), self.activation))


@dataclass(frozen=True)
class Place:
    """Where a module hangs in a model."""

    parent: nn.Module
    name: str
    path: str

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.name)


class Replacer:
    """Puts faster modules into a model, and the model's own back."""

    def __init__(self, library: Library):
        self.library = library
        self._replaced: list[tuple[Place, nn.Module]] = []

    def replace_linears(self, groups: list[list[Place]], weight_of: Multiplier) -> None:
        """Each group becomes one product. weight_of: from weight [n, k], bias and the first one's path."""
        for group in groups:
            modules: list[Any] = [place.module for place in group]
            sizes = [module.out_features for module in modules]
            products = FusedProducts(joined(modules, weight_of, group[0].path), sizes)
            for number, place in enumerate(group):
                self.put(place, PackedLinear(products, number))

    def put(self, place: Place, module: nn.Module) -> None:
        self._replaced.append((place, place.module))
        setattr(place.parent, place.name, module.eval())

    def restore(self) -> None:
        """The model as it was."""
        while self._replaced:
            place, module = self._replaced.pop()
            setattr(place.parent, place.name, module)


def joined(modules: list[Any], weight_of: Multiplier, path: str) -> Any:
    weights = torch.cat([module.weight.detach() for module in modules])
    if all(module.bias is None for module in modules):
        return weight_of(weights, None, path)
    biases = [
        torch.zeros(module.out_features) if module.bias is None else module.bias.detach().float() for module in modules
    ]
    return weight_of(weights, torch.cat(biases), path)


def places(model: nn.Module) -> Iterator[Place]:
    """Every module of a model with its place; one that hangs in several is not told."""
    counts: dict[nn.Module, int] = {}
    found = []
    for path, parent in model.named_modules(remove_duplicate=False):
        for name, module in parent.named_children():
            counts[module] = counts.get(module, 0) + 1
            found.append(Place(parent, name, f"{path}.{name}".lstrip(".")))
    return (place for place in found if counts[place.module] == 1)


def linear_groups(model: nn.Module, run: Callable[[], object]) -> list[list[Place]]:
    """The linear layers that `run`, a forward pass, calls once each; those that follow each other and read one tensor
    together."""
    own: dict[nn.Module, Place] = {place.module: place for place in places(model) if type(place.module) is nn.Linear}
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls.append((module, inputs[0]))  # the tensor is kept, so that no other takes its place in memory

    with _hooks(own, note):
        run()
    times: dict[nn.Module, int] = {}
    for module, _ in calls:
        times[module] = times.get(module, 0) + 1
    groups: list[list[Place]] = []
    last_input = None
    for module, x in calls:
        if times[module] > 1 or module.weight.dtype != torch.float32:
            last_input = None
        elif x is last_input:
            groups[-1].append(own[module])
        else:
            groups.append([own[module]])
            last_input = x
    return groups


@contextmanager
def _hooks(modules: Any, note: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fast_norm(library: Library, module: nn.Module) -> FastRMSNorm | None:
    """A norm of ours that answers as this module does, if it is one: with its weight, or with one plus its weight."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "norm" not in type(module).__name__.lower() or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    if not isinstance(epsilon, float) or weight.dtype != torch.float32:
        return None
    for scale in (weight, 1.0 + weight):
        candidate = FastRMSNorm(library, scale, epsilon)
        if agree(module, candidate, len(weight)):
            return candidate
    return None


def gated_mlp(library: Library, module: nn.Module, weight_of: Multiplier, path: str) -> GatedMLP | None:
    """An MLP of ours that answers as this module does, if it is a gated one."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.weight.dtype == torch.float32 for part in parts):
        return None
    gate, up, down = parts
    if gate.in_features != up.in_features or {name for name, _ in module.named_children()} - _GATED_CHILDREN:
        return None

    def float_weight(weight: torch.Tensor, bias: torch.Tensor | None, _: str) -> PackedWeight:
        return PackedWeight(library, weight, bias)

    for activation in ACTIVATIONS:
        exact = GatedMLP(
            library, joined([gate, up], float_weight, path), joined([down], float_weight, path), activation
        )
        if agree(module, exact, gate.in_features):
            gate_up = joined([gate, up], weight_of, f"{path}.gate_proj")
            return GatedMLP(library, gate_up, joined([down], weight_of, f"{path}.down_proj"), activation)
    return None


_GATED_CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def agree(module: nn.Module, candidate: nn.Module, width: int) -> bool:
    """Whether two modules give the same for random rows [PROBE_ROWS, width]; one that takes none is another kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, PROBE_ROWS, width, generator=generator)
    try:
        expected = module(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape[:-1] != x.shape[:-1]:
        return False
    got = candidate(x)
    return got.shape == expected.shape and bool(
        (got - expected).abs().max() <= MODULE_TOLERANCE * expected.abs().max().clamp_min(1e-30)
    )
