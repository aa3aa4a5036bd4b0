"""What `shardwise calibrate` does, without the command line: choose ranks, measure, fit, write, say what came of it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import CalibrationError, Fault, InputError, listed, printable
from simulator.base.exit_codes import ExitCode
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.document import SUFFIX
from simulator.spec.calibration.stored import VARIABLE, place
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from validate.launch import Launch, threads_each, usable_cores
from validate.machine import count_gpus
from validate.measure import Job, measure
from validate.phases import FEWEST, phases_of
from validate.samples import SampleFile, read_samples
from validate.stopwatch import MEMORY_SHARE, DeviceKind

if TYPE_CHECKING:
    from validate.burn_in.run import Burnt
    from validate.fit.machine import Fit

PARTIAL = 5  # exit code: something is missing, and is named
CPU_RANKS = 2


def run(  # noqa: PLR0913  one a flag
    *,
    minutes: float,
    out: Path,
    device: str | None,
    ranks: int | None,
    threads: int | None,
    resume: bool,
    tiny: bool,
    patience: float = 1.0,
    memory_fraction: float = MEMORY_SHARE,
    only: tuple[str, ...] = (),
) -> int:
    """Measure this machine. Returns the exit code; raises InputError for what is refused."""
    kind, count, each = _where(device, ranks, threads)
    out, launch = _own_file(out), Launch.of_environment()
    job = Job(
        out=out,
        minutes=minutes,
        device=kind,
        num_ranks=count,
        threads=each,
        resume=resume,
        tiny=tiny,
        patience=patience,
        memory_fraction=memory_fraction,
        command=shlex.join(["shardwise", *sys.argv[1:]]),
        only=only,
    )
    print_line = _print if launch.rank == 0 else _print_nothing  # what rank 0 says is true of all
    print_line(f"{count} {_DEVICES[kind]}, {minutes:g} minutes, samples to {out}")
    started_s = time.monotonic()
    outcome = measure(job, print_line)
    spent = (time.monotonic() - started_s) / 60
    if outcome.verdict == "complete" and spent > 1.05 * minutes:
        least = sum(FEWEST[phase] for phase in only or phases_of(kind, count) if phase in FEWEST)
        print_line(
            f"took {spent:.2g} minutes, not {minutes:g}: {least} items are measured whatever the time, and ranks have to start"
        )
    for problem in outcome.problems:
        print_line(f"not measured: {problem}")
    print_line(f"{outcome.verdict}: {outcome.num_samples} samples, {outcome.num_failures} failures in {out}")
    return {"complete": ExitCode.OK, "interrupted": ExitCode.INTERRUPTED}.get(outcome.verdict, PARTIAL)


def burn_in(
    *,
    minutes: float,
    device: str | None,
    ranks: int | None,
    threads: int | None,
    tiny: bool,
    patience: float,
    memory_fraction: float,
) -> Burnt:
    """Repeat checks; what came of it, of all ranks, on each of a launcher's."""
    from validate.burn_in.run import Burn
    from validate.burn_in.run import burn_in as burn

    kind, count, each = _where(device, ranks, threads)
    job = Burn(
        minutes=minutes, device=kind, num_ranks=count, threads=each, tiny=tiny, patience=patience,
        memory_fraction=memory_fraction, command=shlex.join(["shardwise", *sys.argv[1:]]),
    )  # fmt: skip
    if not Launch.of_environment().rank:
        _print(f"{count} {_DEVICES[kind]}, {minutes:g} minutes")
    return burn(job, _print)


_DEVICES: Final[dict[DeviceKind, str]] = {"cuda": "GPUs", "cpu": "CPU processes"}


def _where(device: str | None, ranks: int | None, threads: int | None) -> tuple[DeviceKind, int, int]:
    """Devices, how many ranks, and threads of each. Raises InputError where torch sees no such device, or too few."""
    gpus = count_gpus() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise InputError(Fault(place="--device cuda", problem="torch sees no GPU here", remedy="--device cpu"))
    count, launch = _ranks(ranks, gpus), Launch.of_environment()
    return (
        "cuda" if gpus else "cpu",
        count,
        threads or threads_each(launch.local_size if launch.outside else count),
    )


def _ranks(requested: int | None, gpus: int) -> int:
    launch = Launch.of_environment()
    if launch.outside:
        return launch.size
    if requested and gpus and requested > gpus:
        raise InputError(Fault(place="--ranks", problem=f"{requested} ranks on {gpus} GPUs", remedy=f"at most {gpus}"))
    return requested or gpus or min(CPU_RANKS, usable_cores())


def _own_file(out: Path) -> Path:
    """Under torchrun every rank writes its own file: samples.jsonl, samples.rank1.jsonl, …"""
    rank = Launch.of_environment().rank
    return out.with_name(f"{out.stem}.rank{rank}{out.suffix}") if rank else out


def fit(
    *,
    inputs: Sequence[Path],
    out: Path,
    device: str | None,
    cluster: str | None,
    noisy: bool = False,
    keep: bool = False,
) -> int:
    """Fit `inputs` and write the files. Raises InputError with every reason where nothing can be fitted."""
    from validate.fit import published

    if not Path(os.path.realpath(out)).parent.is_dir():
        raise InputError(Fault(place=str(out), problem="its folder does not exist", remedy="make it first"))
    if cluster is not None:
        Cluster.load(cluster)  # a name that nothing has is an error also where no sample needs it
    kinds = {published.kind_of(path) for path in inputs}
    if len(kinds) > 1:
        problem = f"{', '.join(sorted(kinds))} cannot be fitted together"
        raise CalibrationError(Fault(place="inputs", problem=problem, remedy="one kind of file a call"))
    if kinds == {"samples"}:
        return _fit_samples(inputs, out, device, cluster, noisy=noisy, keep=keep)
    if keep or noisy:
        raise InputError(Fault(place="--keep, --noisy", problem="are for samples", remedy="files of calibrate run"))
    lines = published.fit_tables(inputs, out) if kinds == {"table"} else published.fit_logs(inputs, out, cluster)
    for line in lines:
        _print(line)
    return ExitCode.OK


def _fit_samples(
    inputs: Sequence[Path], out: Path, device: str | None, cluster: str | None, *, noisy: bool, keep: bool
) -> int:
    from validate.fit.machine import write_cluster, write_stack

    found = read_samples(inputs)
    for fault in listed(found.faults):
        _print(f"left out: {fault}")
    name = out.name.removesuffix(SUFFIX).removesuffix(".json") or "machine"
    result, calibration = fitted(found, name, device, cluster)
    calibration = _graded(calibration, found, noisy=noisy)
    calibration.save(out)
    written = [out]
    if result.cluster is not None and result.stack is not None:
        written += [out.with_name(f"{name}.toml"), out.with_name(f"{name}.stack.toml")]
        write_cluster(result.cluster, written[1])
        write_stack(result.stack, written[2])
    if keep:
        written.append(_kept(calibration, result.device.name))
    print(printable("\n".join(map(str, written))))  # noqa: T201  the answer
    return ExitCode.OK


def _kept(calibration: Calibration, device: str) -> Path:
    """The calibration's copy where predictions look for it. Raises InputError where that is switched off."""
    path = place(device)
    if path is None:
        raise InputError(Fault(place="--keep", problem=f"{VARIABLE} is empty: no folder", remedy=f"unset {VARIABLE}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    calibration.save(path)
    return path


def _graded(calibration: Calibration, found: SampleFile, *, noisy: bool) -> Calibration:
    """With its grade among the notes of its origin. Raises CalibrationError for one that measured something else too."""
    from validate.fit.grade import grade

    grades = grade(found, calibration)
    _print(str(grades))
    if grades.letter == "F" and not noisy:
        remedy = "measure again with nothing else running, or --noisy"
        raise CalibrationError(
            Fault(place=", ".join(found.sha256), problem=f"too noisy to fit: {grades}", remedy=remedy)
        )
    provenance = calibration.provenance
    noted = provenance.model_copy(update={"notes": (*provenance.notes, str(grades))})
    return calibration.model_copy(update={"provenance": noted})


def fitted(found: SampleFile, name: str, device: str | None, cluster: str | None) -> tuple[Fit, Calibration]:
    """What samples teach, and what of them was left out or refused on stderr."""
    from validate.fit.machine import fit_machine

    result = fit_machine(found, name, Device.load(device) if device else None)
    for line in (*result.report.lines, *(f"dropped: {d}" for d in result.report.dropped)):
        _print(line)
    for line in result.report.refused:
        _print(f"refused: {line}")
    if result.cluster is None and found.of("collective"):
        return result, _with_links(result.calibration, found, cluster)
    return result, result.calibration


def _with_links(calibration: Calibration, found: SampleFile, cluster: str | None) -> Calibration:
    """NCCL's collectives need to know what they ran over: without --cluster they are kept out, and that is said."""
    from validate.fit.published import links_of

    if cluster is None:
        _print("refused: collectives: the samples do not say what the links are (--cluster NAME|FILE)")
        return calibration
    links, lines = links_of(found, Cluster.load(cluster), found.machine.text("date"))
    for line in lines:
        _print(line)
    return calibration.model_copy(update={"links": links})


def _print_nothing(_: str) -> None:
    pass


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201  progress
