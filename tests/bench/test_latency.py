"""Percentiles, limits and goodput against numbers worked out by hand; what a backend does not tell is None."""

import pytest

from cbgen.bench.latency import METRICS, STATISTICS, Latency, Slo, latency_figures, latency_lines, parse_slo
from cbgen.errors import UsageError

# Ten requests of eleven tokens: the k-th has its first token after k seconds and one every k tenths of a second.
TEN = [Latency(float(k), k + 10 * 0.1 * k, 11) for k in range(1, 11)]


def test_time_per_token_is_of_those_after_the_first() -> None:
    """One token has none after it, and without the first one's moment nothing can be said."""
    assert Latency(1.0, 3.0, 5).tpot_s == 0.5
    assert Latency(1.0, 1.0, 1).tpot_s is None
    assert Latency(None, 3.0, 5).tpot_s is None


def test_statistics_are_in_milliseconds() -> None:
    """Percentiles lie between two neighbours, in proportion."""
    figures = latency_figures(TEN, None, 20.0)
    assert [figures[f"{name}_ttft_ms"] for name in ("mean", "median", "p90", "p99")] == pytest.approx(
        [5500, 5500, 9100, 9910]
    )
    assert figures["median_tpot_ms"] == pytest.approx(550)
    assert figures["p90_e2el_ms"] == pytest.approx(18200)
    assert figures["slo"] is None
    assert figures["goodput_requests_per_second"] is None


def test_requests_of_one_token_do_not_count_for_tpot() -> None:
    """They would be zeros; where all are such, there is no figure."""
    single = Latency(1.0, 1.0, 1)
    assert latency_figures([*TEN, single], None, 1.0)["mean_tpot_ms"] == pytest.approx(550)
    figures = latency_figures([single, single], parse_slo("tpot=1us"), 4.0)
    assert figures["mean_tpot_ms"] is None
    assert figures["mean_ttft_ms"] == 1000
    assert figures["slo_met_share"] == 1.0
    assert latency_lines(figures)["tpot"] == "none: no request has a second token"


@pytest.mark.parametrize(
    ("text", "slo", "kept"),
    [
        ("ttft=2s", Slo(ttft_s=2.0), 2),
        ("e2e=8000ms, ttft=9s", Slo(ttft_s=9.0, e2e_s=8.0), 4),
        ("tpot=300500us", Slo(tpot_s=0.3005), 3),
        ("e2el = 1.5min", Slo(e2e_s=90.0), 10),
        ("TTFT=2S,tpot=0.1s", Slo(ttft_s=2.0, tpot_s=0.1), 1),
        ("ttft=1ms", Slo(ttft_s=0.001), 0),
    ],
)
def test_goodput_counts_who_keeps_to_all_limits(text: str, slo: Slo, kept: int) -> None:
    """Exactly on a limit is within it; seconds are of the whole run."""
    assert parse_slo(text) == slo
    figures = latency_figures(TEN, slo, 20.0)
    assert figures["slo_met_share"] == kept / 10
    assert figures["goodput_requests_per_second"] == kept / 20
    assert figures["goodput_output_tokens_per_second"] == 11 * kept / 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing is none; ttft, tpot and e2e with a time each"),
        ("ttft=2", "ttft=2 is none"),
        ("ttft=2s,", "nothing is none"),
        ("itl=2s", "itl=2s is none"),
        ("ttft=-2s", "ttft=-2s is none"),
        ("ttft=2s,ttft=3s", "ttft is there twice"),
        ("e2e=2s,e2el=3s", "e2el is there twice"),
        ("tpot=0ms", "tpot=0ms is met by nothing"),
        (f"e2e={400 * '9'}s", "e2e is longer than any number"),
        (f"tpot=5ms,ttft=17{306 * '0'}min", "ttft is longer than any number"),
    ],
)
def test_wrong_limits(text: str, words: str) -> None:
    """The message has the option, the part and what is right."""
    with pytest.raises(UsageError) as raised:
        parse_slo(text)
    assert str(raised.value).startswith(f"--slo {text}: {words}")


def test_a_backend_that_tells_nothing() -> None:
    """One request without times is enough, since figures are of all; the lines say so to whoever gave limits."""
    slo = parse_slo("ttft=2s,e2e=1ms")
    for latencies in ([None, None], [*TEN, None], []):
        figures = latency_figures(latencies, slo, 1.0)
        assert {value for name, value in figures.items() if name != "slo"} == {None}
        assert latency_lines(figures) == {
            "latency": "this backend does not tell when the tokens of a request came",
            "goodput": "unknown: this backend does not tell whether a request kept to ttft 2 s, e2e 1 ms",
        }
        assert latency_lines(latency_figures(latencies, None, 1.0)) == {}


def test_a_backend_that_tells_the_end_alone() -> None:
    """What depends on the first token is None; limits that do not are counted."""
    ends = [Latency(None, one.e2e_s, 11) for one in TEN]
    figures = latency_figures(ends, parse_slo("e2e=4s"), 2.0)
    assert figures["median_e2el_ms"] == pytest.approx(11000)
    assert figures["mean_ttft_ms"] is figures["p99_tpot_ms"] is None
    assert figures["goodput_requests_per_second"] == 1.0
    assert latency_figures(ends, parse_slo("e2e=4s,tpot=1s"), 2.0)["slo_met_share"] is None
    lines = latency_lines(figures)
    assert list(lines) == ["ttft", "e2el", "goodput"]
    assert "first token" in lines["ttft"]


def test_lines_have_every_statistic() -> None:
    """Of each metric in order, and the goodput with its limits."""
    lines = latency_lines(latency_figures(TEN, parse_slo("ttft=2s,tpot=150ms"), 20.0))
    assert list(lines) == [*METRICS, "goodput"]
    assert [word.split()[0] for word in lines["ttft"].split(", ")] == list(STATISTICS)
    assert lines["ttft"] == "mean 5.5 s, median 5.5 s, p90 9.1 s, p99 9.91 s"
    assert lines["tpot"].startswith("mean 550 ms, ")
    assert lines["goodput"] == (
        "0.6 output tokens/s, 0.05 requests/s: 10.0% of the requests kept to ttft 2 s, tpot 150 ms"
    )
