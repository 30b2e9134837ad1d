"""How prompt and output share the context of the model, where they do not fit it together."""

from dataclasses import dataclass

from cbgen.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Fitted:
    """A prompt and its parameters as they fit the context.

    num_cut: tokens that the prompt lost. clamped_max_tokens: what is left of max_tokens; None: all.
    """

    token_ids: list[int]
    params: SamplingParams
    num_cut: int
    clamped_max_tokens: int | None


@dataclass(frozen=True)
class LengthPolicy:
    """context: tokens of prompt and output together. truncate_prompt: where a prompt is cut: left, right, middle; none:
    never. bos_token_id: stays where a prompt begins with it."""

    context: int
    truncate_prompt: str = "none"
    bos_token_id: int | None = None

    def fit(self, token_ids: list[int], params: SamplingParams) -> Fitted:
        """Cuts the prompt, if that is wanted, and clamps what may be generated."""
        kept = self.cut(token_ids, params.max_tokens)
        clamped = self.clamped(params, len(kept))
        left = clamped.max_tokens if clamped.max_tokens < params.max_tokens else None
        return Fitted(kept, clamped, len(token_ids) - len(kept), left)

    def cut(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """What is left of a prompt: as much as max_tokens leaves of the context, but at least half of that."""
        keep = max(self.context - max_tokens, self.context // 2)
        if self.truncate_prompt == "none" or len(token_ids) <= keep:
            return token_ids
        head = {"left": 0, "right": keep, "middle": -(-keep // 2)}[self.truncate_prompt]
        if token_ids[0] == self.bos_token_id:
            head = max(head, 1)
        return token_ids[:head] + token_ids[len(token_ids) - (keep - head) :]

    def clamped(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters with no more tokens than the prompt leaves; the same ones where that is enough, or nothing."""
        room = self.context - num_prompt_tokens
        if not 0 < room < params.max_tokens:
            return params
        return params.updated(max_tokens=room, min_tokens=min(params.min_tokens, room))
