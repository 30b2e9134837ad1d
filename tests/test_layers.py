"""Imports point only downwards (DESIGN section 4), and what must be quick to import imports nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cbgen"
# From the ground up; a module may import its own floor and those before it.
FLOORS = [
    ["errors", "config"],
    ["data"],
    ["device", "streams"],
    ["kernels"],
    ["cache"],
    ["engine"],
    ["models"],
    [
        "row_checks",
        "row_params",
        "chat",
        "prompting",
        "reasoning",
        "length_policy",
        "jobspec",
        "duplicates",
        "stopping",
    ],
    ["ordering", "row_keys", "logprob_columns", "output_rows"],
    ["row_window"],
    ["collector"],
    ["pipeline", "report", "job_files", "job_sampling", "run_log"],
    ["resolution"],
    ["first_rows", "finished", "reopening", "generation", "validation"],
    ["summary"],
    ["finished_rows"],
    ["status", "verify_rows", "verify_batch", "merge_rows", "merge"],
    ["bench"],
    ["job", "verify", "size", "plan", "quality", "report_page", "llm_outputs", "llm_requests", "llm_loading", "llm"],
    ["options", "cli_app"],
    ["cli_options"],
    ["cli_measure", "cli_outputs"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def floor_name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    """No module imports from a floor above its own."""
    own = FLOOR_OF[floor_name(path)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("cbgen."):
                assert FLOOR_OF[name.split(".")[1]] <= own, f"{path.name} imports {name}, which is above it"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["size", "--help"],
        ["bench", "--help"],
        ["quality", "--help"],
        ["plan", "--help"],
        ["validate", "--help"],
        ["report", "--help"],
        ["status", "--help"],
        ["verify", "--help"],
        ["merge", "--help"],
        ["env", "--help"],
        ["--version"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """The help of every command works without torch, transformers, pyarrow or numpy in the process."""
    code = (
        "import sys\nfrom cbgen.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as stop: assert stop.code in (0, None), stop.code\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
