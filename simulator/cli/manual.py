"""Manual pages and shell completions, written from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli.options import write_files

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manual:
    """What a command says of itself. description: paragraphs. options: as they are written, and what they mean."""

    name: str
    summary: str
    usage: str
    description: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def manuals(group: click.Group, name: str = "shardwise") -> Iterator[Manual]:
    """Of a group and of all that it holds, in their order."""
    yield _manual(group, name)
    context = click.Context(group, info_name=name)
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        if isinstance(command, click.Group):
            yield from manuals(command, f"{name} {verb}")
        else:
            yield _manual(command, f"{name} {verb}")


def _manual(command: click.Command, name: str) -> Manual:
    context = click.Context(command, info_name=name, max_content_width=10_000)
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    records = [one.get_help_record(context) for one in command.get_params(context)]
    return Manual(
        name=name,
        summary=paragraphs[0].partition("\n")[0].rstrip("."),
        usage=" ".join(formatter.getvalue().removeprefix("Usage: ").split()),
        description=tuple(" ".join(part.replace("\b", "").split()) for part in paragraphs),
        options=tuple(record for record in records if record is not None),
    )


def man_page(manual: Manual) -> str:
    """A page of section 1 in roff's man macros. Without a date: equal commands, equal bytes."""
    title = manual.name.replace(" ", "-")
    lines = [f".TH {_roff(title.upper())} 1", ".ad l", ".SH NAME", f"{_roff(title)} \\- {_roff(manual.summary)}"]
    lines += [".SH SYNOPSIS", _roff(manual.usage), ".SH DESCRIPTION"]
    for paragraph in manual.description:
        lines += [".PP", _roff(paragraph)]
    lines += [".SH OPTIONS"] if manual.options else []
    for option, meaning in manual.options:
        lines += [".TP", f"\\fB{_roff(option)}\\fR", _roff(meaning)]
    lines += [".SH EXIT STATUS"]
    for code in ExitCode:
        lines += [".TP", str(int(code)), _roff(code.name.lower().replace("_", " "))]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """A text whose characters mean nothing to roff; lines may break behind choices."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ").replace("|", "|\\:")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _root() -> click.Group:
    """`shardwise` itself."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return group


@click.command("manual")
@click.option("-o", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A new folder.")
def manual_command(*, folder: Path) -> int:
    """Write manual pages of all commands into a folder: DIR/man1/shardwise.1 and one for each command.

    `man -M DIR shardwise-predict` shows one; where MANPATH names the folder, `man shardwise-predict` does.
    """
    pages = {f"man1/{one.name.replace(' ', '-')}.1": man_page(one) for one in manuals(_root())}
    write_files(pages, folder, "manual")
    return ExitCode.OK


@click.command("completions")
@click.argument("shell", metavar="bash|zsh|fish")
def completions_command(*, shell: str) -> int:
    """Print what makes a shell complete commands and options, for `eval` or the shell's own folder.

    bash: eval "$(shardwise completions bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit.
    fish: shardwise completions fish > ~/.config/fish/completions/shardwise.fish
    """
    found = get_completion_class(shell) if shell in SHELLS else None
    if found is None:
        raise InputError.at(shell, "is no shell that is known", ", ".join(SHELLS))
    script = found(_root(), {}, "shardwise", "_SHARDWISE_COMPLETE")
    click.echo(script.source_template % script.source_vars())
    return ExitCode.OK
