"""The command `shardwise`. A verb's module is loaded when the verb is called: `--help` imports nothing but click.

stdout carries the answer, stderr progress and errors. Exit codes stand in `ExitCode`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final

import click
from typing_extensions import override

from simulator.base.exit_codes import ExitCode
from simulator.base.room import LEAST_BYTES, limit_bytes, load_arrays_within

VERBS = {
    "init": "Five questions, and a study file with comments.",
    "predict": "Step time and peak memory of one plan, and whether it fits.",
    "serve": "Latencies, throughput and memory of a model that answers requests.",
    "search": "The best plan on a cluster for one global batch, out of every legal one.",
    "explore": "A study over the values of some inputs: a table, and a what-if page.",
    "ui": "Edit a study in a browser and see what it predicts, on this machine only.",
    "place": "Which GPU each rank gets, and what that gains over the order of ranks.",
    "goodput": "Days and dollars of a long run: failures, checkpoints, restarts, slow hosts.",
    "compare": "Plans or clusters side by side: time, memory, the difference with its interval, what limits each.",
    "sensitivity": "How far a step's time or cost, and the choice between plans, hang on their inputs.",
    "backtest": "Predict a table of measured runs and say how far off each group is.",
    "capture": "One step of your own program, to predict it: no description, no GPU.",
    "validate": "Run a plan for real, and compare the prediction with it.",
    "calibrate": "Measure this machine, and fit a calibration from samples or nccl-tests logs.",
    "import": "A profiler's trace of a real step, in our words, and beside a prediction.",
    "export": "A plan in Megatron-LM's, DeepSpeed's, accelerate's, torchtitan's or our own words.",
    "replay": "A recorded CUDA memory trace through the allocator: exactly, or under other settings.",
    "topo": "Read a topology: islands, nearest network cards, cuts, and what looks wrong.",
    "collective": "Time of a collective over its sizes, with the algorithm and protocol that NCCL picks.",
    "doctor": "Versions, and what in this environment would get in the way.",
    "completions": "What makes bash, zsh or fish complete commands and options.",
    "manual": "Manual pages of all commands, for man.",
}


COLLECT = 200_000, 20, 50  # imports and predictions make many objects and few cycles: collect them less often


def _command(verb: str) -> click.Command | None:  # noqa: C901, PLR0912  one case a verb
    """The command of a verb, its module loaded now."""
    command: click.Command
    match verb:
        case "init":
            from simulator.cli.init import command
        case "predict":
            from simulator.cli.predict import command
        case "serve":
            from simulator.cli.serve import command
        case "search":
            from simulator.cli.search import command
        case "explore":
            from simulator.cli.explore import command
        case "ui":
            from simulator.cli.ui import command
        case "place":
            from simulator.cli.place import command
        case "goodput":
            from simulator.cli.goodput import command
        case "compare":
            from simulator.cli.compare import command
        case "sensitivity":
            from simulator.cli.sensitivity import command
        case "backtest":
            from simulator.cli.backtest import command
        case "capture":
            from simulator.cli.capture import command
        case "validate":
            from simulator.cli.validate import command
        case "calibrate":
            from simulator.cli.calibrate import command
        case "import":
            from simulator.cli.import_trace import command
        case "export":
            from simulator.cli.export import command
        case "replay":
            from simulator.cli.replay import command
        case "topo":
            from simulator.cli.topo import command
        case "collective":
            from simulator.cli.collective import command
        case "doctor":
            from simulator.cli.doctor import command
        case "completions":
            from simulator.cli.manual import completions_command as command
        case "manual":
            from simulator.cli.manual import manual_command as command
        case _:
            return None
    return command


class Verbs(click.Group):
    """A group of commands that imports a command's module on first use."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "doctor":  # which tells of it
            _load_validate()
        return _command(cmd_name)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise", message="%(prog)s %(version)s")
def shardwise() -> None:
    """Predict the step time and the peak memory of distributed training, without a GPU."""


def _with_nearest(exc: click.ClickException) -> click.ClickException:
    """Return click's error; for an unknown option or command it names the closest known ones."""
    from simulator.base.value_errors import close_names, did_you_mean

    context = exc.ctx if isinstance(exc, click.UsageError) else None
    if context is None:
        return exc
    if isinstance(exc, click.NoSuchOption):
        from simulator.formats.readers.spelled_columns import names, plain

        known = [name for one in context.command.params for name in one.opts]
        wrong = names()["column"].get(plain(exc.option_name), exc.option_name)  # as tables of runs call it, too
        if said := _of_a_plan(exc.option_name, known):
            return click.UsageError(f"{exc.message} {said}", context)
    elif isinstance(context.command, click.Group) and exc.message.startswith("No such command"):
        wrong, known = exc.message.split("'")[1], context.command.list_commands(context)
    else:
        return exc
    near = close_names(wrong.strip("-"), [name.strip("-") for name in known])  # dashes are no likeness
    question = did_you_mean([next(one for one in known if one.strip("-") == name) for name in near]).capitalize()
    return click.UsageError(f"{exc.message} {question}".rstrip(), context)


def _of_a_plan(option: str, known: Sequence[str]) -> str | None:
    """How a command without flags of a plan takes one of its fields."""
    from simulator.formats.readers.run_settings import setting_of

    field = option.strip("-").replace("-", "_")
    key = setting_of(field)
    if key is None or not {"--fix", "--set"} & {*known}:
        return None
    return (
        f"This command takes a field of the plan as {'--fix ' + field if '--fix' in known else '--set ' + key}=VALUE."
    )


def _complain(text: str) -> None:
    """Print a message on stderr, unless stderr is closed."""
    with contextlib.suppress(OSError):
        click.echo(f"shardwise: {text}", err=True)


def _encode_all() -> None:
    """A terminal or a file in an encoding of fewer characters gets a question mark for those that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is returned."""
    if sys.stdout is None:
        _complain("stdout is closed, and the answer would go there")
        return ExitCode.RUN_FAILED
    if sys.stderr is None:  # nobody listens; and no file that is opened may take its number
        while os.open(os.devnull, os.O_RDWR) < 2:
            pass
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    _encode_all()
    gc.set_threshold(*COLLECT)
    atexit.register(gc.freeze)  # a process that ends need not look for cycles first
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for some, it reads every installed package
    try:
        with _ended_as_interrupted() as heard:
            try:
                if load_arrays_within():
                    return _run(arguments)
                _complain(_little_memory(f"is too low: {LEAST_BYTES >> 20} MiB or more"))
                return ExitCode.RUN_FAILED  # noqa: TRY300
            except Exception:
                if heard:  # pydantic makes an error of its own of one that comes while a class is built
                    return ExitCode.INTERRUPTED
                raise
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except SystemExit as exc:  # click's answers to a shell that asks for completions, and to a broken pipe
        return ExitCode.READER_LEFT if exc.code else ExitCode.OK


def _load_validate() -> None:
    """Our package of that name, before another one on a user's PYTHONPATH: many a repository has a validate.py."""
    places = sys.path[:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import validate  # noqa: F401

    sys.path[:] = places


@contextlib.contextmanager
def _ended_as_interrupted() -> Iterator[list[int]]:
    """Treat SIGTERM of a batch system and SIGHUP of a terminal like Ctrl-C: what is known is shown, and nothing is left behind.

    Signals that were heard are in the list.
    """
    before, own, heard = {}, os.getpid(), list[int]()

    def interrupt(number: int, _: object) -> None:
        if os.getpid() == own or number == signal.SIGINT:
            heard.append(number)
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a fork of this process, whose parent ends it
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup has it ignored
                before[number] = signal.signal(number, interrupt)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(arguments: Sequence[str] | None) -> int:
    from simulator.base.files import forget_read

    forget_read()
    try:
        _refuse_overwriting(sys.argv[1:] if arguments is None else arguments)
        code: object = shardwise.main(arguments, prog_name="shardwise", standalone_mode=False)
    except click.Abort:
        raise
    except Exception as exc:  # noqa: BLE001  raised again where it is a defect of ours
        return _refused(exc)
    return code if isinstance(code, int) else ExitCode.OK


# Flags behind which a file is written
WRITES: Final = frozenset(
    {"-o", "--out", "--html", "--plot", "--trace", "--memory", "--links", "--snapshot", "--save", "--draw", "--junit", "--prometheus", "--stack-file", "--export"}
)  # fmt: skip


def _refuse_overwriting(words: Sequence[str]) -> None:
    """Raises InputError where a file that is written has no name, or is named once more, as one that is read or written: it would be lost."""
    from simulator.base.errors import InputError
    from simulator.base.files import resolved

    named: dict[Path, list[tuple[str, str]]] = {}
    ours = takewhile("--".__ne__, words)  # behind it are a program's own
    for before, word in pairwise(("", *ours)):
        flag, value = word.split("=", 1) if word.startswith("--") and "=" in word else (before, word)
        if flag in WRITES and not value:
            raise InputError.at(flag, "is empty", "the name of a file or folder to write")
        with contextlib.suppress(OSError, ValueError):  # no file, or no path at all
            path = Path(value)
            if path.is_file() or (flag in WRITES and value and not path.exists()):
                named.setdefault(resolved(path), []).append((flag, value))
    for several in named.values():
        problem = "is also written" if all(flag in WRITES for flag, _ in several) else "is also read"
        for flag, value in several if len(several) > 1 else ():
            if flag in WRITES:
                raise InputError.at(f"{flag} {value}", problem, "another name")


_OF_PROCESS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}  # what it may have is used up


def _refused(exc: Exception) -> int:
    """Print an error that a command raised and return its exit code. Re-raises errors that are defects of this program."""
    from concurrent.futures import BrokenExecutor

    from simulator.base.errors import InputError, printable

    match exc:
        case click.ClickException():
            text = printable(_with_nearest(exc).format_message())
            error = click.UsageError(text, exc.ctx) if isinstance(exc, click.UsageError) else click.ClickException(text)
            with contextlib.suppress(OSError):
                error.show()
            return exc.exit_code
        case InputError():
            _complain(str(exc))
            return ExitCode.BAD_INPUT
        case OSError():  # of a file that is gone since it was looked at, whose name no system takes; of a full disk behind stdout
            place = "this process" if exc.errno in _OF_PROCESS else "stdout"
            _complain(printable(f"{exc.filename or place}: {exc.strerror or exc}"))
            return ExitCode.RUN_FAILED if exc.filename is None else ExitCode.BAD_INPUT
        case RuntimeError() if "start new thread" in str(exc):
            _complain("no more processes and threads may be started (ulimit -u)")
            return ExitCode.RUN_FAILED
        case MemoryError():
            _complain(_little_memory("is used up"))
            return ExitCode.RUN_FAILED
        case BrokenExecutor():
            _complain("worker processes were ended from outside, as where memory ends; try fewer --jobs")
            return ExitCode.RUN_FAILED
    raise exc


def _little_memory(what: str) -> str:
    limit = limit_bytes()
    return (
        f"the limit of {limit >> 20:,} MiB a process (ulimit -v)" if limit else "this machine's memory"
    ) + f" {what}"
