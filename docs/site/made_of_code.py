"""Pages of the reference that are written from the code: every command with its options, and the public Python names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic import BaseModel

import simulator
from simulator.cli import shardwise
from simulator.cli.manual import Manual, manuals

PLACES = "[study files](plan-file.md), [clusters](cluster-file.md), [models](model-file.md), [stacks](stack-file.md)"


def pages() -> dict[str, str]:
    """Path below docs/ -> text."""
    return {"reference/commands.md": commands(), "reference/api.md": names()}


def commands() -> str:
    """Every command, from the options that it declares."""
    lines = [
        "# All commands",
        "",
        "Written from the commands themselves; [what they mean](cli.md) is a page of its own.",
    ]
    for manual in manuals(shardwise):
        lines += ["", *_command(manual)]
    return "\n".join(lines) + "\n"


def _command(manual: Manual) -> Iterator[str]:
    yield from (f"## {manual.name}", "", *(f"{part}\n" for part in manual.description))
    yield from ("```text", manual.usage, "```")
    if manual.options:
        yield from ("", "| option | meaning |", "| --- | --- |")
        for option, meaning in manual.options:
            if not option.startswith("-"):  # an argument, which stands in the line above
                continue
            yield f"| `{_cell(option)}` | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def names() -> str:
    """The public names of `simulator`, from their signatures and docstrings."""
    lines = ["# Python names", "", "`import shardwise` has the same names. [How to use them](python-api.md)."]
    lines += ["Fields of the inputs are those of " + PLACES + "."]
    for name in simulator.__all__:
        lines += ["", *_name(name, getattr(simulator, name))]
    return "\n".join(lines) + "\n"


def _name(name: str, what: object) -> Iterator[str]:
    yield from (f"## {name}", "", *_said(what))
    if not inspect.isclass(what):
        yield from ("", "```python", f"{name}{_signature(what)}", "```")
        return
    checks = getattr(what, "__pydantic_decorators__", None)
    own = {*checks.model_validators, *checks.field_validators, "model_post_init"} if checks else set()
    for method, found in sorted((name, found) for name, found in vars(what).items() if name not in own):
        function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if isinstance(found, property) and not method.startswith("_") and inspect.getdoc(found):
            yield from ("", f"### {name}.{method}", "", *_said(found))
        elif inspect.isfunction(function) and not method.startswith("_"):
            yield from ("", f"### {name}.{method}()", "", *_said(function))
            yield from ("", "```python", f"{method}{_signature(function)}", "```")
    if issubclass(what, BaseModel):
        yield from ("", f"Its fields: {', '.join(f'`{field}`' for field in what.model_fields)}.")


def _said(what: object) -> list[str]:
    """A docstring, whose brackets are no tags."""
    return [line.replace("<", "&lt;").replace("*", "\\*") for line in (inspect.getdoc(what) or "").splitlines()]


def _signature(what: object) -> str:
    assert callable(what)
    return str(inspect.signature(what)).replace("'", "")
