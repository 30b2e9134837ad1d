"""Who shares a request: rows join until it is settled, and no more of them wait than may."""

import threading

from cbgen.duplicates import Duplicates, Recipients, RowTag, generation_key
from cbgen.engine.requests import SamplingParams
from cbgen.ordering import pack_ids

GREEDY = SamplingParams(max_tokens=8)
KEY = generation_key(pack_ids([1, 2]), GREEDY)
assert KEY is not None


def tags(first: int, count: int = 1) -> list[RowTag]:
    return [RowTag(bytes([n]), n, 0) for n in range(first, first + count)]


def test_a_key_holds_what_a_greedy_result_hangs_on() -> None:
    """Token ids, max_tokens and ignore_eos; neither the filters of sampling nor a seed; sampled rows have none."""
    ids = pack_ids([1, 2])
    assert generation_key(ids, SamplingParams(8, top_p=0.5, top_k=3, seed=9)) == KEY
    others = [
        generation_key(pack_ids([2, 1]), GREEDY),
        generation_key(pack_ids([1]), GREEDY),
        generation_key(ids, SamplingParams(9)),
        generation_key(ids, SamplingParams(8, ignore_eos=True)),
    ]
    assert len({KEY, *others}) == 5
    assert generation_key(ids, SamplingParams(8, temperature=1e-9)) is None


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
