"""Passes of an EngineBench on the device of a kernel: padded, eager or recorded, against SDPA in float32."""

from collections.abc import Callable
from typing import Any

import torch
from kernels.bench import NUM_KV_HEADS, EngineBench
from kernels.varlen_bench import PaddedVarlen, Sizes, filled_up, tensors_of, with_tensors

from cbgen.kernels.backend import AttentionBatch, AttentionOptions
from cbgen.kernels.cuda import VarlenAttention
from cbgen.kernels.sdpa import SdpaAttention

# Of a pass that is done again and again: the output [T, heads, head_dim], and what does it.
Recording = tuple[torch.Tensor, Callable[[], None]]


class DeviceVarlen(PaddedVarlen):
    """Stands in for the backend of an EngineBench, whose own memory is the CPU's: a pass takes its tensors and its
    pages to the device and brings the pages back.

    kernel: varlen_attn, or what stands in for it. num_replays: passes done by a recording of an earlier one.
    """

    def __init__(
        self, bench: EngineBench, device: torch.device, kernel: Callable[..., Any], recorded: dict[bool, Sizes] | None
    ):
        super().__init__(bench, recorded, batch_invariant=False)
        self.device, self._tolerance = device, bench.tolerance
        heads = (bench.num_heads, NUM_KV_HEADS, bench.head_dim)
        self.varlen = VarlenAttention(self.page_size, *heads, bench.dtype, kernel=kernel)
        self.reference = SdpaAttention(self.page_size, NUM_KV_HEADS, bench.head_dim, torch.float32)
        self._recordings: dict[object, tuple[list[torch.Tensor], torch.Tensor, Recording]] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: tuple[AttentionBatch, Any],
        options: AttentionOptions,
    ) -> torch.Tensor:
        batch, reference_plan = plan
        copies = tuple(half.float() for half in pages)
        expected = self.reference.attend(query.float(), key.float(), value.float(), copies, reference_plan, options)
        rows = filled_up(len(batch.write_pages), query, key, value)
        rows = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in rows]  # as a model's heads lie
        tensors = [tensor.to(self.device, copy=True) for tensor in (*rows, *tensors_of(batch))]
        raw = torch.zeros(len(pages[0]), self.page_bytes, dtype=torch.uint8, device=self.device)
        for there, here in zip(self.varlen.view_pages(raw), pages, strict=True):
            there.copy_(here)
        run = self._at_once if self.recorded is None else self._recorded
        output, raw = run(tensors, raw, batch, options)
        for there, here in zip(self.varlen.view_pages(raw), pages, strict=True):
            here.copy_(there)
        found = output[: len(query)].cpu()
        torch.testing.assert_close(found.float(), expected, atol=self._tolerance, rtol=0)
        return found

    def _attend(self, tensors: list[torch.Tensor], raw: torch.Tensor, batch: AttentionBatch, options: Any) -> Any:
        plan = self.varlen.prepare(with_tensors(batch, tensors[3:]))
        return self.varlen.attend(*tensors[:3], self.varlen.view_pages(raw), plan, options)

    def _at_once(self, tensors: list[torch.Tensor], raw: torch.Tensor, batch: AttentionBatch, options: Any) -> Any:
        return self._attend(tensors, raw, batch, options), raw

    def _recorded(self, tensors: list[torch.Tensor], raw: torch.Tensor, batch: AttentionBatch, options: Any) -> Any:
        """By the recording of an earlier pass of the same sizes, in whose tensors are the new numbers; the first pass
        of its sizes is done as it is, and recorded afterwards."""
        sizes = (batch.window, len(raw), *(tuple(tensor.shape) for tensor in tensors))
        if sizes not in self._recordings:
            output = self._attend(tensors, raw, batch, options)
            own, own_raw = [tensor.clone() for tensor in tensors], raw.clone()
            self._recordings[sizes] = (own, own_raw, self._record(own, own_raw, batch, options))
            return output, raw
        own, own_raw, (output, replay) = self._recordings[sizes]
        for static, new in zip((*own, own_raw), (*tensors, raw), strict=True):
            static.copy_(new)
        replay()
        self.num_replays += 1
        return output, own_raw

    def _record(self, tensors: list[torch.Tensor], raw: torch.Tensor, batch: AttentionBatch, options: Any) -> Recording:
        output = torch.empty_like(tensors[0])

        def work() -> None:
            output.copy_(self._attend(tensors, raw, batch, options))

        if self.device.type != "cuda":
            return output, work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return output, graph.replay
