"""Linear layers and what stands between them in a decoder layer, in C: float32 in, float32 out."""

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from cbgen.device import empty_in_large_pages
from cbgen.kernels.cpu.attention import DirectAttention, _Attention
from cbgen.kernels.cpu.library import Library

Int64 = ctypes.c_int64
Address = ctypes.c_void_p
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
FLOAT32_WEIGHT, WORDS_WEIGHT, BYTES_WEIGHT = 0, 1, 2
WIDE_GAP, GROUP = 16, 32  # of kernels.h
MAX_SUM, MAX_LEVEL, MAX_WEIGHT_LEVEL = 2**31 - 1, 2**15 - 1, 127


class _Weight(ctypes.Structure):
    """struct weight of kernels.h."""

    _fields_ = [
        *((name, Int64) for name in ("kind", "n", "k")),
        ("packed", Address),
        ("bias", Address),
        ("limit", Int64),
        *((name, Address) for name in ("scales", "scales_in")),
    ]


class _Layer(ctypes.Structure):
    """struct layer of kernels.h."""

    _fields_ = [
        *((name, Int64) for name in ("heads", "kv_heads", "dim", "rotary", "activation")),
        *((name, Address) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, ctypes.c_float) for name in ("input_epsilon", "head_epsilon", "mlp_epsilon")),
        *((name, ctypes.POINTER(_Weight)) for name in ("qkv", "out", "gate_up", "down")),
    ]


class _Workspace(ctypes.Structure):
    """struct workspace of kernels.h."""

    _fields_ = [(name, Address) for name in ("normed", "wide", "inner", "qkv", "attended", "levels")]


class PackedWeight:
    """A weight [n, k] with its bias [n] or None, in the order in which the kernel reads it.

    A row's product does not depend on how many rows there are, to the last bit.
    """

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None):
        self.library = library
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().float().contiguous().clone()
        self.struct = _Weight(FLOAT32_WEIGHT, self.out_features, self.in_features, bias=_address(self._bias))
        self._pack(weight.detach().float().contiguous())
        # What a row of the input takes when it is quantized.
        levels_bytes = library.function("levels_bytes", Int64, Int64, restype=Int64)
        self.levels_bytes = int(levels_bytes(self.struct.kind, self.in_features))
        self._multiply = library.function(
            "multiply_weight", ctypes.POINTER(_Weight), Address, Int64, Int64, Address, Int64, Address
        )

    def _pack(self, weight: torch.Tensor) -> None:
        self._packed = empty_in_large_pages(
            (_panels(self.library, self.out_features) * self.in_features,), torch.float32
        )
        pack = self.library.function("linear_pack", Address, Int64, Int64, Address)
        pack(weight.data_ptr(), self.out_features, self.in_features, self._packed.data_ptr())
        self.struct.packed = self._packed.data_ptr()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., k] -> [..., n]."""
        rows = as_rows(x)
        out = torch.empty(len(rows), self.out_features)
        levels = self._levels(len(rows))
        self._multiply(
            self.struct,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.data_ptr(),
            self.out_features,
            levels.data_ptr(),
        )
        return out.view(*x.shape[:-1], self.out_features)

    def _levels(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self.levels_bytes, dtype=torch.int8)


class IntegerWeight(PackedWeight):
    """The same in int8 levels with a scale per output; the input is quantized row by row.

    activation_bits: 8, with a scale for each group of numbers of a row, or 16, with one for the row and as many levels
    as sums over k cannot overflow with. scales_in: [k], by which the input is multiplied and the weight was divided, or
    None.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation_bits: int,
        scales_in: torch.Tensor | None = None,
    ):
        self._kind = BYTES_WEIGHT if activation_bits == 8 else WORDS_WEIGHT
        self._scales_in = None if scales_in is None else scales_in.detach().float().contiguous()
        super().__init__(library, weight, bias)

    def _pack(self, weight: torch.Tensor) -> None:
        n, k = weight.shape
        depth = -(-k // GROUP) * GROUP if self._kind == BYTES_WEIGHT else -(-k // 4) * 4
        self._packed = empty_in_large_pages((_panels(self.library, n) * depth,), torch.int8)
        self._scales = torch.empty(n)
        name = "grouped_pack" if self._kind == BYTES_WEIGHT else "integer_pack"
        pack = self.library.function(name, Address, Int64, Int64, Address, Address)
        pack(weight.data_ptr(), n, k, self._packed.data_ptr(), self._scales.data_ptr())
        struct = self.struct
        struct.kind, struct.limit = self._kind, min(MAX_LEVEL, MAX_SUM // (MAX_WEIGHT_LEVEL * k))
        struct.packed, struct.scales = self._packed.data_ptr(), self._scales.data_ptr()
        struct.scales_in = _address(self._scales_in)


@dataclass
class Workspace:
    """Memory that layers of one shape use one after the other. It grows with the batch.

    width: hidden size; inner: that of the MLP; qkv, attended: what the projections into attention give and what it
    gives; levels_bytes: the most that a quantized row takes.
    """

    width: int
    inner: int
    qkv: int
    attended: int
    levels_bytes: int
    _rows: int = 0
    _tensors: list[torch.Tensor] = field(default_factory=list)
    _struct: _Workspace = field(default_factory=_Workspace)

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers with the same can share it."""
        return (self.width, self.inner, self.qkv, self.attended, self.levels_bytes)

    def reserve(self, rows: int) -> _Workspace:
        """At least so many rows of it."""
        if rows > self._rows:
            shapes: list[tuple[int, ...]] = [
                (self.width,),
                (2 * self.inner + WIDE_GAP,),
                (self.inner,),
                (self.qkv,),
                (self.attended,),
                (self.levels_bytes,),
            ]
            kinds = [torch.float32] * 5 + [torch.int8]
            self._tensors = [torch.empty(rows, *s, dtype=kind) for s, kind in zip(shapes, kinds, strict=True)]
            self._struct, self._rows = _Workspace(*(tensor.data_ptr() for tensor in self._tensors)), rows
        return self._struct


@dataclass(frozen=True)
class LayerParts:
    """What a decoder layer is made of; see struct layer of kernels.h. Norm weights are float32."""

    heads: int
    kv_heads: int
    dim: int
    activation: str
    input_norm: tuple[torch.Tensor, float]
    mlp_norm: tuple[torch.Tensor, float]
    query_norm: tuple[torch.Tensor, float] | None
    key_norm: tuple[torch.Tensor, float] | None
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight

    def workspace(self) -> Workspace:
        """One that fits, for this layer and all of its shape."""
        levels = max(weight.levels_bytes for weight in (self.qkv, self.out, self.gate_up, self.down))
        return Workspace(
            self.qkv.in_features, self.down.in_features, self.qkv.out_features, self.out.in_features, levels
        )


class LayerKernel:
    """A decoder layer before and after its attention."""

    def __init__(self, library: Library, parts: LayerParts, workspace: Workspace):
        self.parts = parts
        self._workspace = workspace
        head_norms = (parts.query_norm, parts.key_norm)
        epsilon = parts.query_norm[1] if parts.query_norm else 0.0
        self._struct = _Layer(
            parts.heads,
            parts.kv_heads,
            parts.dim,
            0,
            ACTIVATIONS[parts.activation],
            parts.input_norm[0].data_ptr(),
            *(None if norm is None else norm[0].data_ptr() for norm in head_norms),
            parts.mlp_norm[0].data_ptr(),
            parts.input_norm[1],
            epsilon,
            parts.mlp_norm[1],
            *(ctypes.pointer(weight.struct) for weight in (parts.qkv, parts.out, parts.gate_up, parts.down)),
        )
        common = (ctypes.POINTER(_Layer), ctypes.POINTER(_Workspace), Address)
        self._begin = library.function("layer_begin", *common, Int64, Address, Address, Address)
        self._end = library.function("layer_end", *common, Address, Int64, Address)
        attention = (ctypes.POINTER(_Attention), Address, Address, Address)
        self._run = library.function("layer_run", *common, Int64, Address, Address, *attention, Address, Int64, Address)

    def begin(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """x [rows, width], cosine and sine [rows, rotary], all contiguous float32 -> qkv [rows, heads of all, dim]."""
        self._struct.rotary = cosine.shape[-1]
        qkv = torch.empty(len(x), self.parts.heads + 2 * self.parts.kv_heads, self.parts.dim)
        space = self._workspace.reserve(len(x))
        addresses = (cosine.data_ptr(), sine.data_ptr(), qkv.data_ptr())
        self._begin(self._struct, space, x.data_ptr(), len(x), *addresses)
        return qkv

    def end(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [rows, width], the layer's input, and attended [rows, heads * dim] -> the layer's output [rows, width]."""
        out = torch.empty(x.shape)
        space = self._workspace.reserve(len(x))
        self._end(self._struct, space, x.data_ptr(), attended.data_ptr(), len(x), out.data_ptr())
        return out

    def run(
        self,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        attention: DirectAttention,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The whole layer: x [rows, width] -> [rows, width]; cosine and sine as for `begin`.

        wanted: int64, contiguous, the only rows of the output that are read, ascending; None: all.
        """
        self._struct.rotary = cosine.shape[1]
        rows = x.shape[0]
        out = torch.empty(x.shape)
        self._run(
            self._struct,
            self._workspace.reserve(rows),
            x.data_ptr(),
            rows,
            cosine.data_ptr(),
            sine.data_ptr(),
            attention.call,
            attention.pages,
            attention.write_pages,
            attention.write_offsets,
            _address(wanted),
            -1 if wanted is None else len(wanted),
            out.data_ptr(),
        )
        return out


@lru_cache
def _rms_norm(library: Library) -> Any:
    return library.function("rms_norm", Address, Int64, Int64, Int64, Address, ctypes.c_float, Address, Int64)


@lru_cache
def _gated(library: Library) -> Any:
    return library.function("gated", Address, Int64, Int64, Int64, Int64, Address)


def rms_norm(library: Library, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., dim] over the root of its mean square, times weight [dim]."""
    rows = as_rows(x)
    out = torch.empty(rows.shape)
    dim = rows.shape[1]
    _rms_norm(library)(rows.data_ptr(), rows.stride(0), len(rows), dim, weight.data_ptr(), epsilon, out.data_ptr(), dim)
    return out.view(x.shape)


def gated(library: Library, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up [..., 2 * width], contiguous -> act(first half) * second half, [..., width]."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width)
    _gated(library)(gate_up.data_ptr(), 2 * width, out.numel() // width, width, ACTIVATIONS[activation], out.data_ptr())
    return out


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, k] in float32 whose rows have no gaps, without a copy where x is so already."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _panels(library: Library, outputs: int) -> int:
    """Outputs rounded up to whole panels."""
    panel = library.function("linear_panel", restype=Int64)()
    return -(-outputs // panel) * panel


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
