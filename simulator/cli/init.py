"""`shardwise init`: five questions, and a study file with a comment on every line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole
from simulator.base.schema import check_writable
from simulator.cli.options import print_status


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One input of a study: what is asked, what is meant without an answer, and the comment beside it in the file."""

    name: str
    words: str
    default: str
    comment: str


QUESTIONS = (
    Question(
        name="model",
        words="Model: a preset (llama3-8b, qwen3-32b, ...), or the path of a Hugging Face config.json",
        default="llama3-8b",
        comment="a preset, a Hugging Face config.json, or a .toml",
    ),
    Question(
        name="cluster",
        words="Machine: a preset (hgx-h100-8, dgx-a100-80-8, ...), or the path of a cluster file",
        default="hgx-h100-8",
        comment="one node; `shardwise topo NAME` shows it",
    ),
    Question(name="nodes", words="How many of them", default="1", comment="machines of that kind"),
    Question(
        name="zero",
        words="What data parallelism shards: 0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 all (FSDP)",
        default="3",
        comment="0 nothing (DDP), 1 optimizer states, 2 gradients too, 3 parameters too (FSDP)",
    ),
    Question(name="seq_len", words="Tokens in a sequence", default="4096", comment="tokens in a sequence"),
)
_PLAN = ("zero", "seq_len")
_MORE = """\
micro_batch_size = 1  # sequences a GPU computes at a time; `shardwise predict --largest-batch` finds the largest
recompute = "none"  # or selective, full: compute activations again instead of keeping them
# tp = 2  # tensor parallelism; sequence_parallel = true goes with it
# pp = 2  # pipeline stages; num_micro_batches fills them
# cp = 2  # context parallelism, for long sequences

# [run]  # for `shardwise goodput`: days and dollars, failures included
# tokens = "1T"
"""


def _flags(function: click.decorators.FC) -> click.decorators.FC:
    for one in reversed(QUESTIONS):
        flag, metavar = f"--{one.name.replace('_', '-')}", "INTEGER" if one.default.isdigit() else "NAME|FILE"
        function = click.option(flag, one.name, metavar=metavar, help=f"{one.words}.")(function)
    return function


@click.command("init")
@click.argument("study", required=False, default="study.toml", type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@_flags
def command(*, study: Path, **answers: str | None) -> int:
    """Ask five questions, and write a study file with comments.

    What a flag answers is not asked. Where nobody can be asked (stdin is no terminal), the defaults are taken, and named
    on stderr. A file that exists is never overwritten.
    """
    check_writable(study, "STUDY")
    if study.exists():
        raise InputError.at(str(study), "exists already", "another name, or delete it first")
    given = {one.name: _answer(one, answers[one.name]) for one in QUESTIONS}
    from simulator.formats.study import read_study

    inputs = {name: text for name, text in given.items() if name not in _PLAN}
    # faults are reported now rather than by the first prediction
    read_study(None, inputs, {name: given[name] for name in _PLAN}, ())
    if study.parent != Path():  # a study's paths start at its folder
        given |= {name: str(Path(text).resolve()) for name, text in inputs.items() if Path(text).is_file()}
    write_whole(study, text_of(given))
    print_status(f"{study} written; shardwise predict {study} answers it")
    return ExitCode.OK


def _answer(question: Question, given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        return str(click.prompt(question.words, default=question.default, err=True))
    print_status(f"shardwise: --{question.name.replace('_', '-')} is not given: {question.default}")
    return question.default


def text_of(given: dict[str, str]) -> str:
    """The study, with a comment on every line."""
    lines = ["# A study: `shardwise predict`, `search`, `compare`, `place`, `goodput` and others read it."]
    for one in QUESTIONS:
        lines += ["", "[plan]  # every key: docs/reference/plan-file.md"] if one.name == _PLAN[0] else []
        text = given[one.name]
        lines.append(f"{one.name} = {text if one.default.isdigit() else _quoted(text)}  # {one.comment}")
    return "\n".join(lines) + "\n" + _MORE


def _quoted(text: str) -> str:
    """A basic string of TOML: those of JSON are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
