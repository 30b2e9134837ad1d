"""Figures as people read them."""

import math
from datetime import datetime, timezone

_NO_BREAK = "\u202f"
NONE = "–"


def count(value: float | None) -> str:
    """Whole, with separators of thousands."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Three digits at least."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return NONE
    if 0 < share < 0.001:
        return f"<{_NO_BREAK}0.1{_NO_BREAK}%"
    return f"{share * 100:.{0 if share >= 0.9995 or share == 0 or share >= 0.1 else 1}f}{_NO_BREAK}%"


def duration(seconds: float | None) -> str:
    """In the two largest units that say something: 850 ms, 12.3 s, 4 min 10 s, 3 h 12 min, 2 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.9995:
        return _with_unit(f"{seconds * 1000:.{0 if seconds >= 0.00995 or seconds == 0 else 1}f}", "ms")
    if seconds < 59.95:
        return _with_unit(f"{seconds:.{2 if seconds < 9.995 else 1}f}", "s")
    for unit, size, small, small_size in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86_400, "h", 3600)):
        large, rest = divmod(round(seconds / small_size), size // small_size)
        if unit == "d" or large * size < {"min": 3600, "h": 86_400}[unit]:
            tail = " " + _with_unit(str(rest), small) if rest else ""
            return _with_unit(f"{large:,}", unit) + tail
    raise AssertionError("the last unit has no end")


def size(num_bytes: float | None) -> str:
    if not num_bytes:
        return NONE
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return _with_unit(rate(num_bytes / scale), unit)
    return _with_unit(count(num_bytes / 1024), "KiB")


def moment(seconds: float | None) -> str:
    """Of seconds since 1970."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # no year that there is
        return NONE


def span(first: float | None, last: float | None) -> str:
    """Two moments; the day only once where it is the same. Empty without any."""
    begun, ended = (moment(each) for each in (first, last))
    if first is None or last is None:
        return "" if first is None else f"{begun} UTC"
    same_day = begun[:10] == ended[:10]
    return f"{begun} to {ended[11:] if same_day else ended} UTC"


def plural(number: float, one: str, many: str | None = None) -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def _with_unit(number: str, unit: str) -> str:
    return number + _NO_BREAK + unit
