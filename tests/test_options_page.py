"""docs/options.md is written from the commands themselves: `python tests/test_options_page.py` writes it again."""

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from job_harness import REPOSITORY
from typer.main import get_command

from cbgen.cli import app

PAGE = REPOSITORY / "docs" / "options.md"
WRITE_AGAIN = "run `python tests/test_options_page.py` to write docs/options.md again"
COMMANDS: dict[str, Any] = get_command(app).commands
# In the order in which a user meets them; what is not named here comes after these.
FIRST = ("run", "validate", "status", "verify", "merge", "size", "bench", "quality", "env")
BEGINNING = """\
# Options

<!-- written by `python tests/test_options_page.py`: change the options, not this page -->

Every command with every option, as `cbgen COMMAND --help` has them. An option of `cbgen run` is a key of a job spec,
too, with underscores for its hyphens and without the two in front ([jobs.md](jobs.md)). Where a cell of the column
"default" is empty, nothing is asked for. A switch is given without a value, and a name that begins with `--no-` turns
it off. What may be repeated is given once for each value: `--stop A --stop B`.
"""
WORDS = {str: "text", int: "whole number", float: "number", bool: "switch"}


def names_in_order() -> list[str]:
    return sorted(COMMANDS, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def visible(command: Any) -> list[Any]:
    """The arguments and options that `--help` shows, but for `--help` itself."""
    return [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]


def is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def types_of(command: Any, name: str) -> tuple[list[Any], bool]:
    """The Python types that a command takes for a parameter, without None, and whether it takes a list of them."""
    annotated = inspect.signature(command.callback, eval_str=True).parameters[name].annotation
    plain = get_args(annotated)[0] if hasattr(annotated, "__metadata__") else annotated
    members = get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)
    types = [member for member in members if member is not NoneType]
    is_list = [get_origin(member) for member in types] == [list]
    return list(get_args(types[0])) if is_list else types, is_list


def value_of(command: Any, parameter: Any) -> str:
    """What is to be given: the type, its bounds, and whether it may be repeated."""
    types, is_list = types_of(command, parameter.name)
    told = " or ".join(WORDS.get(one, getattr(one, "__name__", str(one)).lower()) for one in types)
    if getattr(parameter, "min", None) is not None:
        told += f", {parameter.min:g} or more"
    if getattr(parameter, "max", None) is not None:
        told += f", {parameter.max:g} at most"
    if is_list:
        told += ", one or more" if is_argument(parameter) else ", may be repeated"
    return told


def default_of(parameter: Any) -> str:
    """As the help says it; empty where nothing is asked for unless it is given."""
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if not parameter.show_default or parameter.default in (None, [], ()):
        return ""
    if isinstance(parameter.default, bool):
        return "on" if parameter.default else "off"
    return f"`{parameter.default}`"


def spelling_of(parameter: Any) -> str:
    if is_argument(parameter):
        return f"`{placeholder(parameter)}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def placeholder(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.nargs == 1 or name.endswith("...") else f"{name}..."


def cell(text: str) -> str:
    """Text in a table: no sign of it is read as a mark."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def panels_of(command: Any) -> dict[str, list[Any]]:
    """Arguments, options without a panel, then each panel in the order of its first option."""
    panels: dict[str, list[Any]] = {"Arguments": [], "General": []}
    for parameter in visible(command):
        name = "Arguments" if is_argument(parameter) else getattr(parameter, "rich_help_panel", None) or "General"
        panels.setdefault(name, []).append(parameter)
    return {name: members for name, members in panels.items() if members}


def usage_of(name: str, command: Any) -> str:
    arguments = [parameter for parameter in visible(command) if is_argument(parameter)]
    told = [placeholder(each) if each.required else f"[{placeholder(each)}]" for each in arguments]
    has_options = any(not is_argument(parameter) for parameter in visible(command))
    return " ".join(["cbgen", name, *(["[OPTIONS]"] if has_options else []), *told])


def section_of(name: str, command: Any) -> Iterator[str]:
    yield f"\n## cbgen {name}\n\n"
    yield f"    {usage_of(name, command)}\n\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    for panel, members in panels_of(command).items():
        what = "argument" if panel == "Arguments" else "option"
        yield f"\n### {panel} of {name}\n\n| {what} | value | default | meaning |\n| --- | --- | --- | --- |\n"
        for parameter in members:
            cells = (value_of(command, parameter), cell(default_of(parameter)), cell(parameter.help or ""))
            yield f"| {spelling_of(parameter)} | " + " | ".join(cells) + " |\n"


def page() -> str:
    return BEGINNING + "".join(line for name in names_in_order() for line in section_of(name, COMMANDS[name]))


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), WRITE_AGAIN


@pytest.mark.parametrize("name", names_in_order())
def test_every_name_of_every_option_is_in_its_command_s_section(name: str) -> None:
    """Counted from the text, and not by what writes it: aliases, and the names that turn a switch off, too."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## cbgen {name}\n")[1].split("\n## ")[0]
    shown = [option for option in COMMANDS[name].params if not getattr(option, "hidden", False)]
    spelt = {
        spelling for option in shown if not is_argument(option) for spelling in option.opts + option.secondary_opts
    }
    assert {spelling for spelling in spelt if f"`{spelling}`" not in text} == set(), WRITE_AGAIN
    assert text.count("\n| `") == len(shown), WRITE_AGAIN


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
