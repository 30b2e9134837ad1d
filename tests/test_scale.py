"""What a job needs for each of its rows, measured from outside."""

import json
import os
import subprocess
import sys

import pytest
from job_harness import REPOSITORY

LAW_BYTES = 64
# What allocators hold back differs by so much between two runs, of which one also reads the parts of another.
NOISE_BYTES = 80 << 20


@pytest.mark.long
def test_memory_per_row() -> None:
    """A job of 900,000 rows, stopped and resumed, takes no more than 64 bytes a row beyond one of 300,000."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "scale.py"), "--rows", "900000", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    figures = json.loads(output.splitlines()[-1])
    print(json.dumps(figures, indent=2))
    more_rows = figures["rows"] - 300_000
    for run in ("first_peak_bytes", "second_peak_bytes"):
        assert figures[run] - figures["base_peak_bytes"] <= LAW_BYTES * more_rows + NOISE_BYTES, run
