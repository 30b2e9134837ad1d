"""Requests that could never be served, told before they start."""

from cbgen.cache.paged_cache import PagedCache


def refusal(prompt: int, max_tokens: int, max_model_len: int, cache: PagedCache) -> str | None:
    """Why a request of so many tokens cannot be served, or None: it must fit the model's context and an empty cache."""
    most = prompt + max_tokens
    if prompt >= max_model_len:
        return f"the prompt has {prompt} tokens and leaves no room for output in the context of {max_model_len}"
    if most > max_model_len:
        return f"prompt ({prompt} tokens) and max_tokens together exceed the context of {max_model_len}"
    if not cache.fits_empty(most - 1):  # the KV of the last token is never needed
        capacity = cache.max_request_tokens(max_model_len)
        return (
            f"the prompt ({prompt} tokens) and max_tokens ({max_tokens}) need more than the whole cache, which "
            f"holds {capacity} tokens"
        )
    return None
