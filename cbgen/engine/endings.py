"""Whether a request has ended with the token it just got, and what of its tokens is text."""

from collections.abc import Callable
from dataclasses import dataclass

from cbgen.engine.generated_text import TextCodec, TextTail, stop_in_text
from cbgen.engine.requests import FinishReason, RequestState


@dataclass(frozen=True)
class Ending:
    """stop_reason: the stop text or token, None where the model or the form of the output ended it. num_hidden_tokens:
    at the end, that are none of the text; a stop text is cut out of the text itself."""

    reason: FinishReason
    stop_reason: str | int | None = None
    num_hidden_tokens: int = 0


class Endings:
    """eos_token_ids: end a generation that does not ignore them. codec: for stop texts. is_complete: whether the form
    of a request's output leaves nothing to be generated."""

    def __init__(
        self, eos_token_ids: frozenset[int], codec: TextCodec | None, is_complete: Callable[[RequestState], bool]
    ):
        self._eos_token_ids = eos_token_ids
        self._codec = codec
        self._is_complete = is_complete

    def of(self, request: RequestState) -> Ending | None:
        """How the request ended with its last token; None: it goes on."""
        params, token_id = request.params, request.token_ids[-1]
        if token_id in self._eos_token_ids and (params.structure is not None or not params.ignore_eos):
            return Ending(FinishReason.STOP, None, 1)
        if token_id in params.stop_token_ids and request.num_generated_tokens >= params.min_tokens:
            return Ending(FinishReason.STOP, token_id, 0 if params.include_stop else 1)
        if params.stop and (stop := self._stop_text(request)) is not None:
            return Ending(FinishReason.STOP, stop)
        if self._is_complete(request):
            return Ending(FinishReason.STOP)
        if request.num_generated_tokens >= params.max_tokens:
            return Ending(FinishReason.LENGTH)
        return None

    def _stop_text(self, request: RequestState) -> str | None:
        """The end of the text tells when to look; the whole text decides."""
        assert self._codec is not None, "stop texts need a tokenizer"
        if request.tail is None:
            request.tail = TextTail(self._codec, request.params)
        generated_ids = request.generated_ids
        if not request.tail.completes_stop(generated_ids) or len(generated_ids) < request.params.min_tokens:
            return None
        found = stop_in_text(self._codec, generated_ids, request.params)
        return None if found is None else found[1]
