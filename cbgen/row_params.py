"""The sampling parameters of a row: its own columns over those of the job."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cbgen.engine.grammars import Grammars
from cbgen.engine.sampling_params import STRUCTURED_KINDS, SamplingParams
from cbgen.errors import RowError

OPTION_COLUMNS = tuple(field.name for field in fields(SamplingParams))
# What a row may ask for without becoming another row: more tokens, more samples. Its seed is told apart by itself.
_NOT_IN_IDENTITY = ("max_tokens", "n")
_NO_STRUCTURE: dict[str, Any] = dict.fromkeys(STRUCTURED_KINDS)


class RowParams:
    """Reads the parameters of rows.

    defaults: those of the job. heeded: the columns that are read. vocab_size: token ids in them are below it. grammars:
    tell which forms of an output can be had.
    """

    def __init__(
        self,
        defaults: SamplingParams,
        vocab_size: int,
        heeded: Sequence[str] = OPTION_COLUMNS,
        grammars: Grammars | None = None,
    ):
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._heeded = tuple(heeded)
        self._grammars = grammars
        self._default_identity = [*_identity(defaults), None]

    def of(self, values: dict[str, Any]) -> tuple[SamplingParams, list[Any]]:
        """The parameters of a row with these columns, and what of them names the row: the same however it is written.

        The job's max_tokens may grow and leave finished rows as they are; a row whose own one changes is another row.
        Raises RowError.
        """
        own = {name: value for name in self._heeded if (value := values.get(name)) is not None}
        if not own:
            return self._defaults, self._default_identity
        if not own.keys().isdisjoint(STRUCTURED_KINDS):  # a form of its own takes the place of the job's
            own = _NO_STRUCTURE | own
        params = self._defaults.updated(**own)
        self._check_structure(params)
        if "logit_bias" in own or "stop_token_ids" in own:
            check_vocabulary(params, self._vocab_size)
        return params, [*_identity(params), params.max_tokens if "max_tokens" in own else None]

    def whole(self, params: SamplingParams) -> tuple[SamplingParams, list[Any]]:
        """The same for a row that brings all its parameters: it is named as one of a job that has them as options."""
        self._check_structure(params)
        check_vocabulary(params, self._vocab_size)
        return params, [*_identity(params), None]

    def _check_structure(self, params: SamplingParams) -> None:
        if params.structure is not None and self._grammars is not None:
            problem = self._grammars.problem(params.structure)
            if problem is not None:
                raise RowError(problem)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises RowError for a token that the model does not have."""
    for name, token_ids in (
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RowError(f"{name} names token {token_id}, those of this model are 0 to {vocab_size - 1}")


def _identity(params: SamplingParams) -> list[Any]:
    return [[name, value] for name, value in params.named().items() if name not in _NOT_IN_IDENTITY]
