"""Who shares a request: rows join until it is settled, and no more of them wait than may."""

import threading
from typing import Any

from cbgen.duplicates import Duplicates, Recipients, RowTag, generation_key
from cbgen.engine.sampling_params import SamplingParams
from cbgen.ordering import pack_ids

GREEDY = SamplingParams(max_tokens=8)
KEY = generation_key(pack_ids([1, 2]), GREEDY)
assert KEY is not None


def tags(first: int, count: int = 1) -> list[RowTag]:
    return [RowTag(bytes([n]), n, 0) for n in range(first, first + count)]


def test_a_key_holds_what_a_greedy_result_hangs_on() -> None:
    """Token ids, max_tokens and ignore_eos; neither the filters of sampling nor a seed or n; sampled rows have none."""
    ids = pack_ids([1, 2])
    assert generation_key(ids, SamplingParams(8, top_p=0.5, top_k=3, min_p=0.5, seed=9, n=4)) == KEY
    others = [
        generation_key(pack_ids([2, 1]), GREEDY),
        generation_key(pack_ids([1]), GREEDY),
        generation_key(ids, SamplingParams(9)),
        generation_key(ids, SamplingParams(8, ignore_eos=True)),
    ]
    assert len({KEY, *others}) == 5
    assert generation_key(ids, SamplingParams(8, temperature=1e-9)) is None


OTHERS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 2},
    "bad_words": "x",
    "stop": "x",
    "stop_token_ids": 3,
    "include_stop": True,
    "min_tokens": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "skip_special_tokens": False,
    "json_schema": {"type": "object"},
    "regex": "x",
    "choice": ["x"],
    "grammar": "x",
}


def test_what_changes_a_result_or_what_is_told_of_it_is_not_shared() -> None:
    """Each such parameter gives a key of its own, however it is written."""
    ids = pack_ids([1, 2])
    keys = [generation_key(ids, GREEDY.updated(**{name: value})) for name, value in OTHERS.items()]
    assert len({KEY, *keys}) == len(OTHERS) + 1
    assert generation_key(ids, GREEDY.updated(stop=["x", "x"], seed=4)) in keys


def test_rows_join_until_the_request_is_settled() -> None:
    """Then the next one makes a request of its own."""
    duplicates = Duplicates()
    recipients = duplicates.join(KEY, tags(0, 2))
    assert recipients is not None
    assert duplicates.join(KEY, tags(2)) is None
    assert duplicates.num_rows == 2
    assert duplicates.settle(recipients) == tags(0, 3)
    assert duplicates.num_rows == 0
    again = duplicates.join(KEY, tags(3))
    assert again is not None
    assert duplicates.settle(again) == tags(3)


def test_a_request_that_nobody_may_join_is_settled_too() -> None:
    """That of a sampled row."""
    assert Duplicates().settle(Recipients(tags(0))) == tags(0)


def test_room_comes_with_settling_or_with_the_end() -> None:
    """Who waits for room goes on when rows were settled; False once it is closed."""
    duplicates = Duplicates(max_rows=2)
    recipients = duplicates.join(KEY, tags(0, 2))
    assert recipients is not None
    assert duplicates.wait_for_room()
    duplicates.join(KEY, tags(2))
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(duplicates.wait_for_room()))
    waiter.start()
    assert not answers, "two rows wait, as many as may"
    duplicates.settle(recipients)
    waiter.join(60)
    assert answers == [True]
    duplicates.close()
    assert not duplicates.wait_for_room()
