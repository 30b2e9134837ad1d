"""What the rows of a job ask for, counted: tokens, rows beyond the limits, rows alike, prefixes in common."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from cbgen.cache.paged_cache import PagedCache
from cbgen.duplicates import GenerationKey, Recipients, generation_key
from cbgen.engine.refusal import refusal
from cbgen.engine.sampling_params import SamplingParams
from cbgen.errors import UsageError
from cbgen.first_rows import FirstRows
from cbgen.ordering import WaitingRequest, pack_ids, shared_pages
from cbgen.resolution import ResolvedJob

TOO_LARGE = "prompt and max_tokens need more than the whole cache, which holds {} tokens"


@dataclass
class PlannedRows:
    """Rows that were read. requests: what is generated for them, equal greedy rows once; by arrival.

    num_inspected: rows of the input; num_rows: the shard's among them, all without shards.

    lengths, max_tokens: of every row that can be generated, tokens of its prompt and of what it may generate.
    failures: why rows would be error rows, and how many for each reason. num_results: output rows, samples and all.
    num_alike: rows that take the result of another.
    """

    num_inspected: int = 0
    num_rows: int = 0
    lengths: list[int] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    num_clamped: int = 0
    num_cut: int = 0
    num_alike: int = 0
    num_results: int = 0
    requests: list[WaitingRequest] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Of what is generated: those of rows alike once, those of several samples once."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of what is generated, at most."""
        return sum(params.max_tokens for request in self.requests for params, _ in request.members)

    @property
    def result_tokens(self) -> int:
        """Of all output rows, at most."""
        return sum(self.max_tokens)

    def shared_tokens(self, page_tokens: int) -> int:
        """Prompt tokens in whole pages that an earlier request has computed, if the cache still holds them."""
        by_ids = sorted(request.packed_ids for request in self.requests)
        return page_tokens * sum(shared_pages(one, other, page_tokens) for one, other in pairwise(by_ids))

    def without_too_large(self, cache: PagedCache, max_model_len: int) -> "PlannedRows":
        """The same, with requests that this cache could not hold even alone among the failures."""
        requests, failures = [], Counter(self.failures)
        for request in self.requests:
            reason = refusal(request.num_tokens, request.max_tokens, max_model_len, cache)
            if reason is None:
                requests.append(request)
            else:
                failures[TOO_LARGE.format(cache.max_request_tokens(max_model_len))] += 1
        return replace(self, requests=requests, failures=failures)

    def expecting(self, mean_tokens: float) -> "PlannedRows":
        """The same if rows generate so many tokens on average, each as much less than it may as the others.

        Raises UsageError for more than they may.
        """
        most = self.result_tokens / max(1, len(self.max_tokens))
        if self.max_tokens and mean_tokens > most:
            raise UsageError(f"--expected-tokens {mean_tokens:g}: rows may generate {most:g} on average, no more")
        share = mean_tokens / max(1.0, most)
        changed = {tokens: max(1, round(tokens * share)) for tokens in set(self.max_tokens)}
        requests = [
            replace(one, members=[(_ending_at(changed, params), tags) for params, tags in one.members])
            for one in self.requests
        ]
        return replace(self, requests=requests, max_tokens=[changed[tokens] for tokens in self.max_tokens])


def _ending_at(changed: dict[int, int], params: SamplingParams) -> SamplingParams:
    most = changed[params.max_tokens]
    return params.updated(max_tokens=most, min_tokens=min(params.min_tokens, most))


def read_rows(job: ResolvedJob, num_rows: int) -> PlannedRows:
    """The first so many; of a shard, those of them that are its own."""
    planned, seen = PlannedRows(), set[GenerationKey]()
    for row in FirstRows(job).take(num_rows):
        planned.num_inspected += 1
        if not row.is_mine:
            continue
        planned.num_rows += 1
        if row.error is not None or row.fitted is None:
            planned.failures[row.error or ""] += 1
            planned.num_results += row.prompt.params.n if row.prompt is not None else 1
            continue
        ids, params = row.fitted.token_ids, row.fitted.params
        planned.num_results += params.n
        planned.lengths.append(len(ids))
        planned.max_tokens += [params.max_tokens] * params.n
        planned.num_clamped += row.fitted.clamped_max_tokens is not None
        planned.num_cut += row.fitted.num_cut > 0
        packed = pack_ids(ids)
        key = generation_key(packed, params) if job.spec.deduplicate else None
        if key in seen:
            planned.num_alike += params.n
            continue
        if key is not None:
            seen.add(key)
            planned.num_alike += params.n - 1
        members = [(params, Recipients([])) for _ in range(1 if key is not None else params.n)]
        planned.requests.append(WaitingRequest(len(planned.requests), packed, members))
    return planned


def sample_of(requests: list[WaitingRequest], count: int, run: int = 100) -> list[WaitingRequest]:
    """So many of a long list that is in order, in stretches from all over it: neighbours may share prefixes."""
    if len(requests) <= count:
        return requests
    starts = np.linspace(0, len(requests) - run, max(1, count // run)).astype(int)
    return [request for start in sorted(set(starts.tolist())) for request in requests[start : start + run]]


def histogram(values: list[int]) -> Iterator[tuple[int, int, int]]:
    """(from, to, how many) for each power of two between the least and the greatest."""
    if not values:
        return
    counts = Counter(value.bit_length() for value in values)
    for bits in range(min(counts), max(counts) + 1):
        yield 1 << max(0, bits - 1), (1 << bits) - 1, counts[bits]
