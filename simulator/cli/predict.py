"""`shardwise predict`: step time and peak memory of one plan, and whether it fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from pydantic.fields import FieldInfo

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.progress import MEMORY, WRITING
from simulator.base.schema import Strict, check_writable
from simulator.base.units import format_bytes
from simulator.base.value_errors import words_of
from simulator.cli import predict_recorded
from simulator.cli.extras import extra_options, extras_of, taken, with_data_of
from simulator.cli.fabric import fabric_option, with_fabric
from simulator.cli.options import (
    FILE,
    SCREEN_WIDTH,
    all_of,
    answer_options,
    completed,
    placement_option,
    print_answer,
    print_notes,
    print_status,
    program_options,
    requested,
    set_option,
    study_options,
)
from simulator.cli.predict_program import measured_options
from simulator.cli.predict_recorded import recorded_options
from simulator.cli.progress import playing, told
from simulator.cli.recipe import recipe_option, with_recipe
from simulator.cli.watch import watch_option
from simulator.formats.drawing import check_picture
from simulator.formats.readers import PLAN_FORMATS
from simulator.formats.study import PlanFile, Study, read_study
from simulator.formats.study.overrides import set_twice
from simulator.formats.writers.json_report import report
from simulator.predict import Prediction, Source, predict
from simulator.predict.lengths import padding_of, read_lengths
from simulator.predict.reference import Kind, reference_of, with_reference
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.checkpoint import saving

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simulator.predict.largest_batch import LargestBatch
    from simulator.predict.telemetry import Telemetry
    from simulator.studies.rollout import Iteration, Rollout

_HELP = """Predict one training step of a model under a plan on a cluster.

--plan reads the plan from another framework's file; flags override what it states.

STUDY.toml holds `model`, `cluster`, `nodes`, `calibration` and a [plan] table; flags override it. Without a file the
embedded default is predicted: Llama 3 8B with FSDP2 on one node of 8 H100. If no data-parallel degree is given, all
devices of the cluster shard the model.

Exit codes: 0 it fits, 2 usage, 3 bad input, 4 it does not fit in memory."""

_SUBJECT = 16  # characters of what a field is about, as "FSDP2" or "without adapters"


def _metavar(annotation: object) -> str:
    """A flag's metavar from the type of Plan's field: `none|full`, INTEGER."""
    choices = words_of(annotation)
    if choices:
        return "|".join(map(str, choices))
    names = {int: "INTEGER", bool: "true|false", str: "NAME", float: "NUMBER"}
    return "|".join(names[part] for part in names if part is annotation or part in get_args(annotation)) or "VALUE"


def _help(name: str, info: FieldInfo) -> str:
    """What a field means, up to the first aside, and its default."""
    whole = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", info.description or "")
    text = re.split(r"\s*;|\s\(|\. ", whole)[0]
    if text != whole and len(subject := text.partition(": ")[0]) > _SUBJECT:  # not the first item alone of a list
        text = subject
    value = "what the other degrees leave" if name == "dp_shard" else info.default
    if isinstance(value, Strict):
        value = f"a table: --set plan.{name}.KEY=VALUE"
    elif isinstance(value, tuple):
        value = ",".join(value)
    elif name.endswith("_bytes") and isinstance(value, int):
        value = format_bytes(value)
    default = "" if value in (None, "") else f" [{str(value).lower() if isinstance(value, bool) else value}]"
    return f"{text[:1].upper()}{text[1:]}.{default}"


def plan_options(function: Callable[..., int]) -> Callable[..., int]:
    """A flag for each field of Plan, in its order. Values are judged by Plan, so that all faults are reported together."""
    for name, info in reversed(Plan.flat_fields().items()):
        metavar = "SIZE" if name.endswith("_bytes") else _metavar(info.annotation)
        function = click.option(
            f"--{name.replace('_', '-')}",
            name,
            metavar=metavar,
            help=_help(name, info),
            shell_complete=completed(words_of(info.annotation), "stacks" if name == "stack" else None),
        )(function)
    return function


plan_file_options = all_of(  # a plan in another framework's words
    click.option("--plan", "plan_file", type=FILE, metavar="FILE", help="The plan in the file of Megatron-LM, DeepSpeed, accelerate, torchtitan or a fine-tuning framework."),
    click.option("--plan-format", metavar="|".join(PLAN_FORMATS), help="[by the file's content]"),
    click.option("--define", multiple=True, metavar="NAME=VALUE", help="A variable of --plan's script, @ for its arguments, or --OPTION; repeatable."),
)  # fmt: skip


def study_of(study: Path | None, flags: dict[str, Any], settings: tuple[str, ...]) -> Study:
    """The study with a command's flags applied. Settings of a plan's file that have no effect are printed on stderr.

    Raises InputError with every fault of every input.
    """
    imported = _plan_file_of(flags)
    given = {name: text for name, text in flags.items() if text is not None}
    plan_flags = {name: text for name, text in given.items() if name in Plan.flat_fields()}
    inputs = {name: text for name, text in given.items() if name not in plan_flags}
    twice = set_twice(plan_flags, settings)
    try:
        loaded = print_notes(read_study(study, inputs, plan_flags, settings, imported))
    except InputError as exc:
        raise InputError([*exc.faults, *twice], exc.ready) from None
    InputError.raise_for(twice)
    if loaded.draft is not None:
        from simulator.formats.study.imported import warnings

        for line in warnings(loaded.draft):
            print_status(f"shardwise: {line}")
    return loaded


def _plan_file_of(flags: dict[str, Any]) -> PlanFile | None:
    """Take the plan's file out of a command's flags."""
    path, form, define = flags.pop("plan_file"), flags.pop("plan_format"), flags.pop("define")
    if path is None and (form is not None or define):
        raise click.UsageError("--plan-format and --define need --plan")
    return None if path is None else PlanFile(path=path, form=form, define=define)


_outputs = all_of(
    click.option("--brief", is_flag=True, help="Only what decides, on one screen of 80 columns."),
    click.option("--trace", type=FILE, metavar="OUT.json.gz", help="Also write a Chrome trace, for Perfetto."),
    click.option("--memory", type=FILE, metavar="OUT.png|OUT.svg", help="Also draw the step's memory by category."),
    click.option("--links", type=FILE, metavar="OUT.png|OUT.svg", help="Also draw a node's links and what the step puts on them."),
    click.option("--snapshot", type=FILE, metavar="OUT.pickle", help="Also write the predicted allocator, for PyTorch's memory viewer."),
)  # fmt: skip
_questions = all_of(
    click.option("--largest-batch", is_flag=True, help="Find the largest micro_batch_size that surely fits, and predict that."),
    click.option("--rollout", type=FILE, metavar="ROLLOUT.toml", help="Also one iteration of reinforcement learning: answers from an engine, training on them."),
    click.option("--reference", metavar="model|base|none", help="A reference model's forward in every micro-batch (DPO; KTO: model:3, base:3): of its own weights, or of the base below adapters. A trainer's file that has one needs no flag; none leaves it out."),
    click.option("--lengths", metavar="FILE|lognormal:MEDIAN,SIGMA", help="Also of data with sequences of these lengths, cut at seq_len: padded batches, and packed."),
)  # fmt: skip


@click.command("predict", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@plan_file_options
@study_options
@recipe_option
@placement_option
@plan_options
@fabric_option
@set_option(
    "Any leaf of plan, model, cluster, device, stack or checkpoint: device.memory_bytes=96GiB. May be repeated."
)
@answer_options
@program_options
@recorded_options
@measured_options
@_questions
@watch_option
@_outputs
@extra_options
def command(
    study: Path | None,
    *,
    settings: tuple[str, ...],
    trace: Path | None,
    memory: Path | None,
    links: Path | None,
    snapshot: Path | None,
    **flags: Any,  # noqa: ANN401  text of Plan's fields, and a plan's file
) -> int:
    """Predict, print, and say by the exit code whether it fits."""
    names = ("program", "tokens_per_step", "scale_with", "fabric", "measured", "of")
    program, tokens_per_step, other, fabric, measured, of = (flags.pop(name) for name in names)
    largest, spec, kind = flags.pop("largest_batch"), flags.pop("lengths"), flags.pop("reference")
    rollout, brief, extra_flags = flags.pop("rollout"), flags.pop("brief"), taken(flags)
    if brief and requested("json"):
        raise click.UsageError("--brief and --json are two answers: give one of them")
    unread = with_recipe(flags, alone=study is None and not flags["plan_file"])
    of_recording = {name: flags.pop(name) for name in predict_recorded.NAMES}
    if program is not None:
        asks = {"lengths": spec, "reference": kind, "rollout": rollout, "fabric": fabric}
        asks |= {name: value or None for name, value in (extra_flags | {"largest_batch": largest}).items()}
        given = {**flags, "study": study, **asks}
        written = {"--trace": trace, "--memory": memory, "--links": links, "--snapshot": snapshot}
        sizes = {"tokens_per_step": tokens_per_step, "scale_with": other, "measured": measured, "of": of}
        return _program(program, given, of_recording, settings, written, sizes, brief=brief)
    predict_recorded.refuse(of_recording)
    needing = {"--tokens-per-step": tokens_per_step, "--scale-with": other, "--measured": measured, "--of": of}
    for flag, value in needing.items():
        if value is not None:
            raise click.UsageError(f"{flag} needs --program")
    wrong = unread + _unwritable({"--trace": trace, "--snapshot": snapshot}, {"--memory": memory, "--links": links})
    wrong += _given_sizes(flags, settings) if largest else []
    loaded = _loaded(study, flags, settings, fabric, wrong)
    lengths = read_lengths(spec) if spec is not None else ()
    beside = reference_of(kind, loaded.plan, loaded.draft.reference_forwards if loaded.draft else 0)
    rolled = _rollout(rollout) if rollout is not None else None
    loaded, found = _with_largest_batch(loaded) if largest else (loaded, None)
    prediction, stall = with_data_of(loaded, _predicted(loaded, beside))
    inputs = loaded.parts
    padding = padding_of(lengths, *inputs) if lengths else None
    iteration = _iteration(rolled, prediction, *inputs) if rolled is not None else None
    further = extras_of(extra_flags, loaded, prediction, stall)
    parts = {"largest_batch": found, "lengths": padding, "rollout": iteration}
    keys = {name: one.report() for name, one in parts.items() if one is not None} | further.keys

    def text() -> RenderableType:
        from simulator.cli.terminal import prediction_text

        return prediction_text(prediction, padding, iteration, further.sections, brief=brief)

    def data() -> Mapping[str, Any]:
        return {**report(prediction, loaded.inputs()), **keys}

    drawing = partial(_drawing, prediction, inputs)
    print_answer("predict", data, text, drawing, width=SCREEN_WIDTH if brief else None)
    _write_files(loaded, prediction, trace, links, further.telemetry)
    _write_memory(loaded, prediction, memory, snapshot)
    return prediction.verdict.exit_code


def _loaded(
    study: Path | None, flags: dict[str, Any], settings: tuple[str, ...], fabric: tuple[str, ...], faults: list[Fault]
) -> Study:
    """The study with its measured fabric. Raises InputError with its faults and those found before."""
    try:
        loaded = study_of(study, flags, settings)
        loaded = replace(loaded, cluster=with_fabric(loaded.cluster, fabric))
    except InputError as exc:
        raise InputError([*exc.faults, *faults], exc.ready) from None
    InputError.raise_for(faults)
    return loaded


def _drawing(prediction: Prediction, inputs: tuple[Any, ...]) -> Mapping[str, Any]:
    from simulator.formats.html.step import drawing_of

    return drawing_of(prediction, *inputs)


def _rollout(file: Path) -> Rollout:
    from simulator.studies.rollout import read_rollout

    return read_rollout(file)


def _iteration(rollout: Rollout, prediction: Prediction, *inputs: Any) -> Iteration:  # noqa: ANN401  predict's inputs
    from simulator.studies.rollout import iteration_of

    return iteration_of(rollout, prediction, *inputs)


def _predicted(study: Study, beside: tuple[Kind, int] | None) -> Prediction:
    """The prediction of a study, with a reference model and a checkpoint if requested."""
    inputs = study.parts
    with playing(study.plan, study.cluster):
        prediction = predict(*inputs, advise=True)
    prediction = replace(prediction, sources=(*study.sources, *prediction.sources))
    if beside is not None:
        prediction = with_reference(prediction, *inputs, kind=beside[0], forwards=beside[1])
    if study.checkpoint is None:
        return prediction
    return replace(prediction, checkpoint=saving(study.model, study.plan, study.cluster, study.checkpoint))


def _program(
    program: Path,
    flags: dict[str, Any],
    of_recording: dict[str, Any],
    settings: tuple[str, ...],
    written: dict[str, Path | None],
    sizes: dict[str, Any],
    *,
    brief: bool,
) -> int:
    """Predict a --program, which is a recorded trace or a captured program."""
    from simulator.formats.readers.recording import is_recording

    if (sizes["measured"] is None) is not (sizes["of"] is None):
        raise click.UsageError("--measured and --of go together: what was measured, and the capture of what ran")
    if is_recording(program):
        for flag in ("scale-with", "measured"):
            if sizes[flag.replace("-", "_")] is not None:
                raise click.UsageError(f"--{flag}: only of a captured --program")
        options = {**flags, **of_recording, "tokens_per_step": sizes["tokens_per_step"]}
        if brief:
            raise click.UsageError("--brief: only of a captured --program")
        return predict_recorded.answer(program, options, settings, written)
    recorded_on = of_recording.pop("recorded_on") if sizes["measured"] else None
    predict_recorded.refuse(of_recording)
    from simulator.cli.predict_program import Files, answer

    tokens_per_step = sizes.pop("tokens_per_step")
    files = Files(**{name.removeprefix("--"): one for name, one in (written | sizes).items()}, recorded_on=recorded_on)
    return answer(program, flags, settings, files, tokens_per_step, brief=brief)


def _with_largest_batch(study: Study) -> tuple[Study, LargestBatch]:
    """The study with the largest micro-batch that surely fits, or 1; the result is printed on stderr."""
    from simulator.predict.largest_batch import largest_batch

    with told("each size", {MEMORY: 8}):  # sizes up to eight or so are usual
        found = largest_batch(*study.parts)
    print_status(f"shardwise: {found.words}")
    size = f"micro_batch_size = {found.plan.micro_batch_size} (--largest-batch)"
    source = Source(what="plan", kind="given", detail=size)
    sources = [one for one in study.sources if one.what != "plan.micro_batch_size"]  # what a plan's file leaves open
    return replace(study, plan=found.plan, sources=(*sources, source)), found


def _given_sizes(flags: Mapping[str, Any], settings: tuple[str, ...]) -> list[Fault]:
    """A fault for each flag that sets the micro-batch size although --largest-batch is given."""
    given = [f"--set {one}" for one in settings if one.partition("=")[0].strip() == "plan.micro_batch_size"]
    if flags["micro_batch_size"] is not None:
        given.insert(0, f"--micro-batch-size {flags['micro_batch_size']}")
    problem, remedy = "--largest-batch finds the size itself", "leave out one of the two"
    return [Fault(place=place, problem=problem, remedy=remedy) for place in given]


def _unwritable(files: Mapping[str, Path | None], pictures: Mapping[str, Path | None]) -> list[Fault]:
    """Faults of the output files, reported before the prediction."""
    faults: list[Fault] = []
    for flag, path in {**files, **pictures}.items():
        if path is not None:
            with Collected(faults):
                (check_picture if flag in pictures else check_writable)(path, flag)
    return faults


def _write_files(
    study: Study, prediction: Prediction, trace: Path | None, links: Path | None, counters: Telemetry | None
) -> None:
    """The step's timeline, and what it sends over a node's links."""
    if trace is not None:
        from simulator.formats.writers.chrome_trace import write_chrome_trace

        write_chrome_trace(trace, prediction, counters)
        print_status(f"trace written to {trace}")
    if links is not None:
        from simulator.formats.writers.link_plot import write_link_plot
        from simulator.predict.link_loads import link_loads

        loads = link_loads(*study.parts)
        write_link_plot(links, loads, "--links")
        print_status(f"links drawn in {links}")


def _write_memory(study: Study, prediction: Prediction, picture: Path | None, snapshot: Path | None) -> None:
    """Replay the step's allocations event by event for the writers that need them."""
    if picture is None and snapshot is None:
        return
    from simulator.cli.predict_program import write_memory
    from simulator.memory import device_history

    stack = study.stack or Stack.of(study.plan)
    history = device_history(study.model, study.plan, stack, study.cluster.device)
    with told("memory", {WRITING: 1}):
        write_memory(prediction, history, study.plan, picture, snapshot)
