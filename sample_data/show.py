"""Prints a few rows of an output and the figures of its run: python sample_data/show.py out.parquet summary.json"""

import json
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq

ROWS_SHOWN = 3
WIDTH = 100


def main(output: str, summary: str) -> None:
    """Show the first rows, then the throughput line."""
    for row in pq.read_table(output).slice(0, ROWS_SHOWN).to_pylist():
        print(f"\n[{row['id']}] " + textwrap.shorten(row["prompt"], WIDTH, placeholder=" ..."))
        for line in (row["completion"] or f"({row['error']})").splitlines():
            print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    "))
    figures = json.loads(Path(summary).read_text(encoding="utf-8"))
    print(f"\n{figures['rows_ok']} of {figures['rows_total']} rows, loaded in {figures['load_s']:.1f} s")
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['total_tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
