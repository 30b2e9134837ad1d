"""varlen_attn by plain operations of fixed sizes, which a CUDA graph can record: for a GPU whose torch has no kernel
over pages, so that everything around the kernel can be tried there all the same. It takes much memory."""

import torch


def dense_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """See varlen_reference. query [T, heads, head_dim]; returns the same shape."""
    device, num_requests = query.device, len(cu_seq_q) - 1
    tokens = torch.arange(len(query), device=device, dtype=cu_seq_q.dtype)
    request = torch.searchsorted(cu_seq_q[1:], tokens, right=True).clamp(max=num_requests - 1)
    if block_table is None:
        lengths, places = cu_seq_k[1:] - cu_seq_k[:-1], torch.arange(max_k, device=device)
        places = (cu_seq_k[:-1, None] + places).clamp(max=len(key) - 1).long()
        keys, values = key[places], value[places]
    else:
        assert seqused_k is not None
        lengths = seqused_k
        keys, values = (half[block_table.long()].flatten(1, 2) for half in (key, value))
    numbers = torch.arange(keys.shape[1], device=device)  # keys and values: [R, L, kv_heads, head_dim]
    beyond = (numbers >= lengths[:, None])[..., None, None]
    keys, values = (half.masked_fill(beyond, 0)[request].float() for half in (keys, values))
    distance = (lengths[request] - cu_seq_q[1:][request] + tokens)[:, None] - numbers
    before, after = window_size
    visible = numbers < lengths[request][:, None]
    visible &= distance <= before if before >= 0 else visible
    visible &= distance >= -after if after >= 0 else visible
    grouped = query.float().unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, keys) * scale
    hidden = ~visible[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    return torch.einsum("tkgl,tlkd->tkgd", weights, values).flatten(1, 2).to(query.dtype)
