"""Options shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from simulator.base.errors import Fault, InputError, json_text, listed, printable_lines
from simulator.base.files import write_whole
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import check_writable
from simulator.base.units import UnitError
from simulator.cli.finite import FiniteRange

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simulator.formats.study import Study
    from simulator.spec.prices import Prices

FILE = click.Path(path_type=Path, dir_okay=False)

_Quantity = TypeVar("_Quantity")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def completed(words: Iterable[object] = (), presets: str | None = None) -> Callable[..., list[CompletionItem]]:
    """Shell completion of an option's value: words, and with `presets` the names in that folder, or a file."""

    def found(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
        files = [] if presets is None else TOPOLOGIES.joinpath(presets).glob("*.toml")
        names = [*map(str, words), *sorted(file.stem for file in files)]
        items = [CompletionItem(name) for name in names if name.startswith(begun)]
        return items if presets is None else [*items, CompletionItem(begun, type="file")]

    return found


def all_of(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Several options as one decorator, in this order."""

    def added(function: _Command) -> _Command:
        for option in reversed(options):
            function = option(function)
        return function

    return added


def fixed_by(
    text: str, faults_of: Callable[[str, Sequence[object], str], list[Fault]]
) -> tuple[str, tuple[object, ...], list[Fault]]:
    """`--fix name=a,b` as the field, its values, and what is wrong with them."""
    from simulator.formats.study.overrides import literal

    name, equals, values = (part.strip() for part in text.partition("="))
    name = name.replace("-", "_")
    place = f"--fix {name}"
    if not equals or not values:
        return name, (), [Fault(place, "has no value", "--fix field=value, or several with commas")]
    found = tuple(literal(part.strip()) for part in values.split(","))
    return name, found, faults_of(name, found, place)


def texts_of(options: Mapping[str, Any], *names: str) -> dict[str, str]:
    """Those of the named options that are given, as text."""
    return {name: str(options[name]) for name in names if options.get(name) is not None}


def strays(options: Mapping[str, Any], names: Iterable[str], owner: str) -> list[Fault]:
    """Those of the named options that are given where only `owner` takes them."""
    flags = {option.name: option.opts[0] for option in click.get_current_context().command.params}
    given = (flags[name] for name in names if options[name] not in (None, False, ()))
    return [Fault(flag, f"belongs to {owner}", f"{owner}, or leave it out") for flag in given]


_COUNT_OF_GPU = re.compile(r"0*[1-9]\d*\s*[x×*]\s*\S")


class _Cluster(click.Option):
    """--cluster, or what --gpus says instead. Raises InputError."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        gpus = opts.get("gpus")
        if gpus is not None and "cluster" in opts:
            raise InputError.at("--gpus", "--cluster is given too", "one of the two")
        if gpus is not None and not _COUNT_OF_GPU.match(gpus):
            raise InputError.at("--gpus", f"{gpus!r} is no COUNTxGPU", "for example 8xh100")
        return super().consume_value(ctx, opts if gpus is None else {**opts, "cluster": gpus})


def cluster_option(help_text: str = "A preset or a .toml.", **more: Any) -> Callable[[_Command], _Command]:  # noqa: ANN401  of click
    """--cluster, and --gpus, which fills it."""
    more |= {"metavar": "NAME|FILE", "help": help_text, "shell_complete": completed(presets=".")}
    gpus = "COUNTxGPU, as 8xh100: the GPU's usual machine, instead of --cluster."
    return all_of(
        click.option("--cluster", cls=_Cluster, **more),
        click.option("--gpus", metavar="COUNTxGPU", help=gpus, expose_value=False),
    )


image_options = all_of(
    click.option(
        "--images", metavar="INTEGER", help="Of a sequence, where the model has a tower for them; 0: without it. [1]"
    ),
    click.option(
        "--image-size",
        metavar="PIXELS",
        help="A side of one, of towers that take any size or cut images into tiles. [448]",
    ),
)
input_options = all_of(  # as text: a study's reader judges them with everything else
    click.option(
        "--model",
        metavar="NAME|FILE",
        help="A preset, a Hugging Face config.json or a .toml.",
        shell_complete=completed(presets="models"),
    ),
    click.option(
        "--like", metavar="FAMILY", help="Read --model's config.json as of that family (llama, mixtral, ...)."
    ),
    image_options,
    cluster_option(),
    click.option("--nodes", metavar="INTEGER", help="How many of the cluster's nodes."),
)
study_options = all_of(
    input_options,
    click.option(
        "--calibration", metavar="NAME|FILE", help="A calibration; `ideal` or `datasheet` make one of the device."
    ),
)
placement_option = click.option(  # a study may name it too
    "--placement",
    metavar="RANKS.tsv",
    help="The node and GPU of each rank, as `shardwise place -o` writes it. [rank by rank]",
)
SCREEN_WIDTH = 80  # columns of a terminal as it opens
_PAGE = "simulator.page"  # in the command's context: where --html goes


def set_option(help_text: str) -> Callable[[_Command], _Command]:
    """--set: leaves of the study."""
    return click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=help_text)


patience_option = click.option(  # of verbs that start ranks
    "--patience",
    type=FiniteRange(0.01, 1000),
    default=1.0,
    show_default=True,
    help="A factor on every deadline: above 1 for cold compiles, slow disks, thousands of ranks.",
)
memory_fraction_option = click.option(  # of verbs that start ranks
    "--memory-fraction",
    type=FiniteRange(0.01, 1),
    default=0.9,
    show_default=True,
    help="Of the memory that is free at the start, the most to take.",
)
OF_ALL_STUDIES: Final = ("model", "images", "image_size", "cluster", "nodes")


_OF_ALL: Final = "As for predict; of all studies."
of_all_studies = all_of(  # of a verb that takes several studies (`OF_ALL_STUDIES`)
    set_option(_OF_ALL),
    click.option("--model", metavar="NAME|FILE", help=_OF_ALL),
    image_options,
    cluster_option(_OF_ALL),
    click.option("--nodes", metavar="INTEGER", help=_OF_ALL),
)


_LEFT_OUT = {  # table of a study -> commands that count it, what the others say
    "data": (("predict", "goodput"), "[data] is left out here; predict and goodput count the wait for it"),
    "servers": (
        ("predict", "compare"),
        "[servers] is left out here: the answer is of replicas that sum; predict and compare have that with servers",
    ),
    "energy": (("predict", "goodput"), "[energy] is left out here; predict and goodput draw it"),
}


def print_notes(study: Study) -> Study:
    """Print on stderr, once and not in workers, which keys of a study's files have moved and what is ignored."""
    command = click.get_current_context(silent=True)
    printed: set[str] = command.meta.setdefault("simulator.notes", set()) if command else set(study.notes)
    left = [
        note
        for table, (by, note) in _LEFT_OUT.items()
        if getattr(study, table) is not None and command is not None and command.info_name not in by
    ]
    for note in (*study.notes, *left):
        if note not in printed:
            print_status(f"shardwise: {note}")
            printed.add(note)
    return study


tokens_option = click.option(  # which only a program's author knows
    "--tokens-per-step",
    type=click.IntRange(1),
    metavar="INTEGER",
    help="Of a captured program, by all its ranks. [as its capture says]",
)
program_options = all_of(
    click.option("--program", type=click.Path(path_type=Path), metavar="CAPTURE|SCRIPT.py|TRACE.json|FOLDER", help="A captured program instead of model and plan, or a script to capture now; of predict also a profiler's trace, or a folder with one of each rank."),
    tokens_option,
    click.option("--scale-with", type=FILE, metavar="CAPTURE", help="The same program captured at another number of ranks: sizes at the cluster's follow from both."),
)  # fmt: skip


def price_options(function: _Command) -> _Command:
    """--prices and --price-kind."""
    from simulator.spec.prices import KINDS

    one_kind = "Only prices of this kind. [all; one answer: the cheapest]"
    function = click.option("--price-kind", type=click.Choice(KINDS), help=one_kind)(function)
    file = click.Path(path_type=Path)
    return click.option("--prices", type=file, metavar="PRICES.toml", help="What GPUs cost.")(function)


def quantity(flag: str, parse: Callable[[str], _Quantity], text: str, remedy: str = "") -> _Quantity:
    """An option's text as a parser of units reads it. Raises InputError."""
    try:
        return parse(text)
    except UnitError as exc:
        raise InputError.at(flag, exc.problem, exc.remedy or remedy) from None


def loaded_prices(options: Mapping[str, Any]) -> Prices | None:
    """What these name, as the verb's options hold them; None without a file. Raises InputError."""
    if options["prices"] is not None:
        from simulator.spec.prices import Prices

        return Prices.load(options["prices"], options["price_kind"])
    if options["price_kind"] is not None:
        raise InputError.at("--price-kind", "there are no prices", "--prices PRICES.toml")
    return None


def answer_options(function: _Command, json_help: str = "Write JSON (docs/reference/json-output.md).") -> _Command:
    """--json, --plain and --html: how the answer is written. What prints it asks the command's context for them."""
    for flag, text in (("--plain", "No colours, fixed width."), ("--json", json_help)):
        function = click.option(flag, is_flag=True, help=text, expose_value=False, callback=_noted)(function)
    return html_option(function)


def _noted(context: click.Context, option: click.Parameter, given: bool) -> None:  # noqa: FBT001  click's call
    context.meta[f"simulator.{option.name}"] = given


def requested(name: str) -> bool:
    """Whether a flag of `answer_options` is given. name: "json" or "plain"."""
    return bool(click.get_current_context().meta.get(f"simulator.{name}"))


def html_option(function: _Command) -> _Command:
    """--html, read by `also_as_page`. A command without a page prints a note if --html is given."""

    @wraps(function)
    def with_page(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the command takes and returns
        code = function(*args, **kwargs)
        path = click.get_current_context().meta.pop(_PAGE, None)
        if path is not None:
            print_status(f"no page was written to {path}: there is none of this answer")
        return code

    help_text = "Also write the answer as a page: one file that needs no network (docs/guides/reports.md)."
    option = click.option(
        "--html", type=FILE, metavar="OUT.html", help=help_text, expose_value=False, callback=_page_at
    )
    return option(cast(_Command, with_page))


def _page_at(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Store the page's path. Raises InputError if it cannot be written."""
    if path is not None:
        check_writable(path, "--html")
        if path.is_file() and path.suffix not in (".html", ".htm"):  # as of a study, by who took --html for a flag
            raise InputError.at(f"--html {path}", "is a file, and no page", "another name, as page.html")
        context.meta[_PAGE] = path


def page_path() -> Path | None:
    """The path that --html gives, if any."""
    path: Path | None = click.get_current_context().meta.pop(_PAGE, None)
    return path


def page_requested() -> bool:
    """Whether --html is given and its page not yet written."""
    return _PAGE in click.get_current_context().meta


def also_as_page(
    kind: str, answer: Callable[[], Mapping[str, Any]], drawing: Callable[[], Mapping[str, Any] | None] = lambda: None
) -> None:
    """Write the page of --html, if given. answer: the JSON document. drawing: further data for its figures."""
    path = page_path()
    if path is not None:
        from simulator.formats.html import write_page

        write_page(path, kind, answer(), drawing())
        print_status(f"page written to {path}")


def print_answer(
    kind: str,
    data: Callable[[], Mapping[str, Any]],
    text: Callable[[], RenderableType],
    drawing: Callable[[], Mapping[str, Any] | None] = lambda: None,
    *,
    width: int | None = None,
) -> None:
    """Print an answer as JSON or as text, then write the page of --html. data: the JSON document; width: of the text."""
    if requested("json"):
        write_json(data())
    else:
        from simulator.cli.terminal import show

        show(text(), plain=requested("plain"), **({} if width is None else {"width": width}))
    also_as_page(kind, data, drawing)


def write_json(answer: object) -> None:
    """Print to stdout as JSON, readable; keys keep their order."""
    click.echo(json_text(answer))


def write_files(files: Mapping[str, str | bytes], folder: Path, label: str = "launch kit") -> None:
    """Write files into a new or empty folder. Raises InputError if that is not possible."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InputError.at(str(folder), "is not empty", "a new folder")
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
            if name.endswith(".sh"):
                file.chmod(0o755)
    except OSError as exc:
        raise InputError.at(str(folder), f"cannot be written: {exc.strerror}") from None
    print_status(f"{label} of {len(files)} files written to {folder}")


def print_status(text: str) -> None:
    """Print a line on stderr; control characters of names in it are escaped."""
    click.echo(printable_lines(text), err=True)


def print_unread(faults: Sequence[Fault]) -> None:
    """Print on stderr what of a file was not read."""
    for fault in listed(faults):
        print_status(f"not read: {fault}")


def print_text(text: str) -> None:
    """Print lines on stdout; control characters of names in them are escaped."""
    click.echo(printable_lines(text))


def needs_torch() -> None:
    """Raises InputError where there is none."""
    if find_spec("torch") is None:
        raise InputError.at("torch", "is not installed", "pip install 'shardwise[validate]'")
