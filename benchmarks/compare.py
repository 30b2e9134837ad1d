"""cbgen against transformers on three workloads; the table goes into README.md, or to the screen.

python benchmarks/compare.py [--print] [OPTIONS OF cbgen bench, such as --compare cbgen,vllm --python vllm=...]

Takes some ten minutes on two cores: transformers is slow. Nothing else should use the processors meanwhile.
"""

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- comparison: written by benchmarks/compare.py -->\n", "<!-- end of comparison -->"
COMMON = ("--model", "smollm2", "--compare", "cbgen,hf,hf-cb", "--runs", "2", "--no-profile", "--markdown")
# Short and long prompts and outputs mixed; one system prompt for all; long prompts with little to generate.
WORKLOADS = {
    "mixed": "--dataset-name random --num-prompts 32 --input-len 128 --output-len 96 --random-range-ratio 0.9",
    "shared prefix": "--dataset-name prefix-repetition --num-prefixes 1 --prefix-len 512 --num-prompts 32 "
    "--input-len 48 --output-len 32",
    "long prompts": "--dataset-name random --num-prompts 8 --input-len 1024 --output-len 16",
}


def measure(name: str, options: list[str]) -> list[str]:
    """The lines of a markdown table, with the workload's own name in the first column."""
    command = [sys.executable, "-m", "cbgen", "bench", *COMMON, *WORKLOADS[name].split(), *options]
    print(" ".join(command[2:]), file=sys.stderr)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(result.stdout)
    if result.returncode:
        sys.exit(result.returncode)
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    return [*table[:2], *(f"| {name} |{line.split('|', 2)[2]}" for line in table[2:])]


def main(arguments: list[str]) -> None:
    options = [argument for argument in arguments if argument != "--print"]
    tables = [measure(name, options) for name in WORKLOADS]
    table = "\n".join([*tables[0][:2], *(line for own in tables for line in own[2:])]) + "\n"
    if "--print" in arguments:
        print(table, end="")
        return
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
