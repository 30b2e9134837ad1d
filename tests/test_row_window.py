"""What gathers between reader and engine: when it is put in order, when it is handed over, what bounds it."""

import threading

import pytest

from cbgen.duplicates import Recipients
from cbgen.engine.sampling_params import SamplingParams
from cbgen.ordering import WaitingRequest, arrange, pack_ids
from cbgen.row_window import RowWindow, WindowLimits

FOREVER_S = 1e6


def requests(*max_tokens: int, prompt_tokens: int = 1) -> list[WaitingRequest]:
    ids = pack_ids([1] * prompt_tokens)
    return [WaitingRequest(n, ids, [(SamplingParams(length), Recipients([]))]) for n, length in enumerate(max_tokens)]


def window(**limits: float) -> RowWindow:
    """One that puts the longest first and, unless told otherwise, waits for ever until a lot is complete."""
    made = RowWindow(WindowLimits(**{"patience_s": FOREVER_S, **limits}))  # type: ignore[arg-type]
    made.arrange = lambda lot: arrange(lot, "longest-first", None)
    return made


def lengths(taken: list[WaitingRequest]) -> list[int]:
    return [request.members[0][0].max_tokens for request in taken]


def test_an_input_that_fits_is_put_in_order_as_a_whole() -> None:
    """Nothing is handed over before the end is there; then all of it in order, in as many pieces as asked for."""
    rows = window()
    rows.add(requests(2, 5))
    assert rows.wait_for_first()
    assert rows.take(10, wait=False) == []
    rows.add(requests(9, 1))
    rows.end()
    assert not rows.exhausted
    assert lengths(rows.take(3, wait=True)) == [9, 5, 2]
    assert lengths(rows.take(3, wait=True)) == [1]
    assert rows.exhausted
    assert rows.take(3, wait=True) == []


@pytest.mark.parametrize("limits", [{"max_requests": 3}, {"max_prompt_tokens": 30}])
def test_a_full_window_is_handed_over_and_the_next_one_gathers_meanwhile(limits: dict[str, float]) -> None:
    """Full by requests or by tokens of prompts; the next is put in order when the last one has been taken."""
    rows = window(**limits)
    rows.add(requests(1, 2, prompt_tokens=10))
    assert rows.take(10, wait=False) == []
    rows.add(requests(3, prompt_tokens=10))
    assert lengths(rows.take(1, wait=False)) == [3]
    assert rows.wait_for_room()
    rows.add(requests(7, 8, 9, prompt_tokens=10))
    assert lengths(rows.take(10, wait=False)) == [2, 1, 9, 8, 7]


def test_who_adds_waits_while_a_window_is_full() -> None:
    """Until the engine begins with it, or the window is closed."""
    rows, answers = window(max_requests=2), []
    rows.add(requests(1, 2))
    waiter = threading.Thread(target=lambda: answers.append(rows.wait_for_room()))
    waiter.start()
    assert not answers
    rows.take(1, wait=True)
    waiter.join(60)
    assert answers == [True]
    rows.add(requests(3, 4))
    waiter = threading.Thread(target=lambda: answers.append(rows.wait_for_room()))
    waiter.start()
    rows.close()
    waiter.join(60)
    assert answers == [True, False]


def test_without_patience_what_is_there_is_handed_over() -> None:
    """A slow reader does not hold up the engine for a window that will not fill; what comes later follows."""
    rows = window(patience_s=0)
    rows.add(requests(1, 2))
    assert lengths(rows.take(10, wait=False)) == [2, 1]
    assert rows.take(10, wait=False) == []
    late = threading.Thread(target=lambda: rows.add(requests(5)))
    late.start()
    assert lengths(rows.take(10, wait=True)) == [5]
    late.join()


def test_patience_ends() -> None:
    """An engine that waits gets what there is, with nothing more added to wake it."""
    rows = window(patience_s=0.05)
    rows.add(requests(1, 2))
    assert lengths(rows.take(10, wait=True)) == [2, 1]


def test_an_empty_input() -> None:
    """There is no first request, and nothing to take."""
    rows = window()
    rows.end()
    assert not rows.wait_for_first()
    assert rows.exhausted
    assert rows.take(1, wait=True) == []


def test_a_failure_is_raised_by_whoever_comes_next() -> None:
    """Whatever was gathered before it; and a window that failed is not exhausted."""
    rows = window()
    rows.add(requests(1))
    rows.end(OSError("gone"))
    assert not rows.exhausted
    for call in (lambda: rows.take(1, wait=False), lambda: rows.take(1, wait=True), rows.wait_for_first):
        with pytest.raises(OSError, match="gone"):
            call()


def test_stopping_ends_it_for_everyone() -> None:
    """Who waits for requests, for room or for the first one is let go, and nothing that was gathered is handed over."""
    waits = {
        "take": (window(), lambda rows: rows.take(1, wait=True), []),
        "first": (window(), lambda rows: rows.wait_for_first(), False),
        "room": (window(max_requests=1), lambda rows: rows.wait_for_room(), False),
    }
    for name, (rows, wait, expected) in waits.items():
        if name != "first":
            rows.add(requests(1))
        answers: list[object] = []
        waiter = threading.Thread(target=lambda wait=wait, rows=rows, answers=answers: answers.append(wait(rows)))
        waiter.start()
        rows.stop()
        waiter.join(60)
        assert answers == [expected], name
        assert rows.exhausted
        assert rows.take(1, wait=True) == rows.take(1, wait=False) == []


def test_what_fails_after_stopping_is_not_raised() -> None:
    """The run ends for the reason that it was stopped for."""
    rows = window()
    rows.stop()
    rows.end(OSError("gone"))
    assert rows.take(1, wait=True) == []
    assert not rows.wait_for_first()
    assert rows.exhausted
