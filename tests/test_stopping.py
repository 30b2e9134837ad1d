"""What ends a job before its end: the switch, the limit of failed rows, and how durations are written."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cbgen.errors import EXIT_RESUMABLE, EXIT_SIGNALLED, EXIT_TOO_MANY_FAILED, UsageError
from cbgen.stopping import DRAIN_SIGNALS, ErrorLimit, Stopped, StopSwitch, parse_duration

FOREVER_S = 1e9


@contextmanager
def _heard(number: int) -> Iterator[None]:
    """A test run may have been started with the signal ignored; inside, it is not."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_switch_that_nobody_turned() -> None:
    """The run goes on."""
    switch = StopSwitch(0.0)
    assert (switch.is_asked, switch.is_overdue, switch.reason) == (False, False, None)


def test_the_first_reason_counts() -> None:
    """With its exit code; who is to be told is told once."""
    switch, told = StopSwitch(FOREVER_S), []
    switch.on_ask = lambda: told.append(switch.reason)
    switch.ask("too many failed", EXIT_TOO_MANY_FAILED)
    switch.ask("SIGTERM")
    assert (switch.is_asked, switch.reason, switch.exit_code) == (True, "too many failed", EXIT_TOO_MANY_FAILED)
    assert told == ["too many failed"]
    stopped = switch.stopped()
    assert (str(stopped), stopped.exit_code) == ("too many failed", EXIT_TOO_MANY_FAILED)


@pytest.mark.parametrize(("drain_timeout_s", "overdue"), [(0.0, True), (FOREVER_S, False)])
def test_what_has_begun_may_go_on_for_the_drain_timeout(drain_timeout_s: float, overdue: bool) -> None:
    """Counted from when the run was asked to end."""
    switch = StopSwitch(drain_timeout_s)
    assert not switch.is_overdue
    switch.ask("SIGTERM")
    assert switch.is_overdue == overdue


@pytest.mark.parametrize("name", [name for name in DRAIN_SIGNALS if hasattr(signal, name)])
def test_a_first_signal_asks_and_a_second_one_ends_at_once(name: str) -> None:
    """While rows are generated; the second one with 128 and its number."""
    switch, number = StopSwitch(FOREVER_S), getattr(signal, name)
    with _heard(number), switch.listening(), switch.draining():
        signal.raise_signal(number)
        assert (switch.reason, switch.exit_code) == (name, EXIT_RESUMABLE)
        with pytest.raises(Stopped, match="second signal") as caught:
            signal.raise_signal(number)
        assert caught.value.exit_code == EXIT_SIGNALLED + number


def test_a_signal_before_anything_has_begun_ends_the_run() -> None:
    """Nothing is there that could be finished; the same command goes on."""
    switch = StopSwitch(FOREVER_S)
    with _heard(signal.SIGTERM), switch.listening():
        with pytest.raises(Stopped, match="SIGTERM") as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.exit_code == EXIT_RESUMABLE


def test_a_signal_after_a_drain_ends_the_run() -> None:
    """Once rows are no longer generated a first signal does not wait either."""
    switch = StopSwitch(FOREVER_S)
    with _heard(signal.SIGTERM), switch.listening():
        with switch.draining():
            pass
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_handlers_are_given_back() -> None:
    """Whatever was there before is there after, and one that was ignored was never heard."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    known = signal.getsignal(signal.SIGTERM)
    try:
        switch = StopSwitch(FOREVER_S)
        with switch.listening():
            assert signal.getsignal(signal.SIGTERM) != known
            signal.raise_signal(signal.SIGUSR1)
            assert not switch.is_asked
        assert signal.getsignal(signal.SIGTERM) == known
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_listens_to_no_signals() -> None:
    """Python allows it to the main thread only; the job runs all the same."""
    known, entered = signal.getsignal(signal.SIGTERM), []

    def listen() -> None:
        with StopSwitch(FOREVER_S).listening():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(60)
    assert entered == [known]


def test_the_time_limit_asks() -> None:
    """Before it is over, so that what has begun can be finished within it."""
    asked = threading.Event()
    switch = StopSwitch(0.01, time_limit_s=0.05)
    switch.on_ask = asked.set
    with switch.listening(), switch.draining():
        assert asked.wait(60)
    assert (switch.reason, switch.exit_code) == ("--time-limit is near", EXIT_RESUMABLE)


def test_a_time_limit_that_was_not_reached_asks_nobody() -> None:
    """Its clock ends with the run, and the alarm is whose it was."""
    before = signal.getsignal(signal.SIGALRM)
    switch = StopSwitch(0.0, time_limit_s=FOREVER_S / 1000)
    with switch.listening():
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before
    assert not switch.is_asked


def test_the_time_limit_is_no_second_signal() -> None:
    """A run that drains already goes on doing so when its time is up; before anything has begun, it ends the run."""
    switch = StopSwitch(FOREVER_S, time_limit_s=FOREVER_S)
    with switch.listening(), switch.draining():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGALRM)
        assert switch.reason == "SIGTERM"
    switch = StopSwitch(FOREVER_S, time_limit_s=FOREVER_S)
    with switch.listening(), pytest.raises(Stopped, match="--time-limit is near"):
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize(
    ("text", "num_failed", "num_done", "exceeded"),
    [
        (None, 1000, 1000, False),
        ("0", 0, 1000, False),
        ("0", 1, 1, True),
        ("5", 5, 5, False),
        ("5", 6, 1000, True),
        (" 5 ", 6, 1000, True),
        ("5%", 5, 100, False),
        ("5%", 6, 100, True),
        ("5%", 99, 99, False),
        ("5%", 49, 1000, False),
        ("5%", 51, 1000, True),
        ("0.5%", 5, 1000, False),
        ("0.5%", 6, 1000, True),
        ("0%", 1, 100, True),
        ("0%", 0, 100, False),
    ],
)
def test_how_many_rows_may_fail(text: str | None, num_failed: int, num_done: int, exceeded: bool) -> None:
    """So many, or such a share once it says something; the reason names both numbers and the option."""
    reason = ErrorLimit(text).exceeded(num_failed, num_done)
    assert (reason is not None) == exceeded
    if reason is not None and text is not None:
        assert reason == f"{num_failed} of {num_done} rows failed, --max-errors is {text}"


@pytest.mark.parametrize("text", ["", "many", "-1", "5.5", "%", "5 %", "1e3", "5%%", "nan", "inf%"])
def test_what_is_no_number_of_failed_rows_is_refused(text: str) -> None:
    """In one line that names the option, the text and what is expected."""
    _refused(lambda: ErrorLimit(text), f"--max-errors {text}: ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("90s", 90),
        ("7h30m", 27_000),
        ("1d", 86_400),
        ("1d2h3m4s", 93_784),
        ("0.5h", 1800),
        ("7H30M", 27_000),
        (" 90 ", 90),
        ("07:30:00", 27_000),
        ("2:00", 120),
        ("90:00", 5400),
        ("1-12:00", 129_600),
        ("1-12:00:01", 129_601),
        ("100:00:00", 360_000),
    ],
)
def test_how_long_may_be_written(text: str, seconds: float) -> None:
    """In units, in seconds, or as Slurm writes it."""
    assert parse_duration("--time-limit", text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0s",
        "soon",
        "-5",
        "h",
        "7h30",
        "1h 30m",
        "1:2:3",
        "1:2",
        "5w",
        "1e3",
        "nan",
        "inf",
        "1-2",
        "1:00:00:00",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    """In one line that names the option, the text and what is expected."""
    _refused(lambda: parse_duration("--time-limit", text), f"--time-limit {text}: ")


def _refused(call: Callable[[], object], beginning: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert str(caught.value).startswith(beginning)
    assert "is expected" in str(caught.value)
    assert "\n" not in str(caught.value)
