"""The first rows of a job's input as the run would make requests of them, without running any."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import compress, islice
from operator import not_

from cbgen.length_policy import Fitted, LengthPolicy
from cbgen.prompting import FailedPrompt, RenderedPrompt
from cbgen.resolution import ResolvedJob
from cbgen.row_keys import RowKeys, belongs_to_shard

BATCH_ROWS = 128


@dataclass(frozen=True)
class FirstRow:
    """index: the row's place in the input. error: why it would be an error row; None: there is a request, `fitted`.

    is_mine: whether it is of this job's shard.
    """

    index: int
    error: str | None = None
    prompt: RenderedPrompt | None = None
    fitted: Fitted | None = None
    is_mine: bool = True


class FirstRows:
    """Renders and tokenizes rows as the run of a job does; `preview` shows a prompt as the model reads it."""

    def __init__(self, job: ResolvedJob):
        self._job = job
        self._prompter = job.prompter(datetime.now(timezone.utc).date())
        self._lengths = LengthPolicy(job.model.max_model_len, job.spec.truncate_prompt, self._prompter.bos_token_id)

    def take(self, num_rows: int) -> Iterator[FirstRow]:
        """In lots: what fails in a lot comes before the rest of it."""
        rows, keys = islice(self._job.source.rows(self._job.columns), num_rows), RowKeys(num_rows)
        while batch := [self._prompter.render(row) for row in islice(rows, BATCH_ROWS)]:
            if self._job.shard is not None:
                mine = belongs_to_shard(keys.of(batch), *self._job.shard).tolist()
                yield from (FirstRow(row.index, is_mine=False) for row in compress(batch, map(not_, mine)))
                batch = list(compress(batch, mine))
            yield from (FirstRow(row.index, row.error) for row in batch if isinstance(row, FailedPrompt))
            rendered = [prompt for prompt in batch if isinstance(prompt, RenderedPrompt)]
            for prompt, ids in zip(rendered, self._prompter.tokenize(rendered), strict=True):
                yield self._fitted(prompt, ids)

    def preview(self, row: FirstRow) -> str:
        assert row.prompt is not None
        cut = row.fitted.token_ids if row.fitted is not None and row.fitted.num_cut else None
        return self._prompter.preview(row.prompt, cut)

    def _fitted(self, prompt: RenderedPrompt, ids: list[int]) -> FirstRow:
        fitted = self._lengths.fit(ids, prompt.params)
        error = None
        if not 0 < len(fitted.token_ids) < self._lengths.context:
            why = f"has {len(ids)} tokens, the context is {self._lengths.context}" if ids else "has no tokens"
            error = f"the prompt {why}"
        return FirstRow(prompt.index, error, prompt, fitted)
