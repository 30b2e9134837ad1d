"""One run of cbgen's engine over the requests of a benchmark, and what the engine counted meanwhile."""

from typing import Any

from cbgen.duplicates import Recipients
from cbgen.engine.build import Engine
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.errors import ModelError
from cbgen.ordering import WaitingRequest, arrange, pack_ids

COUNTED = ("num_steps", "prefix_hit_tokens", "offloads", "soft_resets", "recomputed_tokens")
MEANS = (
    "requests_per_step",
    "share_of_max_requests",
    "query_tokens_per_step",
    "share_of_max_batch_tokens",
    "cache_used_mean",
    "cache_used_peak",
)
ENGINE_FIGURES = (*MEANS, *COUNTED)


def run_engine(engine: Engine, requests: list[tuple[list[int], int, int]], order: str) -> list[RequestState]:
    """requests: prompt ids, tokens of each sample, samples. Returns the finished samples, those of a request together.

    Raises ModelError when one fails.
    """
    waiting = [
        WaitingRequest(number, pack_ids(prompt_ids), [(SamplingParams(max_tokens, ignore_eos=True), Recipients([]))])
        for number, (prompt_ids, max_tokens, _) in enumerate(requests)
    ]
    page_tokens = engine.config.page_size if engine.manager.cache.shares_blocks else None
    leaders = []
    samples: list[RequestState] = []
    for one in arrange(waiting, order, page_tokens):
        prompt_ids, _, n = requests[one.arrival]
        params = one.members[0][0]
        own = [RequestState(len(samples) + place, list(prompt_ids), params, tag=one.arrival) for place in range(n)]
        samples += own
        leader, *leader.forks = own
        leaders.append(leader)
    for state in engine.manager.run(ListSource(leaders)):
        if state.error is not None:
            raise ModelError(f"request {state.tag + 1}: {state.error}")
    return sorted(samples, key=lambda state: state.tag)


def engine_figures(engine: Engine) -> dict[str, Any]:
    """How full the batches and the cache were, as means over steps, and what was counted."""
    log, metrics, config = engine.manager.log, engine.manager.metrics, engine.config
    requests, query_tokens = log.mean("requests"), log.mean("query_tokens")
    means = (
        requests,
        requests / config.max_requests_per_batch,
        query_tokens,
        query_tokens / config.max_batch_tokens,
        log.mean("owned_share"),
        metrics.peak_used_share,
    )
    return dict(zip(MEANS, means, strict=True)) | {name: getattr(metrics, name) for name in COUNTED}
