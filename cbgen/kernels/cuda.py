"""Attention on CUDA by the flash-attention kernel that comes with torch, over pages that a block table names."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cbgen.kernels.backend import AttentionBatch, AttentionOptions, DeviceBatch
from cbgen.kernels.page_halves import PageHalves, store

# What the kernel takes, as its checks have it (mha_varlen_fwd of torch's flash_api.cpp).
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_PAGE_TOKENS = 256  # a page holds a multiple of so many
KERNEL_HEAD_DIM_STEP = 8
KERNEL_MAX_HEAD_DIM = 256
KERNEL_CAPABILITY = (8, 0)
# Its parameters that not every torch has.
KERNEL_PARAMETERS = ("seqused_k", "block_table", "num_splits")
# The KV of a request is never split over the GPU: with paged KV, the parts were joined into wrong rows (pytorch issue
# 194167). Few long requests leave most of a GPU idle for it; many fill it anyway.
NUM_SPLITS = 1


@dataclass(frozen=True)
class GatheredKV:
    """What requests with several query tokens attend to in a sliding layer, one after another: G tokens.

    own: bool [G, 1, 1], whether a token is of this pass; tokens: [G], which one it is then; pages, offsets: [G], where
    it lies otherwise. starts: int32 [R + 1]. attends: bool [T, 1, 1], whether a query token reads this, not the ring.
    """

    own: torch.Tensor
    tokens: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    starts: torch.Tensor
    longest: int
    attends: torch.Tensor

    def collect(self, half: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """K or V [G, kv_heads, head_dim] from its pages and the new one [T, kv_heads, head_dim]."""
        return torch.where(self.own, new[self.tokens], half[self.pages, self.offsets])


@dataclass(frozen=True)
class VarlenPlan:
    """Arguments of the kernel that all layers of one type share.

    query_starts, kv_starts: int32 [R + 1]. kv_lengths: int32 [R], what is read through page_tables, int32 [R, N]; none
    of the requests that read what is gathered. window: tokens that one sees before and after it, -1 for all.
    """

    write_pages: torch.Tensor
    write_offsets: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor
    kv_lengths: torch.Tensor
    page_tables: torch.Tensor
    longest_query: int
    longest_kv: int
    window: tuple[int, int]
    gathered: GatheredKV | None


class VarlenAttention(PageHalves):
    """Attention without copies: each request's pages are read where they lie, but for pieces of prompts in rings.

    full layer                         store all, then one call over the pages
    sliding layer, one token each      the same, the window over the ring
    sliding layer, several of some     collect what these see, store all, then two calls over all query tokens: over the
                                       rings, and over what was collected; each token takes the one that is meant for it

    Everything is worked out on the device from tensors of fixed sizes, so that a graph can record it.
    """

    name = "varlen"
    reads_tensors_alone = True

    def __init__(
        self,
        page_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        batch_invariant: bool = False,
        kernel: Callable[..., Any] | None = None,
    ):
        """kernel: what stands in for torch's varlen_attn. See varlen_problem for what that takes."""
        super().__init__(page_size, num_kv_heads, head_dim, dtype)
        found = kernel or torch_varlen_attn()
        assert found is not None, "varlen_problem says so"
        self._kernel = found
        self._group = num_heads // num_kv_heads
        self.num_heads, self.head_dim = num_heads, head_dim
        self.is_batch_invariant = batch_invariant

    def workspace_bytes(self, max_batch_tokens: int, max_model_len: int) -> int:
        """See AttentionBackend. Of a sliding layer, K and V of one long request and of all that is new are in memory
        three times where they are collected, and there are two outputs; a full layer has its table."""
        collected = 3 * (max_model_len + max_batch_tokens) * self._token_bytes
        head_bytes = self.head_dim * self.dtype.itemsize + 4  # of an output, and its log-sum-exp
        outputs = 2 * max_batch_tokens * self.num_heads * head_bytes
        tables = 4 * max_batch_tokens * -(-max_model_len // self.page_size)
        return collected + outputs + tables

    def prepare(self, batch: AttentionBatch) -> VarlenPlan:
        """Brings the tensors of a batch into the form that the kernel wants."""
        device, window = batch.on_device, batch.window
        assert device is not None
        gathered = None if device.gather is None else self._gathered(batch, device)
        kv_lengths = device.kv_lengths
        if gathered is not None:  # their tables do not reach to their new tokens
            kv_lengths = kv_lengths.masked_fill(_has_gathered(device), 0)
        # A causal call for one token each is the same as one that is not; the kernel then takes the query heads that
        # share a KV head together, and reads it once. But its arithmetic is in another order.
        folds = (
            self._group > 1 and window is None and _has_one_token_each(batch, device) and not self.is_batch_invariant
        )
        return VarlenPlan(
            batch.write_pages,
            batch.write_offsets,
            device.query_starts.to(torch.int32),
            # Not read, as the table and kv_lengths say it all, but asked for.
            torch.nn.functional.pad(kv_lengths.cumsum(0), (1, 0)).to(torch.int32),
            kv_lengths.to(torch.int32),
            batch.page_tables.to(torch.int32),
            device.max_query_length,
            _longest(device.max_kv_length, window),
            (-1, -1) if folds else (-1, 0) if window is None else (window - 1, 0),
            gathered,
        )

    def _gathered(self, batch: AttentionBatch, device: DeviceBatch) -> GatheredKV:
        entries, starts = device.gather, device.gather_starts
        assert entries is not None
        assert starts is not None
        places = entries.clamp(min=0)
        query_tokens = torch.arange(len(batch.write_pages), device=entries.device)
        requests = torch.searchsorted(device.query_starts[1:], query_tokens, right=True)
        return GatheredKV(
            own=(entries < 0)[:, None, None],
            tokens=(-1 - entries).clamp(min=0),
            pages=places // self.page_size,
            offsets=places % self.page_size,
            starts=starts.to(torch.int32),
            longest=_longest(device.max_gathered, batch.window),
            attends=_has_gathered(device)[requests][:, None, None],
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: VarlenPlan,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See AttentionBackend.attend. Soft caps and sinks are not heeded: varlen_problem refuses them."""
        if plan.gathered is None:
            store(key, value, pages, plan.write_pages, plan.write_offsets)
            return self._over_pages(query, pages, plan, options)
        collected = [plan.gathered.collect(half, new) for half, new in zip(pages, (key, value), strict=True)]
        store(key, value, pages, plan.write_pages, plan.write_offsets)
        over_collected = self._kernel(
            query,
            *collected,
            plan.query_starts,
            plan.gathered.starts,
            plan.longest_query,
            plan.gathered.longest,
            scale=options.scaling,
            window_size=plan.window,
            enable_gqa=self._group > 1,
            num_splits=NUM_SPLITS,
        )
        return torch.where(plan.gathered.attends, over_collected, self._over_pages(query, pages, plan, options))

    def _over_pages(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: VarlenPlan,
        options: AttentionOptions,
    ) -> torch.Tensor:
        output: torch.Tensor = self._kernel(
            query,
            *pages,
            plan.query_starts,
            plan.kv_starts,
            plan.longest_query,
            plan.longest_kv,
            scale=options.scaling,
            window_size=plan.window,
            enable_gqa=self._group > 1,
            seqused_k=plan.kv_lengths,
            block_table=plan.page_tables,
            num_splits=NUM_SPLITS,
        )
        return output


def _has_gathered(device: DeviceBatch) -> torch.Tensor:
    """bool [R]"""
    assert device.gather_starts is not None
    return device.gather_starts[1:] > device.gather_starts[:-1]


def _has_one_token_each(batch: AttentionBatch, device: DeviceBatch) -> bool:
    """Whether sizes alone say that each request, padding included, has exactly one query token."""
    return device.max_query_length == 1 and len(batch.write_pages) == len(batch.page_tables)


def _longest(num_tokens: int, window: int | None) -> int:
    """What the kernel is told that no request exceeds: below the window it would take another way, with other bits."""
    return num_tokens if window is None else max(num_tokens, window)


def torch_varlen_attn() -> Callable[..., Any] | None:
    """torch's own kernel, if this torch has it."""
    try:
        return importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None


def varlen_problem(
    kernel: Callable[..., Any] | None,
    capability: tuple[int, int],
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    special_attention: tuple[str, ...],
) -> str | None:
    """Why VarlenAttention cannot serve, in words that end a warning or an error; None if it can.

    kernel: of torch_varlen_attn. capability: the GPU's, major and minor. special_attention: of ModelShape.
    """
    parameters = inspect.signature(kernel).parameters if kernel is not None else {}
    special = " and no ".join({"softcap": "soft caps", "sinks": "sinks"}[name] for name in special_attention)
    needed, own = (".".join(map(str, version)) for version in (KERNEL_CAPABILITY, capability))
    problems = [
        (any(name not in parameters for name in KERNEL_PARAMETERS), "this torch is too old for it"),
        (capability < KERNEL_CAPABILITY, f"it needs a GPU of compute capability {needed}, and this one has {own}"),
        (dtype not in KERNEL_DTYPES, f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"),
        (special != "", f"it has no {special}, which layers of the model ask for"),
        (
            head_dim > KERNEL_MAX_HEAD_DIM or head_dim % KERNEL_HEAD_DIM_STEP != 0,
            f"it takes heads of a multiple of {KERNEL_HEAD_DIM_STEP} numbers, {KERNEL_MAX_HEAD_DIM} at most, "
            f"not of {head_dim}",
        ),
        (
            page_size % KERNEL_PAGE_TOKENS != 0,
            f"it takes pages of a multiple of {KERNEL_PAGE_TOKENS} tokens, not of {page_size}",
        ),
    ]
    return next((words for is_there, words in problems if is_there), None)
