"""Write the Parquet files of this folder.

Usage: python sample_data/make_samples.py

prompts.parquet comes from the texts in sample_texts.py. shared_system.parquet takes its customer messages from
shared_system.jsonl and from sample_texts.py, with the long system message in front of each. The output depends only on
these texts and on the version of pyarrow. The JSONL files are kept by hand and are never written here.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sample_texts import EXTRA_CUSTOMER_MESSAGES, PROMPTS, SHARED_SYSTEM

FOLDER = Path(__file__).resolve().parent

PROMPTS_SCHEMA = pa.schema([("id", pa.int64()), ("category", pa.string()), ("prompt", pa.string())])
MESSAGE_TYPE = pa.struct([("role", pa.string()), ("content", pa.string())])
CHAT_SCHEMA = pa.schema([("id", pa.string()), ("messages", pa.list_(MESSAGE_TYPE))])


def prompts_table() -> pa.Table:
    """Return the rows of prompts.parquet."""
    rows = [{"id": i, "category": category, "prompt": prompt} for i, (category, prompt) in enumerate(PROMPTS, start=1)]
    return pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA)


def shared_system_table() -> pa.Table:
    """Return the rows of shared_system.parquet."""
    with open(FOLDER / "shared_system.jsonl", encoding="utf-8") as lines:
        customers = [json.loads(line)["messages"][-1]["content"] for line in lines]
    rows = []
    for i, text in enumerate(customers + EXTRA_CUSTOMER_MESSAGES, start=1):
        messages = [{"role": "system", "content": SHARED_SYSTEM}, {"role": "user", "content": text}]
        rows.append({"id": f"s-{i:03d}", "messages": messages})
    return pa.Table.from_pylist(rows, schema=CHAT_SCHEMA)


def main() -> None:
    """Write both files, each in one row group."""
    for name, table in [("prompts.parquet", prompts_table()), ("shared_system.parquet", shared_system_table())]:
        path = FOLDER / name
        pq.write_table(table, path, compression="zstd", row_group_size=table.num_rows)
        print(f"{name}: {table.num_rows} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
