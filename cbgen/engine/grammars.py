"""Structured output: which tokens may follow, so that the whole output is JSON of a schema, or matches a grammar.

The library llguidance, an extra of the package, compiles structures and walks them. What it adds up to here:

- JSON is written as json.dumps writes it, with or without the one space after `,` and `:`. There is no other white
  space, so that no model can go on with it forever. Control characters are written as \\n, \\t, \\r, \\b or \\f, and
  nothing as \\uXXXX, which could name a property a second time. Properties come in the schema's order.
- A keyword or format of a schema that is not supported is an error, never passed over.
- Patterns and the kind "regex" are in the syntax of Rust's regex crate: no look-around, no back references. In a
  schema's patterns, \\d and \\w are ASCII; in "regex", of all of Unicode.
- "grammar" is Lark as llguidance has it, or GBNF, whose rules are written with `::=`.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cbgen.engine.param_checks import OF_DATA, OF_NAMES
from cbgen.errors import RowError, first_line

Structure = tuple[str, str]

CACHED_STRUCTURES = 256
# Of the automaton behind a structure, which grows as outputs come to new places in it; 1 to 2 kB each.
MOST_STATES = 100_000
MISSING_LIBRARY = "structured output needs the package llguidance; run: pip install 'cbgen-llm[structured]'"
_JSON_OPTIONS: Any = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_QUOTED_GRAMMAR = re.compile(r"^ *\d+ \| ", re.MULTILINE)
# llguidance has 29 February in every year, and a year 0.
_DAYS_OF_A_CALENDAR = [
    {"pattern": "^0{0,3}[1-9]"},
    {
        "pattern": "^[0-9]{4}-(0[13-9]|1[0-2])-|^[0-9]{4}-02-([01][0-9]|2[0-8])"
        "|^([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
    },
]
_LONGEST_REASON = 200


class GrammarMatcher:
    """How far one request's output is in its structure: derived state, made anew from its generated tokens at any time.

    Made by Grammars.matcher; used by one thread.
    """

    def __init__(self, grammars: "Grammars", structure: Structure, walker: Any) -> None:
        self.walker = walker
        self._grammars = grammars
        self._structure = structure
        self._token_ids: list[int] = []
        self._num_seen = 0
        self._num_replayed = -1

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the next generated tokens; ends of sequence say nothing about the structure and are left out."""
        self._num_seen += len(token_ids)
        new_ids = [token_id for token_id in token_ids if token_id not in self._grammars.eos_ids]
        self._token_ids += new_ids
        if new_ids and not self.walker.consume_tokens(new_ids):
            self.replay()

    def catch_up(self, generated_ids: Sequence[int]) -> None:
        """Takes what is new in all the tokens generated so far, which begin with those taken before."""
        if len(generated_ids) > self._num_seen:
            self.advance(generated_ids[self._num_seen :])

    def replay(self) -> None:
        """Walks the same tokens on a structure compiled anew, once for each state that failed.

        All walkers of a structure share the states that the library found so far, and fail together when there are too
        many: a row's result must not hang on which rows were there before it.
        """
        if self._num_replayed == len(self._token_ids):
            return
        self._num_replayed = len(self._token_ids)
        self.walker = self._grammars.compile_anew(self._structure)
        self.walker.consume_tokens(self._token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow; the generation can end here, without a token for it."""
        return self.walker.is_stopped() and self.walker.is_accepting()

    @property
    def may_end(self) -> bool:
        """Whether the output so far satisfies the structure, which may have longer ones too."""
        return self.walker.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the output cannot go on in the structure, one line; None: it can."""
        kind, _ = self._structure
        return f"{kind}: {_one_line(self.walker.get_error())}" if self.walker.is_error() else None


class Grammars:
    """Compiled structures of one tokenizer, and the tokens that they allow.

    `problem` may be called from any thread, also while others use matchers.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: width of the model's logits; ids that the tokenizer does not have are never allowed.
        eos_ids: tokens that end a sequence; allowed where the structure may end, and nowhere else.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._eos_columns = sorted(token_id for token_id in eos_ids if token_id < vocab_size)
        self._tokens: Any = None  # llguidance's table of them, or why there is none
        self._executor: Any = None
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokens_lock = threading.Lock()

    def problem(self, structure: Structure) -> str | None:
        """Why outputs cannot follow a structure (one of STRUCTURED_KINDS, text), one line; None: they can.

        The caller makes it a row's error, or a UsageError where the job asks for the structure.
        """
        compiled = self._cached(structure)
        return compiled if isinstance(compiled, str) else None

    def matcher(self, structure: Structure) -> GrammarMatcher:
        """A request's own matcher, at the beginning. Raises RowError for a structure with a problem."""
        compiled = self._cached(structure)
        if isinstance(compiled, str):
            raise RowError(compiled)
        return GrammarMatcher(self, structure, compiled.deep_copy())

    def allowed(self, matchers: list[GrammarMatcher]) -> torch.Tensor:
        """bool [len(matchers), vocab] on the CPU, True where the token may be next.

        A matcher that fails here says so in its `error`; nothing but the end is allowed in its row.
        """
        if not matchers:
            return torch.zeros(0, self.vocab_size, dtype=torch.bool)
        words = np.zeros((len(matchers), (self._tokens.vocab_size + 31) // 32), dtype=np.int32)
        self._fill(list(enumerate(matchers)), words)
        failed = [(row, matcher) for row, matcher in enumerate(matchers) if matcher.walker.is_error()]
        if failed:
            for _, matcher in failed:
                matcher.replay()
            self._fill(failed, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        allowed = torch.from_numpy(bits).view(torch.bool)[:, : self.vocab_size]
        allowed[:, [token_id for token_id in self._tokens.eos_tokens if token_id < self.vocab_size]] = False
        ends = torch.tensor([matcher.may_end or matcher.walker.is_error() for matcher in matchers])
        allowed[:, self._eos_columns] = ends[:, None]
        return allowed

    def _fill(self, rows: list[tuple[int, GrammarMatcher]], words: np.ndarray) -> None:
        """Writes the masks of some rows, a bit for each token, by one thread: the cores are the model's."""
        if self._executor is None:
            from llguidance import LLExecutor  # noqa: PLC0415 (an extra)

            self._executor = LLExecutor(1)
        walkers = [(matcher.walker, row) for row, matcher in rows]
        self._executor.unsafe_compute_mask_ptr(walkers, words.ctypes.data, words.strides[0], len(words))

    def compile_anew(self, structure: Structure) -> Any:
        """llguidance's matcher at the beginning of a structure without a problem; later matchers begin with it too."""
        compiled = self._compile(structure)
        with self._lock:
            self._compiled[structure] = compiled
        return compiled.deep_copy()

    def _cached(self, structure: Structure) -> Any:
        """llguidance's matcher at the beginning, never to be moved itself, or the problem."""
        with self._lock:
            if structure in self._compiled:
                self._compiled.move_to_end(structure)
                return self._compiled[structure]
        compiled = self._compile(structure)  # takes its time: others may go on
        with self._lock:
            compiled = self._compiled.setdefault(structure, compiled)
            while len(self._compiled) > CACHED_STRUCTURES:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, structure: Structure) -> Any:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = _token_table(self._tokenizer, self.vocab_size, self._eos_columns)
        if isinstance(self._tokens, str):
            return self._tokens
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 (an extra)

        kind, text = structure
        try:
            grammar = _GRAMMARS[kind](text)
        except ValueError as error:
            return f"{kind} cannot be followed: {_one_line(str(error))}"
        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        prototype = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        # What it passes over is only a warning where a grammar asks it to be lenient.
        reason = prototype.get_error() or "; ".join(prototype.get_grammar_warnings())
        if not reason:
            first = prototype.deep_copy()
            first.compute_bitmask()
            reason = first.get_error() and f"no token can begin the output ({first.get_error()})"
        return f"{kind} cannot be followed: {_one_line(reason)}" if reason else prototype


def _token_table(tokenizer: Any, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's tokenizer, or why there is none."""
    try:
        from llguidance.hf import from_tokenizer  # noqa: PLC0415 (an extra)
    except ImportError:
        return MISSING_LIBRARY
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos_ids or None)
    except ValueError as error:
        return f"structured output does not work with this model's tokenizer: {first_line(error)}"


def _schema_grammar(text: str) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 (an extra)

    schema = json.loads(text)
    if not isinstance(schema, dict) or not schema:
        raise ValueError("an object that is not empty is expected")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported")
    for part in list(_subschemas(schema)):
        all_of = part.get("allOf", [])
        if part.get("format") in ("date", "date-time") and isinstance(all_of, list):
            part["allOf"] = [*all_of, *_DAYS_OF_A_CALENDAR]
        least, required = part.get("minProperties"), part.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int) and least - num_required > 1:
            # llguidance counts what it wrote, and it may write the name of a property that is not listed twice.
            raise ValueError(f"minProperties ({least}) with two or more properties that are not required")
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all in it, also below keywords that are unknown, where references may lead."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                if keyword in OF_NAMES and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in OF_DATA:
                    waiting.append(value)


def _regex_grammar(text: str) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 (an extra)

    if not text:
        raise ValueError("it is empty")
    return LLMatcher.grammar_from_regex(text)


def _choice_grammar(text: str) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415 (an extra)

    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("a list of texts, none of them empty, is expected")
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _lark_grammar(text: str) -> str:
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415 (an extra)

    if not text.strip():
        raise ValueError("it is empty")
    return grammar_from("gbnf", text) if _GBNF_RULE.search(text) else LLMatcher.grammar_from_lark(text)


_GRAMMARS = {
    "json_schema": _schema_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _lark_grammar,
}


def _one_line(message: str) -> str:
    """llguidance's message without the lines of the grammar that it quotes below."""
    line = " ".join(_QUOTED_GRAMMAR.split(message.replace("<non-verbose/>", ""))[0].split())
    return line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 1]}…"
