"""Two passes in flight give what one gives, on a device that does everything as late and as disorderly as it may."""

import random

import pytest
import torch
from engine.mixed_requests import TINY_CACHES, Mix, mixed_requests
from engine_harness import (
    Prompt,
    assert_parity,
    greedy_requests,
    mixed_prompts,
    poisoned,
    raising,
    random_ids,
    refusing,
    run_all,
)
from staged_harness import DeferredStreams, LoggedStreams, staged_engine
from tiny_models import PARITY, ModelUnderTest

from cbgen.bench.profile import profiling
from cbgen.engine.build import Engine
from cbgen.engine.isolation import Suspect
from cbgen.engine.requests import FinishReason, RequestState, RequestStatus
from cbgen.engine.sampling_params import SamplingParams
from cbgen.engine.sources import ListSource
from cbgen.errors import ForwardPassError, PassMemoryError

WAYS = {
    "roomy": {"num_blocks": 512},
    "in pieces": {"num_blocks": 512, "max_batch_tokens": 24, "scheduler_type": "prefill_first"},
    "a tiny cache": {"max_batch_tokens": 64, "safety_margin": 0.0},
    "a tiny cache and a swap pool": {"cpu_offload_space": 0.01, "safety_margin": 0.0},
    "few at a time": {"num_blocks": 512, "max_requests_per_batch": 4},
}


def run(under_test: ModelUnderTest, mix: Mix, depth: int, seed: int, cancels: bool = False, **way: object) -> Engine:
    page_size, num_blocks = TINY_CACHES[under_test.name]
    options = {"page_size": page_size, "num_blocks": num_blocks, **way}
    engine = staged_engine(under_test, depth, DeferredStreams(seed), **options)
    run_all(engine, mix.leaders, mix.canceller(seed) if cancels else None)
    assert not engine.manager._in_flight
    return engine


def compare(under_test: ModelUnderTest, one: Mix, two: Mix) -> None:
    """Token for token, with all that comes with them."""
    for first, second in zip(one.members, two.members, strict=True):
        assert first.generated_ids == second.generated_ids, first.params
        assert (first.finish_reason, first.stop_reason) == (second.finish_reason, second.stop_reason)
        for a, b in ((first.logprobs, second.logprobs), (first.prompt_logprobs, second.prompt_logprobs)):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert len(a) == len(b)
        assert first.logprobs is None or len(first.logprobs) == first.num_generated_tokens
        assert first.prompt_logprobs is None or len(first.prompt_logprobs) == first.num_prompt_tokens - 1
        PARITY[f"{under_test.name}, depth 2 against depth 1: equal throughout"] += 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TINY_CACHES)
def test_depth_two_gives_what_depth_one_gives(request: pytest.FixtureRequest, name: str, way: str) -> None:
    """Every kind of request, on full, sliding and hybrid models, chunked, offloaded, swapped, forked, stopped."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    seed = list(WAYS).index(way)
    mixes = mixed_requests(seed), mixed_requests(seed)
    one, two = (run(under_test, mix, depth, seed, **WAYS[way]) for depth, mix in ((1, mixes[0]), (2, mixes[1])))
    compare(under_test, *mixes)
    metrics = two.manager.metrics
    assert metrics.output_tokens == one.manager.metrics.output_tokens
    assert (metrics.offloads > 0) == ("tiny" in way)
    assert (metrics.swaps > 0) == ("swap" in way)
    assert two.manager.passes._streams.num_postponed > metrics.num_steps


@pytest.mark.parametrize("seed", range(3))
def test_rows_whose_tokens_the_host_chooses(tiny_gemma3: ModelUnderTest, seed: int) -> None:
    """Those that hang on the tokens before are never launched without them, and disturb no others."""
    mixes = [mixed_requests(seed, with_processors=True) for _ in range(2)]
    for depth, mix in enumerate(mixes, start=1):
        run(tiny_gemma3, mix, depth, seed, num_blocks=512)
    compare(tiny_gemma3, *mixes)
    assert any(member.needs_host for member in mixes[0].members)


@pytest.mark.parametrize("name", TINY_CACHES)
def test_who_is_cancelled_in_flight_leaves_no_trace(request: pytest.FixtureRequest, name: str) -> None:
    """The laws hold after every step, and those who stay get what they would have got."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    alone, disturbed = (mixed_requests(21, with_processors=True) for _ in range(2))
    run(under_test, alone, 1, 21)
    run(under_test, disturbed, 2, 21, cancels=True)
    cancelled = [member.error == "cancelled" for member in disturbed.members]
    assert 0 < sum(cancelled) < len(cancelled)
    for gone, before, after in zip(cancelled, alone.members, disturbed.members, strict=True):
        assert gone or after.generated_ids == before.generated_ids


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_parity_with_generate(request: pytest.FixtureRequest, name: str) -> None:
    """Law 9, for passes that overlap: prompts in pieces, and ends that nobody foresees."""
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    prompts = mixed_prompts(24, 320, longest=90, seed=5)
    engine = staged_engine(under_test, page_size=16, max_batch_tokens=40, max_requests_per_batch=6)
    assert_parity(under_test, prompts, run_all(engine, greedy_requests(prompts)))


def test_the_order_of_the_timeline(tiny_llama: ModelUnderTest) -> None:
    """What is drawn in async_batching.py: inputs of a pass go out while the one before is computed, whose tokens come
    back after that, and the host waits for nothing else."""
    expected: list[str] = []

    def drawn(what: str) -> None:
        expected.extend(line.strip() for line in what.strip().splitlines())

    drawn("""
        transfer send
        transfer event 1
        compute waits for 1
        compute replay
        compute event 2
    """)
    for number in range(1, 4):  # pass `number` is launched, and then the one before it is read
        sent, done, done_before, read = 3 * number, 3 * number + 1, 3 * number - 2 + (number == 1), 3 * number + 2
        drawn(f"""
            transfer send
            transfer event {sent}
            compute waits for {sent}
            compute replay
            compute event {done}
            transfer waits for {done_before}
            transfer send_back
            transfer event {read}
            host waits for {read}
        """)
    drawn("""
        transfer waits for 10
        transfer send_back
        transfer event 12
        host waits for 12
    """)
    streams = LoggedStreams()
    engine = staged_engine(tiny_llama, depth=2, streams=streams, page_size=16, max_requests_per_batch=2)
    prompts = [Prompt([5], 4), Prompt([8], 4)]
    streams.restart()
    run_all(engine, greedy_requests(prompts))
    assert streams.log == expected


def test_a_row_that_is_drawn_sends_its_choice_apart(tiny_llama: ModelUnderTest) -> None:
    """After the pass was started, and before its tokens are chosen on the device."""
    streams = LoggedStreams()
    engine = staged_engine(tiny_llama, depth=2, streams=streams, page_size=16, max_requests_per_batch=2)
    streams.restart()
    run_all(engine, [RequestState(0, [5], SamplingParams(1, temperature=1.0, seed=3))])
    assert streams.log == [
        "transfer send",
        "transfer event 1",
        "compute waits for 1",
        "compute replay",
        "compute event 2",
        "transfer send",
        "transfer event 3",
        "compute waits for 3",
        "compute choose",
        "compute event 4",
        "transfer waits for 4",
        "transfer send_back",
        "transfer event 5",
        "host waits for 5",
    ]


def test_one_pass_at_a_time_is_waited_for(tiny_llama: ModelUnderTest) -> None:
    """At depth 1 the host reads a pass before it lays out the next, and chooses its tokens itself."""
    streams = LoggedStreams()
    engine = staged_engine(tiny_llama, depth=1, streams=streams, page_size=16, max_requests_per_batch=2)
    streams.restart()
    run_all(engine, greedy_requests([Prompt([5], 2)]))
    one = ["transfer send", "transfer event {}", "compute waits for {}", "compute replay", "compute event {}"]
    expected = [line.format(number) for number, line in zip([1, 1, 1, 1, 2], one, strict=True)]
    expected += ["host waits for 2"]
    expected += [line.format(number) for number, line in zip([3, 3, 3, 3, 4], one, strict=True)]
    assert streams.log == [*expected, "host waits for 4"]


def test_ends_by_length_are_foreseen(tiny_llama: ModelUnderTest) -> None:
    """Nothing is computed for a request that has all its tokens; one that meets its end unforeseen costs one token."""
    prompts = [Prompt(random_ids(5, seed=number), 6) for number in range(4)]
    engine = staged_engine(tiny_llama, page_size=16)
    requests = greedy_requests(prompts)
    for request in requests:
        request.params = SamplingParams(6, ignore_eos=True)
    run_all(engine, requests)
    assert engine.manager.log.total("query_tokens") == pytest.approx(4 * (5 + 5))
    stopped = staged_engine(tiny_llama, page_size=16)
    third = requests[0].generated_ids[2]
    assert third not in requests[0].generated_ids[:2]
    request = RequestState(0, random_ids(5, seed=0), SamplingParams(6, ignore_eos=True, stop_token_ids=[third]))
    run_all(stopped, [request])
    assert request.generated_ids == requests[0].generated_ids[:3]
    assert request.finish_reason is FinishReason.STOP
    metrics = stopped.manager.metrics
    assert metrics.output_tokens == 3
    assert metrics.num_steps == 4  # the last of them for nobody
    assert request.num_computed_tokens == 5 + 2


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 4, "seed": 1}])
def test_a_row_that_is_not_finite_ends_as_an_error(tiny_gemma3: ModelUnderTest, options: dict[str, float]) -> None:
    """Its logits are NaN two passes long, and what is chosen from them, or drawn, is a token that the model has; its
    neighbours are as they would be without it."""
    under_test = poisoned(tiny_gemma3)
    prompts = [Prompt([2, 9, 9], 5), *mixed_prompts(6, 320, longest=40, seed=3)]
    requests = greedy_requests(prompts)
    requests[0].params = SamplingParams(5, **options)
    run_all(staged_engine(under_test, page_size=16), requests)
    assert "not finite" in (requests[0].error or "")
    assert_parity(under_test, prompts[1:], requests[1:])


def test_a_pass_that_fails_while_another_is_in_flight(tiny_llama: ModelUnderTest) -> None:
    """The guilty one is found and ends as an error; nobody else loses a token."""
    under_test = refusing(tiny_llama)
    prompts = [*mixed_prompts(6, 320, longest=40, seed=4), Prompt([*random_ids(30, seed=1), 2], 5)]
    notes: list[str] = []
    engine = staged_engine(
        under_test, streams=LoggedStreams(), notify=notes.append, page_size=16, max_batch_tokens=48, graphs=False
    )
    requests = run_all(engine, greedy_requests(prompts))
    assert "no token 2" in (requests[-1].error or "")
    assert_parity(under_test, prompts[:-1], requests[:-1])
    assert engine.manager.metrics.forward_failures > 0
    assert len(notes) == 1


def test_memory_that_runs_out_in_flight_makes_passes_smaller(tiny_gemma3: ModelUnderTest) -> None:
    """Large passes never fit: budgets are halved, and every row comes out."""

    def error_of(input_ids: torch.Tensor) -> Exception | None:
        return torch.OutOfMemoryError("out of memory") if input_ids.shape[1] > 16 else None

    under_test = raising(tiny_gemma3, error_of)
    prompts = mixed_prompts(6, 320, longest=40, seed=6)
    engine = staged_engine(under_test, streams=LoggedStreams(), page_size=16, max_batch_tokens=64, graphs=False)
    requests = run_all(engine, greedy_requests(prompts))
    assert_parity(under_test, prompts, requests)
    assert engine.manager.metrics.budget_shrinks > 0


def test_rings_of_many_pages(tiny_mistral: ModelUnderTest) -> None:
    """A table is as wide as the window, however short the requests are."""
    prompts = mixed_prompts(8, 320, longest=40, seed=7)
    engine = staged_engine(tiny_mistral, page_size=1, num_blocks=4096)
    assert engine.plan.layout.groups[0].max_blocks == 24
    assert_parity(tiny_mistral, prompts, run_all(engine, greedy_requests(prompts)))


def test_a_fork_that_began_in_flight_may_have_to_leave(tiny_llama: ModelUnderTest) -> None:
    """It is none of those who are tried by themselves, and these need its room."""
    engine = staged_engine(
        tiny_llama, page_size=16, num_blocks=3, max_batch_tokens=20, safety_margin=0.0, cpu_offload_space=0.01
    )
    manager = engine.manager
    params = SamplingParams(4, ignore_eos=True)
    first, parent = RequestState(0, random_ids(15, 1), params), RequestState(1, random_ids(32, 2), params)
    fork = RequestState(2, list(parent.token_ids), params)
    parent.forks = [fork]
    tried: list[None] = []

    def suspect(_: object) -> None:
        if fork.status is RequestStatus.PREFILLING and not tried:
            tried.append(None)
            manager._recovery.suspects._groups.append({r.request_id: Suspect(r, 999) for r in (first, parent)})
        elif tried and fork.num_departures:
            manager._recovery.suspects._groups.clear()

    run_all(engine, [first, parent], suspect)
    alone = staged_engine(tiny_llama, depth=1, page_size=16)
    for request in (first, parent):
        (expected,) = run_all(alone, [RequestState(0, request.token_ids[: request.num_prompt_tokens], params)])
        assert request.generated_ids == expected.generated_ids
    assert fork.generated_ids == parent.generated_ids
    assert tried
    assert fork.num_departures > 1, "it was moved out, and finished"


def test_a_pass_that_nobody_reads_keeps_its_buffers(tiny_gemma3: ModelUnderTest) -> None:
    """It was launched, and then something failed: the next pass but one waits for it, before it takes its place."""
    engine = staged_engine(tiny_gemma3, streams=DeferredStreams(5), page_size=16, max_batch_tokens=40)
    passes, fails = engine.manager.passes, iter([False] * 5 + [True] + [False] * 7 + [True])
    plain = passes.choose

    def choose(launched: object, rows: list[int], requests: list[RequestState]) -> None:
        if next(fails, False):
            raise PassMemoryError("no room to choose in")
        plain(launched, rows, requests)

    passes.choose = choose
    prompts = mixed_prompts(20, 320, longest=60, seed=10)
    requests = run_all(engine, greedy_requests(prompts))
    assert_parity(tiny_gemma3, prompts, requests)
    assert engine.manager.metrics.budget_shrinks == 2


def test_who_started_over_is_not_acquitted_by_what_was_launched_before(tiny_llama: ModelUnderTest) -> None:
    """A pass that cannot be read is looked into as at depth 1: as few passes fail for it."""
    failures = []
    for depth in (1, 2):
        engine = staged_engine(tiny_llama, depth, LoggedStreams(), page_size=16, max_requests_per_batch=8)
        manager, passes = engine.manager, engine.manager.passes
        requests = [RequestState(n, random_ids(6, n), SamplingParams(30, ignore_eos=True)) for n in range(6)]
        plain = passes.read

        def read(launched: object, plain=plain, first=requests[0]) -> object:
            found = plain(launched)
            if first in launched.requests and first.num_computed_tokens < 10 <= first.num_planned_tokens:
                raise ForwardPassError("no tenth token")
            return found

        passes.read = read
        run_all(engine, requests)
        assert [request.error for request in requests] == ["no tenth token", *[None] * 5]
        failures.append(manager.metrics.forward_failures)
    assert failures[1] <= failures[0] + 1


def test_a_job_that_stops_leaves_nothing_in_flight(tiny_llama: ModelUnderTest) -> None:
    """All who had begun have ended, and those who had not are forgotten."""
    engine = staged_engine(tiny_llama, page_size=16, max_requests_per_batch=2)
    manager = engine.manager
    source = ListSource([RequestState(n, random_ids(4, n), SamplingParams(3)) for n in range(8)])
    manager.pull(source)
    manager.step()
    for request in manager.scheduler.active:
        manager.cancel(request)
    assert manager._in_flight, "others wait, for whom more will be launched"
    manager.stop_admitting()
    assert not manager._in_flight
    assert not manager.cache.holders


def test_what_is_left_in_flight_is_collected(tiny_llama: ModelUnderTest) -> None:
    """Cancelling the last one leaves nothing launched behind, and the engine serves others."""
    engine = staged_engine(tiny_llama, page_size=16)
    manager = engine.manager
    (request,) = greedy_requests([Prompt([5, 6, 7], 20)])
    manager.pull(ListSource([request]))
    for _ in range(3):
        manager.step()
    assert manager._in_flight
    manager.cancel(request)
    assert not manager._in_flight
    assert not manager.cache.holders
    prompts = mixed_prompts(3, 320, longest=20, seed=9)
    assert_parity(tiny_llama, prompts, run_all(engine, greedy_requests(prompts, first_id=1)))


@pytest.mark.parametrize("records", [True, False])
def test_watched_passes_run_one_at_a_time(tiny_llama: ModelUnderTest, records: bool) -> None:
    """As whoever times them needs it; afterwards they overlap as before."""
    engine = staged_engine(tiny_llama, page_size=16)
    passes, prompts = engine.manager.passes, mixed_prompts(6, 320, longest=40, seed=2)
    in_flight: list[int] = []
    with passes.watched(records):
        requests = run_all(engine, greedy_requests(prompts), lambda m: in_flight.append(len(m._in_flight)))
    assert_parity(tiny_llama, prompts, requests)
    assert not any(in_flight)
    assert (engine.manager.passes.graphs.num_replayed > 0) == records
    again = run_all(engine, greedy_requests(prompts, first_id=6), lambda m: in_flight.append(len(m._in_flight)))
    assert_parity(tiny_llama, prompts, again)
    assert max(in_flight) == 1
    assert engine.manager.passes.graphs.num_replayed > 0


def test_a_profile_sees_every_pass(tiny_llama: ModelUnderTest) -> None:
    """Replays would hide what is in them, and passes in flight would be counted to the wrong part."""
    engine = staged_engine(tiny_llama, page_size=16, streams=LoggedStreams())
    prompts = mixed_prompts(6, 320, longest=40, seed=2)
    with profiling(engine, tiny_llama.model, tiny_llama.shape, torch.device("cpu")) as profiler:
        requests = run_all(engine, greedy_requests(prompts))
    assert_parity(tiny_llama, prompts, requests)
    assert all(seconds > 0 for seconds in profiler.seconds.values())
    assert engine.manager.passes.graphs.num_replayed == 0


def test_a_text_is_scored_over_static_buffers(tiny_gemma3: ModelUnderTest) -> None:
    """In pieces, as the reference has its logits."""
    ids = random_ids(90, seed=2)
    engine = staged_engine(tiny_gemma3, page_size=16, max_batch_tokens=40)
    found = torch.cat(list(engine.manager.score(ids)))
    with torch.inference_mode():
        expected = tiny_gemma3.reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_mixes(request: pytest.FixtureRequest, seed: int) -> None:
    """Many of them, in random ways, some with cancellations."""
    name = list(TINY_CACHES)[seed % 3]
    under_test: ModelUnderTest = request.getfixturevalue(f"tiny_{name}")
    rng = random.Random(seed)
    way = {
        "max_batch_tokens": rng.choice([24, 64, 512]),
        "num_blocks": rng.choice([TINY_CACHES[name][1], 512]),
        "cpu_offload_space": rng.choice([0.0, 0.01]),
        "safety_margin": rng.choice([0.0, 0.15]),
        "scheduler_type": rng.choice(["fifo", "prefill_first"]),
        "max_requests_per_batch": rng.choice([4, 9, 64]),
    }
    mixes = [mixed_requests(seed, with_processors=seed % 3 == 0) for _ in range(2)]
    cancels = seed % 4 == 1
    for depth, mix in enumerate(mixes, start=1):
        run(under_test, mix, depth, seed, cancels and depth == 2, **way)
    kept = [place for place, member in enumerate(mixes[1].members) if member.error is None]
    compare(under_test, *(Mix([], [mix.members[place] for place in kept]) for mix in mixes))
