"""Documentation that can fail: the README's commands are run, and what it names exists."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from job_harness import REPOSITORY, cbgen
from typer.main import get_command

from cbgen.cli import app
from cbgen.data.rows import RESULT_SCHEMA
from cbgen.jobspec import JobSpec, build_spec

PAGES = {
    name: (REPOSITORY / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/jobs.md", "docs/sampling.md", "docs/output.md")
}
OTHER_PAGES = {
    name: (REPOSITORY / name).read_text(encoding="utf-8") for name in ("docs/engine.md", "docs/troubleshooting.md")
}
README = PAGES["README.md"]
COMMANDS = get_command(app).commands
OPTIONS = {
    name for command in COMMANDS.values() for option in command.params for name in option.opts + option.secondary_opts
}
LAST_LINES = {
    "run": "Throughput: ",
    "status": "row ",
    "verify": "ok: order: ",
    "validate": "  row ",
    "merge": "merged ",
    "plan": "          from ",
    "report": "",
    "size": "fits ",
    "bench": "profiled ",
    "quality": "w8a",
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[tuple[list[str], int]]:
    """A page's cbgen commands, and the exit code that a comment behind one announces."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    found = []
    for line in (line for line in text.splitlines() if line.startswith("cbgen ")):
        announced = re.search(r"# exits with (\d+)", line)
        found.append((shlex.split(line, comments=True)[1:], int(announced.group(1)) if announced else 0))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command in order, in a folder that has sample_data and jobs, then the Python beside them."""
    for name in ("sample_data", "jobs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    assert len(commands(page)) >= 7
    for arguments, code in commands(page):
        result = cbgen(*arguments)
        assert result.exit_code == code, (arguments, result.output)
        last = result.stdout.splitlines()[-1:]  # a job that is complete already has none
        assert all(line.startswith(LAST_LINES[arguments[0]]) for line in last), (arguments, last)
    for block in blocks(page, "python"):
        exec(block, {})


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_named_options_exist(page: str) -> None:
    """Every option in a page is one of a command, or of pip."""
    text = (PAGES | OTHER_PAGES)[page]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help", "--no-deps"}
    assert named <= OPTIONS, named - OPTIONS
    assert len(named) >= 10


def test_readme_names_every_output_column() -> None:
    """The table of output columns is the schema."""
    table = README.split("## What comes out")[1].split("## ")[0]
    assert set(RESULT_SCHEMA.names) <= set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize(("command", "own"), [("run", set()), ("validate", {"rows"})])
def test_job_spec_has_every_option(command: str, own: set[str]) -> None:
    """Every option of a job can stand in a job spec, and the other way round."""
    options = {option.name for option in COMMANDS[command].params}
    assert options - {"help"} - own == set(JobSpec.model_fields)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_defaults_are_the_same_everywhere(command: str) -> None:
    """The command line's defaults are the job spec's, where its values are no lists or mappings."""
    for option in COMMANDS[command].params:
        field = JobSpec.model_fields.get(option.name or "")
        if field is not None and not field.is_required() and not isinstance(field.default, list | dict):
            assert option.default == field.default, option.name


@pytest.mark.parametrize("path", sorted((REPOSITORY / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_job_specs_are_valid(path: Path) -> None:
    """Each spec in jobs/ validates, and its input exists."""
    spec = build_spec(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert all((REPOSITORY / source).exists() for source in spec.input)


def test_sample_files_are_small() -> None:
    """Under 60 kB each, so that a clone stays light."""
    sizes = {path.name: path.stat().st_size for path in (REPOSITORY / "sample_data").iterdir() if path.is_file()}
    assert len(sizes) >= 10
    assert max(sizes.values()) < 60_000, sizes


def test_specification_names_what_exists() -> None:
    """Every module and every test in docs/specification.md is there."""
    text = (REPOSITORY / "docs" / "specification.md").read_text(encoding="utf-8")
    modules = re.findall(r"`([\w/]+\.py)`", text)
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(modules) > 50 < len(tests)
    for module in modules:
        assert any((REPOSITORY / folder / module).is_file() for folder in ("cbgen", "tests", ".")), module
    for file, name in tests:
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), (file, name)
