"""What torch.nn.attention.varlen.varlen_attn is documented to do, in plain torch on the CPU and in any dtype.

It is stricter than the kernel: what the kernel would read beyond its tensors, or refuse, fails an assertion, and every
token within a request's length is read, also those that the window hides: NaN among them shows in the output.
"""

import torch


def varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """query [T, heads, head_dim] over key and value [tokens, kv_heads, head_dim], or pages of them.

    Query tokens are the last of their request's keys. Returns [T, heads, head_dim], 0 where there is nothing to see.
    """
    assert return_aux is None
    assert cu_seq_k is not None, "the kernel that comes with torch wants it, also beside a block table"
    assert all(type(number) is int for number in (max_q, max_k, *window_size))
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert query.shape[1] % key.shape[-2] == 0
    assert block_table is None or num_splits == 1, "pytorch issue 194167: splits come out wrong"
    return _reference(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, list(window_size), seqused_k, block_table
    )


@torch.library.custom_op("cbgen_tests::varlen_reference", mutates_args=())
def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: list[int],
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """One operation as far as a recording can see, as the kernel is: numbers are read when it runs."""
    _check_layout(query, key, value, query_starts, kv_starts, seqused_k, block_table)
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    own_starts = kv_starts.tolist()
    for request, (start, end) in enumerate(zip(query_starts.tolist(), query_starts[1:].tolist(), strict=False)):
        length = own_starts[request + 1] - own_starts[request] if seqused_k is None else int(seqused_k[request])
        assert 0 <= end - start <= max_q
        assert 0 <= length <= max_k
        if block_table is None:
            places = torch.arange(own_starts[request], own_starts[request] + length)
            keys, values = key[places], value[places]
        else:
            tokens, page_size = torch.arange(length), key.shape[1]
            assert length <= block_table.shape[1] * page_size, "the table has no pages for so many tokens"
            pages = block_table[request].long()[tokens // page_size]
            keys, values = key[pages, tokens % page_size], value[pages, tokens % page_size]
        output[start:end] = _attend(query[start:end], keys, values, scale, window)
    return output


def _check_layout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    num_requests = len(query_starts) - 1
    for starts in (query_starts, kv_starts):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert starts.shape == (num_requests + 1,)
        assert starts[0] == 0
        assert (starts.diff() >= 0).all()
    assert query_starts[-1] <= len(query)
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert key.shape[-1] == query.shape[-1]
    if seqused_k is not None:
        assert seqused_k.dtype == torch.int32
        assert seqused_k.is_contiguous()
        assert seqused_k.shape == (num_requests,)
    if block_table is not None:
        assert seqused_k is not None, "a block table alone does not say where a request ends"
        assert block_table.dtype == torch.int32
        assert block_table.stride(-1) == 1
        assert len(block_table) == num_requests
    else:
        assert kv_starts[-1] <= len(key)
    assert key.dim() == (3 if block_table is None else 4)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, window: list[int]
) -> torch.Tensor:
    """query [Q, heads, head_dim] are the last of the L tokens in keys and values [L, kv_heads, head_dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (half.double().repeat_interleave(group, dim=1) for half in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (query.shape[-1] ** -0.5 if scale is None else scale)
    positions = torch.arange(len(query))[:, None] + len(keys) - len(query)
    distance = positions - torch.arange(len(keys))
    before, after = window
    visible = torch.ones_like(distance, dtype=torch.bool)
    if before >= 0:
        visible &= distance <= before
    if after >= 0:
        visible &= distance >= -after
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
