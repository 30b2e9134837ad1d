"""The end of a job: new requests wait so that the batch stays evenly filled until the longest is done."""

import random

from engine_harness import Prompt, engine_for, greedy_requests, random_ids, run_all
from tiny_models import ModelUnderTest

from cbgen.engine.manager import Manager
from cbgen.engine.requests import RequestState
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.engine.tail import MIN_ACTIVE_AT_END, active_at_end, passes_needed

LONGEST, NUM_REQUESTS = 48, 100
ROOMY = {"max_requests_per_batch": 100, "max_batch_tokens": 1024}


def mixed_prompts() -> list[Prompt]:
    """A hundred short prompts, four of which ask for many tokens, the longest first."""
    rng = random.Random(0)
    lengths = sorted([LONGEST] * 4 + [rng.randint(2, 20) for _ in range(NUM_REQUESTS - 4)], reverse=True)
    return [Prompt(random_ids(rng.randint(2, 12), seed=n), length) for n, length in enumerate(lengths)]


def run_counting(under_test: ModelUnderTest, balance_tail: bool) -> tuple[list[list[int]], list[int]]:
    """Generated ids, and how many requests were active after each step; end-of-sequence tokens count like others."""
    engine = engine_for(under_test, balance_tail=balance_tail, **ROOMY)
    requests = greedy_requests(mixed_prompts())
    for request in requests:
        request.params = SamplingParams(request.params.max_tokens, ignore_eos=True)
    active: list[int] = []
    run_all(engine, requests, lambda manager: active.append(manager.scheduler.num_active))
    return [request.generated_ids for request in requests], active


def test_requests_are_held_back_and_nothing_takes_longer(tiny_llama: ModelUnderTest) -> None:
    """No more are active than make all last as long as the longest; rows are the same, in hardly more steps."""
    held, active = run_counting(tiny_llama, balance_tail=True)
    at_once, all_active = run_counting(tiny_llama, balance_tail=False)
    assert held == at_once
    limit = active_at_end([], [prompt.max_tokens for prompt in mixed_prompts()])
    assert limit < NUM_REQUESTS, "otherwise nothing would be held back"
    assert max(active) == limit
    assert max(all_active) == NUM_REQUESTS
    assert len(active) <= len(all_active) + 2


class Endless(ListSource):
    """A source that never says that nothing more will come, until told to."""

    ended = False

    @property
    def exhausted(self) -> bool:
        return self.ended and super().exhausted


def test_nothing_is_held_back_while_more_may_come(tiny_llama: ModelUnderTest) -> None:
    """What is still unread may be long: only a known end can be balanced."""
    manager = engine_for(tiny_llama, **ROOMY).manager
    source = Endless(greedy_requests(mixed_prompts()))
    manager.pull(source)
    manager.step()
    assert manager.scheduler.num_active == NUM_REQUESTS
    source.ended = True
    drain(manager, source)


def test_samples_of_a_waiting_request_count(tiny_llama: ModelUnderTest) -> None:
    """What forks will generate is to be shared out too: with three more samples each, four times as many may run."""
    most = []
    for num_forks in (0, 3):
        manager = engine_for(tiny_llama, max_requests_per_batch=300, max_batch_tokens=1024).manager
        leaders = [RequestState(n, random_ids(4, seed=n), SamplingParams(80 if n == 0 else 40)) for n in range(60)]
        for number, leader in enumerate(leaders):
            leader.forks = [
                RequestState(1000 + 10 * number + fork, list(leader.token_ids), leader.params)
                for fork in range(num_forks)
            ]
        source = ListSource(leaders)
        active = []
        while manager.scheduler.has_work or not source.exhausted:
            for request in [*manager.pull(source), *manager.step()]:
                assert request.error is None
            active.append(manager.scheduler.num_active)
        most.append(max(active))
    assert most[0] < 60
    assert 100 < most[1] < 240


def test_places_are_the_fewest_that_take_no_longer() -> None:
    """Against trying every number of places, on small random cases; equal lengths all start at once."""
    rng = random.Random(1)
    for _ in range(200):
        active = [rng.randint(1, 30) for _ in range(rng.randint(0, 60))]
        waiting = sorted((rng.randint(1, 40) for _ in range(rng.randint(1, 80))), reverse=True)
        places = active_at_end(active, waiting)
        longest = max(active + waiting)
        least = max(len(active), MIN_ACTIVE_AT_END)
        assert places >= least
        assert passes_needed(active, waiting, places) <= longest
        if places > least:
            assert passes_needed(active, waiting, places - 1) > longest
    assert active_at_end([], [64] * 128) == 128
    assert active_at_end([32] * 60, [64] * 68) == 128


def drain(manager: Manager, source: ListSource) -> None:
    for request in manager.run(source):
        assert request.error is None
