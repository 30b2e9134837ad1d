"""Whether torch's varlen_attn does on this machine what it is documented to do: a build may lack it, or differ."""

import torch

from cbgen.errors import first_line
from cbgen.kernels.backend import AttentionBackend, AttentionBatch, AttentionOptions, DeviceBatch
from cbgen.kernels.cuda import VarlenAttention

# Of bfloat16, beside 1 and beside what is expected: some units in the last place.
TRIAL_TOLERANCE = 2e-2


def tried_problem(backend: VarlenAttention, reference: AttentionBackend, device: torch.device) -> str | None:
    """Whether the kernel does here what it is documented to do: the pages of a prompt and of a decode are attended to
    by both, on the device. None, or why not, as in varlen_problem."""
    query, key, value, batch, raw = _trial_pass(backend, device)
    options = AttentionOptions(backend.head_dim**-0.5)
    kernels: tuple[AttentionBackend, AttentionBackend] = (reference, backend)
    try:
        expected, found = (
            kernel.attend(query, key, value, kernel.view_pages(raw.clone()), kernel.prepare(batch), options)
            for kernel in kernels
        )
        difference = (expected.float() - found.float()).abs()
        excess = (difference - TRIAL_TOLERANCE * (1 + expected.float().abs())).max().item()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"it fails here: {first_line(error)}"
    return None if excess <= 0 else f"it gives other results here (by {difference.max().item():.1e})"


def _trial_pass(
    backend: VarlenAttention, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, torch.Tensor]:
    """Query, key and value of 5 tokens, a prompt of 4 and a decode after a page and a half; its pages lie apart."""
    size, dtype = backend.page_size, backend.dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads = (backend.num_heads, backend.num_kv_heads, backend.num_kv_heads)
    query, key, value = (random(5, count, backend.head_dim) for count in heads)
    raw = torch.zeros(5, backend.page_bytes, dtype=torch.uint8, device=device)
    for half in backend.view_pages(raw):
        half.copy_(random(*half.shape))
    length = size + size // 2

    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    batch = AttentionBatch(
        query_lengths=[4, 1],
        kv_lengths=[4, length],
        first_tokens=[0, 0],
        page_tables=words(3, 0, 4, 2).view(2, 2),
        write_pages=words(3, 3, 3, 3, 2),
        write_offsets=words(0, 1, 2, 3, (length - 1) % size),
        window=None,
        on_device=DeviceBatch(words(0, 4, 5), words(4, length), max_query_length=4, max_kv_length=2 * size),
    )
    return query, key, value, batch, raw
