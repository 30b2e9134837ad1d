"""What one request asks of its generation: names and meanings as in vLLM, values checked."""

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from cbgen.engine import param_checks as checks
from cbgen.errors import RowError

DEFAULT_MAX_TOKENS = 512
# Alternatives of a token, as in vLLM and in OpenAI's API: more of them would outgrow the results themselves.
MAX_LOGPROBS = 20
MAX_SAMPLES = 10_000
STRUCTURED_KINDS = ("json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is generated. Raises RowError, with the parameter and the value, for what is out of range.

    Args:
        max_tokens: tokens to generate at most, 1 or more.
        temperature: 0 is greedy.
        top_p: the smallest set of tokens with this probability, in (0, 1]; 1 is off.
        top_k: the k most probable tokens; 0, or -1, is off.
        min_p: tokens at least so probable, as a share of the most probable one's, in [0, 1]; 0 is off.
        repetition_penalty: logits of tokens that prompt or output hold are divided (negative ones multiplied) by it;
            0.001 to 1000, 1 is off.
        presence_penalty: taken from the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: the same for each time that it holds them.
        logit_bias: {token id: number in [-100, 100]} added to logits.
        bad_words: texts that are not generated.
        stop: texts that end the generation, one or a list; the output is cut before the one that is complete first.
        stop_token_ids: tokens that end the generation, beside the model's own.
        include_stop: whether the output keeps the stop text or token.
        min_tokens: tokens before which nothing ends the generation, at most max_tokens.
        ignore_eos: whether the model's end-of-sequence tokens are tokens like others.
        n: samples of the prompt.
        seed: a whole number that the draws come from; None: the job's.
        logprobs: log-probabilities of the output's tokens and so many alternatives, 0 to 20; None: none.
        prompt_logprobs: the same of the prompt's tokens.
        skip_special_tokens: whether the text leaves special tokens out.
        json_schema: text or object; the output is JSON that it describes.
        regex: the output matches it as a whole.
        choice: the output is one of these texts.
        grammar: in the Lark or GBNF notation; the output is a sentence of it.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def structure(self) -> tuple[str, str] | None:
        """The form of the output: one of STRUCTURED_KINDS and what it says, as text; None: any."""
        for kind in STRUCTURED_KINDS:
            value = getattr(self, kind)
            if value:
                return kind, json.dumps(value) if kind == "choice" else value
        return None

    @property
    def needs_history(self) -> bool:
        """Whether logits hang on which tokens were there before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen, by what the host knows of the request."""
        return bool(
            self.needs_history or self.logit_bias or self.bad_words or self.min_tokens or self.structure is not None
        )

    def updated(self, **changes: Any) -> "SamplingParams":
        """The same but for these parameters: they are checked, and how they go with the others."""
        return self._with({name: _CHECKS[name](name, value) for name, value in changes.items()})._check_together()

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same with another seed, which is not checked again."""
        return self._with({"seed": seed})

    def without_draws(self) -> "SamplingParams":
        """The same without what a greedy result does not hang on: how samples are told apart, and tokens drawn."""
        return self._with({name: _DEFAULTS[name] for name in ("n", "seed", "top_p", "top_k", "min_p")})

    def named(self) -> dict[str, Any]:
        """What differs from the defaults, by name, as JSON has it."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.__dict__.items()
            if value != _DEFAULTS[name]
        }

    def _with(self, values: dict[str, Any]) -> "SamplingParams":
        """A copy with other values, unchecked: quicker than one that asks for each field by itself."""
        other = object.__new__(SamplingParams)
        other.__dict__.update(self.__dict__ | values)
        return other

    def _check_together(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise RowError(f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        given = [name for name in STRUCTURED_KINDS if getattr(self, name)]
        if len(given) > 1:
            raise RowError(f"{' and '.join(given)}: give one of them, an output has one form")
        if given and (self.stop or self.stop_token_ids):
            cut = "stop" if self.stop else "stop_token_ids"
            raise RowError(f"{given[0]} and {cut}: give one of them, an output that is cut short has no form")
        return self


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_PENALTY = checks.number_where(lambda value: -2 <= value <= 2, "-2 to 2")
_ALTERNATIVES = checks.optional(checks.count_within(0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"))
_CHECKS: dict[str, checks.Check] = {
    "max_tokens": checks.count_within(1, math.inf, "at least 1"),
    "temperature": checks.number_where(lambda value: value >= 0, "0 or more"),
    "top_p": checks.number_where(lambda value: 0 < value <= 1, "more than 0 and at most 1"),
    "top_k": checks.top_k,
    "min_p": checks.number_where(lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": checks.number_where(lambda value: 1e-3 <= value <= 1e3, "0.001 to 1000"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": checks.biases,
    "bad_words": checks.texts,
    "stop": checks.texts,
    "stop_token_ids": checks.token_ids,
    "include_stop": checks.truth,
    "min_tokens": checks.count_within(0, math.inf, "0 or more"),
    "ignore_eos": checks.truth,
    "n": checks.count_within(1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
    "seed": checks.optional(checks.whole_number),
    "logprobs": _ALTERNATIVES,
    "prompt_logprobs": _ALTERNATIVES,
    "skip_special_tokens": checks.truth,
    "json_schema": checks.optional(checks.schema),
    "regex": checks.optional(checks.text),
    "choice": checks.choices,
    "grammar": checks.optional(checks.text),
}
