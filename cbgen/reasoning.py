"""What a model thinks before it answers, told from the answer.

    <think>\\nwords\\n</think>\\n\\nanswer      reasoning "words", completion "answer"
    words\\n</think>answer                    the same, if the prompt ends with <think>: the chat template wrote it
    <think>words                             reasoning "words", completion "": the output ended before the answer
    answer                                   reasoning null

Of white space only line breaks beside a tag are left out.
"""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from cbgen.errors import UsageError

DEFAULT_TAGS = "<think> </think>"
# Tokens of white space that may follow the tag at the end of a prompt.
TAIL_TOKENS = 16


class ReasoningSplitter:
    """Knows the tags of a job. A tag that is one special token, which texts may leave out, is found by its id; another
    one, which may be cut into tokens anyhow, in the text."""

    def __init__(self, tags: str, tokenizer: PreTrainedTokenizerBase):
        self._open, self._close = parse_tags(tags)
        self._open_id = _special_id(tokenizer, self._open)
        self._close_id = _special_id(tokenizer, self._close)
        self._tokenizer = tokenizer

    def split(
        self, prompt_ids: list[int], text_ids: list[int], decode: Callable[[list[int]], str], num_cut: int = 0
    ) -> tuple[str | None, str]:
        """Reasoning, None without any, and completion of what was generated after a prompt.

        decode: how the row's text is made of ids. num_cut: so many characters at the end of that text are left out.
        """

        def to_end(ids: list[int]) -> str:
            text = decode(ids)
            return text[: max(0, len(text) - num_cut)]

        was_opened, rest_ids = self._after_open_token(text_ids)
        thoughts, is_closed, answer = self._at_close(rest_ids, decode, to_end)
        if self._open_id is None and thoughts.lstrip().startswith(self._open):
            was_opened, thoughts = True, thoughts.lstrip().removeprefix(self._open)
        if not was_opened and not self._ends_open(prompt_ids):
            return None, to_end(text_ids)
        return thoughts.strip("\n"), answer.lstrip("\n") if is_closed else ""

    def _after_open_token(self, text_ids: list[int]) -> tuple[bool, list[int]]:
        """Whether the ids begin, but for white space, with the tag's token, and those after it."""
        if self._open_id not in text_ids:
            return False, text_ids
        place = text_ids.index(self._open_id)
        is_first = not self._whole_text(text_ids[:place]).strip()
        return is_first, text_ids[place + 1 :] if is_first else text_ids

    def _at_close(
        self, ids: list[int], decode: Callable[[list[int]], str], to_end: Callable[[list[int]], str]
    ) -> tuple[str, bool, str]:
        """The texts before and after the closing tag, and whether it is there."""
        if self._close_id is None:
            before, found, after = to_end(ids).partition(self._close)
            return before, bool(found), after
        if self._close_id not in ids:
            return to_end(ids), False, ""
        place = ids.index(self._close_id)
        return decode(ids[:place]), True, to_end(ids[place + 1 :])

    def _ends_open(self, prompt_ids: list[int]) -> bool:
        num_tokens = len(self._open.encode()) + TAIL_TOKENS
        return self._whole_text(prompt_ids[-num_tokens:]).rstrip().endswith(self._open)

    def _whole_text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def parse_tags(tags: str) -> tuple[str, str]:
    """Raises UsageError for what is not two words."""
    words = tags.split()
    if len(words) != 2:
        raise UsageError(f"--reasoning-tags {tags!r}: two tags parted by a space are expected, such as {DEFAULT_TAGS}")
    return words[0], words[1]


def _special_id(tokenizer: PreTrainedTokenizerBase, tag: str) -> int | None:
    """The token that is this tag, if texts may leave it out."""
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token.content == tag:
            return int(token_id)
    return None
