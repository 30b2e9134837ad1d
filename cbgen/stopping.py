"""How a job is stopped before its end: by a signal, by --time-limit, by --max-errors; and that it ends in time.

first SIGINT, SIGTERM, SIGUSR1 ─┐                  nothing new is     what had begun          what finished
--time-limit ───────────────────┼──► asked ──────► admitted ────────► goes on, until ───────► is published,
--max-errors ───────────────────┘                                     --drain-timeout nears   exit 75 or 5
second signal ──────────────────────► at once; what was published before stays
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cbgen.errors import EXIT_RESUMABLE, EXIT_SIGNALLED, UsageError

DRAIN_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
ALARM = "SIGALRM"
# Of --drain-timeout, what is left for publishing when generating ends.
PUBLISHING_SHARE = 0.2
# Before so many rows are done, a share of them that failed says nothing.
LEAST_ROWS_FOR_SHARE = 100
_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


class Stopped(KeyboardInterrupt):
    """The job ends here, before its end. No Exception, so that no library takes it for a failure of its own."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopSwitch:
    """Whether the run is to end early, and by when.

    time_limit_s: of the whole run from now on, draining included; None: no limit.
    """

    def __init__(self, drain_timeout_s: float, time_limit_s: float | None = None):
        self.on_ask: Callable[[], None] = lambda: None  # called once, from a signal handler as well
        self.exit_code = EXIT_RESUMABLE
        self.reason: str | None = None
        self._drain_timeout_s = drain_timeout_s
        self._deadline_s: float | None = None
        self._can_drain = False
        # Of the time limit, what is left for draining.
        self._limit_s = None if time_limit_s is None else time_limit_s - min(drain_timeout_s, time_limit_s / 2)

    @property
    def is_asked(self) -> bool:
        return self.reason is not None

    @property
    def is_overdue(self) -> bool:
        """Whether what has begun can wait no longer."""
        return self.is_asked and self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def ask(self, reason: str, exit_code: int = EXIT_RESUMABLE) -> None:
        """Asks the run to end; the first reason counts."""
        if self.reason is None:
            self.reason, self.exit_code = reason, exit_code
            self._deadline_s = time.monotonic() + self._drain_timeout_s * (1 - PUBLISHING_SHARE)
            self.on_ask()

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Inside, a first signal asks; outside, where nothing has begun that could be finished, it ends the run."""
        self._can_drain = True
        try:
            yield
        finally:
            self._can_drain = False

    def stopped(self) -> Stopped:
        """What ends a run that was asked to, once all that finished is published."""
        assert self.reason is not None
        return Stopped(self.reason, self.exit_code)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals turn the switch, and the time limit counts, which is a signal too.

        Only the main thread hears signals; in another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = [name for name in (*DRAIN_SIGNALS, *([ALARM] if self._limit_s else [])) if hasattr(signal, name)]
        # One that the process was started with as ignored (nohup, a shell's background) stays so.
        numbers = [n for n in (getattr(signal, name) for name in names) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        if self._limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        try:
            yield
        finally:
            if self._limit_s is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> Any:
        name = signal.Signals(number).name
        if self.reason is not None and name != ALARM:
            self._deadline_s = time.monotonic()  # nobody waits any longer, for a full disk neither
            raise Stopped(f"stopped at once by a second signal ({name})", EXIT_SIGNALLED + number)
        self.ask("--time-limit is near" if name == ALARM else name)
        if not self._can_drain:
            raise self.stopped()


class ErrorLimit:
    """--max-errors: so many failed rows, or such a share of the rows that are done, end the job."""

    def __init__(self, text: str | None):
        """Raises UsageError for what is neither "20" nor "5%"."""
        match = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
        if text is not None and (match is None or (not match[2] and "." in match[1])):
            raise UsageError(f"--max-errors {text}: a number of rows such as 100, or a share such as 5%, is expected")
        if match and match[2] and float(match[1]) > 100:
            raise UsageError(f"--max-errors {text}: a share of the rows is 100% at most")
        self._text = text
        self._number = float(match[1]) if match else 0.0
        self._is_share = bool(match and match[2])

    def exceeded(self, num_failed: int, num_done: int, at_end: bool = False) -> str | None:
        """Why the job is to end; None while it may go on. at_end: all rows are done, however few they are."""
        if self._text is None or num_failed == 0:
            return None
        if self._is_share:
            most = self._number / 100 * num_done
            over = num_failed > most and (at_end or num_done >= LEAST_ROWS_FOR_SHARE)
        else:
            over = num_failed > self._number
        return f"{num_failed} of {num_done} rows failed, --max-errors is {self._text}" if over else None


def parse_duration(option: str, text: str) -> float:
    """Seconds of "7h30m", "90", "45s", "1d", or of "HH:MM:SS" and "D-HH:MM:SS" as Slurm writes them; more than 0."""
    seconds = _seconds_in(text.strip().lower())
    if not seconds:
        raise UsageError(f"{option} {text}: a duration such as 7h30m, 90s or 07:30:00 is expected")
    return seconds


def _seconds_in(text: str) -> float | None:
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text)
    if clock:
        days, first, second, third = (int(part or 0) for part in clock.groups())
        # MM:SS or HH:MM:SS; with days HH:MM.
        hours, minutes, seconds = (first, second, third) if clock[4] or clock[1] else (0, first, second)
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if re.fullmatch(r"(?:\d+(?:\.\d+)?[dhms])+", text):
        return sum(float(n) * _UNITS_S[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([dhms])", text))
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
