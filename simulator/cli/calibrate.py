"""`shardwise calibrate`: measure this machine, fit a calibration from what was measured, learn from steps of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import check_writable
from simulator.cli.finite import FiniteRange
from simulator.cli.options import (
    FILE,
    also_as_page,
    html_option,
    memory_fraction_option,
    needs_torch,
    patience_option,
    print_status,
    print_text,
    write_json,
)
from validate.phases import SHARES

if TYPE_CHECKING:
    from simulator.studies.learning.report import LearningReport
    from simulator.work.recorded.recording import Recording

_RUN_HELP = """Measure this machine for --minutes and write one sample a line.

Products, attention, passes over memory, losses, optimizers, launches, transfers, storage, collectives over size and
group, and compute beside a collective; the most useful measurements come first. Ranks measure together: on GPUs one a device (NCCL;
under torchrun the ranks it started), on CPUs --ranks processes (gloo). Clocks are only read.

However short --minutes is, ranks start and what every fit needs is measured: some 10 s of a CPU with --tiny, and the last
line says what it took.

Ctrl-C keeps what is done; --resume goes on where a file ends.

Exit codes: 0 complete, 2 usage, 3 refused (somebody else's job, a file that is not empty), 5 partial, 130 interrupted."""
_FIT_HELP = """Fit a calibration from samples, nccl-tests logs or published tables.

INPUTS are files of `calibrate run` (.jsonl, .jsonl.gz), nccl-tests output (text or -J JSON), or a table of published
sweeps (.csv, .csv.gz). Beside OUT.calibration.json a CPU machine also gets OUT.toml (its cluster) and OUT.stack.toml.

Exit codes: 0 fitted, 2 usage, 3 bad input or too few sizes."""
_CHECK_HELP = """Say whether a machine is as fast as it was, and all of its ranks as fast as each other.

SAMPLES are files of `calibrate run` (those of all ranks together). Each rank's products, attention, memory, host and
copies are compared with the other ranks' and with the baseline's, each collective by group and size with the baseline's;
a part that is surely slower by more than --threshold is named, and so are a part that is missing, a GPU that its hardware
held back, and, over four runs, a drift.

Exit codes: 0 as it was, 1 something is worse, 2 usage, 3 bad input, or nothing to compare with."""
_FLEET_HELP = """Say which nodes of a fleet are slower than the others of their kind.

SAMPLES are files of `calibrate run` and folders of them (what `check --history FOLDER --keep` has kept), of as many nodes as
there are. The newest run of each node is compared, part by part, with those of all nodes that have the same device.

Exit codes: 0 none is worse, 1 one is, 2 usage, 3 bad input, or nothing to compare with."""
_BURN_IN_HELP = """Compute the same things over and over for --minutes, and say which device gave a wrong result.

Products in every dtype, most of the memory, copies and collectives, with results that are known to the last bit: against
the first round's, the factors', and the other ranks' of the same device. Ranks as for `run`, also under torchrun or srun.

Exit codes: 0 sound, 1 a result was wrong, 2 usage, 3 refused, 5 a rank was lost or hung, 130 interrupted."""
_DIFF_HELP = """Say what is different between two runs of `calibrate run`, or two calibrations: a driver, NCCL, firmware.

Versions and settings that changed, parts that became slower or faster beyond noise, and what that does to the predicted
step of each --study.

Exit codes: 0, 2 usage, 3 bad input."""
_LEARN_HELP = """Learn from a handful of your own measured steps.

RUNS.csv is a table of measured runs (docs/reference/runs-table.md): a line each with model, plan, GPUs and step time. OUT.learned.json
holds what they teach of kernels, host and links, and how sure it is; `predict --calibration OUT` uses it.

Exit codes: 0 learned, 2 usage, 3 no row can teach."""


@click.group("calibrate")
def command() -> None:
    """Measure this machine, and fit a calibration from samples; learn from steps of your own."""


@command.command("run", help=_RUN_HELP)
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), default=8.0, show_default=True)
@click.option("--out", type=FILE, default=Path("samples.jsonl"), show_default=True, metavar="FILE")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="default: cuda where there is one")
@click.option("--ranks", type=click.IntRange(1, 1024), help="default: all GPUs, or two CPU processes")
@click.option("--threads", type=click.IntRange(1, 1024), help="of each CPU process; default: the cores shared evenly")
@click.option("--resume", is_flag=True, help="Go on with a file that was interrupted.")
@click.option("--tiny", is_flag=True, help="The smallest shapes only: tries the machinery, calibrates nothing.")
@click.option(
    "--only", multiple=True, type=click.Choice(tuple(SHARES)), metavar="PHASE", help="Only this phase; repeatable."
)
@click.option("--queue", is_flag=True, help="Measure all that waits for a GPU (docs/gpu-queue.md); --out is a folder.")
@patience_option
@memory_fraction_option
def run(*, queue: bool, **options: Any) -> int:  # noqa: ANN401  one type an option
    """Run the benchmarks and write their samples."""
    needs_torch()
    if queue:
        from validate.queued import Gpus, run_queue

        source = click.get_current_context().get_parameter_source
        given = {name.replace("_", "-") for name in options if source(name) is ParameterSource.COMMANDLINE}
        if own := sorted(given - {"minutes", "out", "resume"}):
            raise click.UsageError(f"--queue chooses --{', --'.join(own)} itself")
        return run_queue(
            Path(str(options["out"]).removesuffix(".jsonl")), options["minutes"], Gpus.here(), print_line=print_status
        )
    from validate import calibrate

    return calibrate.run(**options)


@command.command("burn-in", help=_BURN_IN_HELP)
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), default=10.0, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="default: cuda where there is one")
@click.option("--ranks", type=click.IntRange(1, 1024), help="default: all GPUs, or two CPU processes")
@click.option("--threads", type=click.IntRange(1, 1024), help="of each CPU process; default: the cores shared evenly")
@click.option("--tiny", is_flag=True, help="The smallest shapes only: tries the machinery, proves nothing.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `sound`, `wrong`, `trouble`, `ranks`, `machine`.")
@patience_option
@memory_fraction_option
def burn_in(*, as_json: bool, **options: Any) -> int:  # noqa: ANN401  one type an option
    """Repeat computations with known results and report wrong ones."""
    needs_torch()
    from validate import calibrate
    from validate.launch import Launch

    found = calibrate.burn_in(**options)
    if Launch.of_environment().rank:  # the first says it; a launcher hears every rank's exit code
        return found.status
    if as_json:
        write_json(found.as_json())
    else:
        print_text("\n".join(found.lines()))
    return found.status


@command.command("fit", help=_FIT_HELP)
@click.argument("inputs", nargs=-1, required=True, type=FILE, metavar="INPUTS...")
@click.option("-o", "--out", type=FILE, default=Path("machine.calibration.json"), show_default=True, metavar="FILE")
@click.option("--device", metavar="NAME|FILE", help="The device, where the samples name an unknown one.")
@click.option("--cluster", metavar="NAME|FILE", help="The cluster that logs and collectives on GPUs are of.")
@click.option("--noisy", is_flag=True, help="Fit samples of grade F too: taken while the machine did something else.")
@click.option("--keep", is_flag=True, help="Also keep it as this device's own: predictions take it without --calibration.")  # fmt: skip
def fit(**options: Any) -> int:  # noqa: ANN401  one type an option
    """Fit a calibration and write it."""
    from validate import calibrate

    return calibrate.fit(**options)


@command.command("check", help=_CHECK_HELP)
@click.argument("samples", nargs=-1, required=True, type=FILE, metavar="SAMPLES...")
@click.option("--baseline", multiple=True, type=FILE, metavar="OLD", help="Samples of an earlier run; repeatable.")
@click.option("--history", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Earlier runs.")
@click.option("--keep", is_flag=True, help="Add SAMPLES to the --history.")
@click.option("--threshold", type=FiniteRange(0.001, 10), default=0.05, show_default=True, help="Smaller changes are none.")  # fmt: skip
@click.option("--junit", type=FILE, metavar="FILE", help="Also write JUnit's XML: a test case for each part.")
@click.option("--prometheus", type=FILE, metavar="FILE", help="Also write gauges for a textfile collector.")
@click.option("--plot", type=FILE, metavar="FILE", help="Also draw all runs over time: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `worse`, `changed`, `findings`, `clocks`, `links`.")
@html_option
def check(samples: tuple[Path, ...], **options: Any) -> int:  # noqa: ANN401  one type an option
    """Compare this machine with earlier samples."""
    from validate.checked import CheckOptions, run_check

    if options["keep"] and options["history"] is None:
        raise click.UsageError("--keep adds to a --history FOLDER")
    return run_check(
        CheckOptions(files=samples, page=lambda answer: also_as_page("calibrate-check", lambda: answer), **options)
    )


@command.command("fleet", help=_FLEET_HELP)
@click.argument("samples", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="SAMPLES...")
@click.option("--threshold", type=FiniteRange(0.001, 10), default=0.05, show_default=True, help="Smaller differences are none.")  # fmt: skip
@click.option("--plot", type=FILE, metavar="FILE", help="Also draw the nodes beside each other: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `worse`, `nodes`.")
def fleet(samples: tuple[Path, ...], **options: Any) -> int:  # noqa: ANN401  one type an option
    """Report nodes that are slower than the others."""
    from validate.checked import run_fleet

    return run_fleet(samples, **options)


@command.command("diff", help=_DIFF_HELP)
@click.argument("old", type=FILE)
@click.argument("new", type=FILE)
@click.option("--study", "studies", multiple=True, type=FILE, metavar="STUDY.toml", help="Predict it with either; repeatable.")  # fmt: skip
@click.option("--cluster", metavar="NAME|FILE", help="The cluster that collectives on GPUs are of. [the study's]")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `changed`, `parts`, `studies`.")
def diff(*, old: Path, new: Path, studies: tuple[Path, ...], cluster: str | None, as_json: bool) -> int:
    """Print the differences between two runs or calibrations."""
    from validate.checked import run_diff

    return run_diff(old, new, studies, cluster=cluster, as_json=as_json)


@command.command("learn", help=_LEARN_HELP)
@click.argument("runs", type=FILE, metavar="RUNS.csv")
@click.option("-o", "--out", type=FILE, default=Path("mine"), show_default=True, metavar="OUT")
@click.option("--traces", multiple=True, metavar="ID=TRACE.json", help="torch.profiler's trace of one rank's step of that row; repeatable.")  # fmt: skip
@click.option("--stack-file", type=FILE, metavar="OUT.toml", help="Also write a stack with what was learned of kernels and host, from at most 6 runs of one stack and one kind of GPU.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write JSON: `coefficients`, `runs`, `next`.")
def learn(*, runs: Path, out: Path, traces: tuple[str, ...], stack_file: Path | None, as_json: bool) -> int:
    """Fit coefficients to measured steps, print and write them."""
    from simulator.formats.readers.measured_table import few_rows
    from simulator.formats.readers.runs_table import read_runs
    from simulator.spec.calibration.learned import LEARNED_SUFFIX
    from simulator.studies.learning import learn as learn_from
    from simulator.studies.learning import lines

    name = out.name.removesuffix(LEARNED_SUFFIX)
    file = out.with_name(f"{name}{LEARNED_SUFFIX}")
    check_writable(file, "--out")
    if stack_file is not None:
        check_writable(stack_file, "--stack-file")
    found = learn_from(few_rows(read_runs(runs), str(runs)), name, _recordings(traces))
    _save(found, file, stack_file)
    if as_json:
        write_json({**found.as_json(), "file": str(file)})
    else:
        print_text("\n".join([*lines(found), f"\nWrote {file}: shardwise predict --calibration {file}"]))
    return ExitCode.OK


def _recordings(traces: tuple[str, ...]) -> dict[str, Recording]:
    """Recordings by the ids of their rows. Raises InputError."""
    from simulator.formats.readers.recording import read_recordings

    found = {}
    for text in traces:
        row, equals, path = text.rpartition("=")
        if not equals:
            raise InputError.at(f"--traces {text}", "names no row", "ID=TRACE.json, ID as in the table")
        found[row] = read_recordings(Path(path))[0]
    return found


def _save(found: LearningReport, file: Path, stack_file: Path | None) -> None:
    """Write the calibration, and a stack if one is requested; nothing where there is no stack."""
    stack = found.stack() if stack_file is not None else None
    found.learned.save(file)
    if stack is not None and stack_file is not None:
        from validate.fit.machine import write_stack

        write_stack(stack, stack_file)
