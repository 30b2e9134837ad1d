"""Text of what is being generated: where a stop text cuts it, and the tokens that a text may be made of."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cbgen.engine.sampling_params import SamplingParams

# Decoding begins anew, a few tokens back, once so many were decoded together: a token's text hangs on few others.
_WINDOW_TOKENS, _OVERLAP_TOKENS = 32, 6
_INCOMPLETE, _MOST_BYTES_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}", 4


class TextCodec:
    """A tokenizer of transformers, as far as the engine needs one."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.words_as_ids = lru_cache(maxsize=4096)(self._words_as_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _words_as_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, as it stands at the beginning of a text and after a space."""
        spelled = [text for word in words for text in (word, " " + word.lstrip(" "))]
        encoded = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spelled]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))


class TextTail:
    """The end of a request's text while it grows: enough to see a stop text completed.

    text of tokens      [ anchor ... | known | new ]     the text of those from the anchor on is worked out, and what
                                                         it has beyond the known is new
    A character whose bytes are not all there yet waits.
    """

    def __init__(self, codec: TextCodec, params: SamplingParams):
        self._codec = codec
        self._params = params
        self._longest = max(map(len, params.stop))
        self._anchor = self._num_known_tokens = 0
        self._known = ""
        self._tail = ""

    def completes_stop(self, generated_ids: list[int]) -> bool:
        """Whether a stop text has come with the tokens since the last call, as far as the end of the text tells."""
        text = self._decode(generated_ids[self._anchor :])
        if text.endswith(_INCOMPLETE) and len(generated_ids) - self._num_known_tokens < _MOST_BYTES_OF_A_CHARACTER:
            return False
        self._tail = self._tail[max(0, len(self._tail) - self._longest + 1) :] + text[len(self._known) :]
        self._known, self._num_known_tokens = text, len(generated_ids)
        if self._num_known_tokens - self._anchor > _WINDOW_TOKENS:
            self._anchor = self._num_known_tokens - _OVERLAP_TOKENS
            self._known = self._decode(generated_ids[self._anchor :])
        return any(stop in self._tail for stop in self._params.stop)

    def _decode(self, token_ids: list[int]) -> str:
        return self._codec.decode(token_ids, self._params.skip_special_tokens)


def stop_in_text(codec: TextCodec, token_ids: list[int], params: SamplingParams) -> tuple[str, str] | None:
    """The text cut at the stop text that is complete first, and that stop text; None without any.

    Of several complete at the same place, the longest. What is complete within the first min_tokens tokens is passed
    over.
    """
    text = codec.decode(token_ids, params.skip_special_tokens)
    after = len(codec.decode(token_ids[: params.min_tokens], params.skip_special_tokens)) if params.min_tokens else 0
    found = [(end, -len(stop), stop) for stop in params.stop if (end := _first_end(text, stop, after)) is not None]
    if not found:
        return None
    end, _, stop = min(found)
    return text[: end if params.include_stop else end - len(stop)], stop


def _first_end(text: str, stop: str, after: int) -> int | None:
    """Where `stop` ends for the first time beyond the first `after` characters."""
    place = text.find(stop, max(0, after - len(stop) + 1))
    return None if place < 0 else place + len(stop)
