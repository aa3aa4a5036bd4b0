"""What `shardwise calibrate check` and `calibrate diff` do with their options."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError, TableError, json_text
from simulator.base.files import write_whole
from simulator.base.schema import check_writable
from simulator.base.units import format_seconds
from simulator.formats.drawing import check_picture
from simulator.formats.study import Study, read_study
from simulator.formats.study.tables import Faults
from simulator.predict import Prediction, predict
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from validate.calibrate import fitted
from validate.check.components import Component, against_baseline, measured
from validate.check.findings import SURE, THRESHOLD, check
from validate.check.fleet import alone, fleet
from validate.check.fleet import text as fleet_text
from validate.check.judged import Judged, corrected, judge
from validate.check.pictures import draw_fleet, draw_history
from validate.check.report import changed_facts, clocks, junit, links, matrix, prometheus, text
from validate.samples import SampleFile, read_samples

WORSE: Final = 1  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """files: of this run, one or one a rank. baseline: earlier files. history: a folder of them; keep: add these to it."""

    files: Sequence[Path]
    baseline: Sequence[Path] = ()
    history: Path | None = None
    keep: bool = False
    threshold: float = THRESHOLD
    junit: Path | None = None
    prometheus: Path | None = None
    plot: Path | None = None
    as_json: bool = False
    page: Callable[[dict[str, Any]], None] = lambda _: None  # given what --json prints


def run_check(options: CheckOptions) -> int:
    """Judge, print, write; exit code 0 or 1. Raises InputError for files that cannot be compared."""
    for path, flag in ((options.junit, "--junit"), (options.prometheus, "--prometheus")):
        if path is not None:
            check_writable(path, flag)
    if options.history is not None and not options.keep and not options.history.is_dir():
        fault = Fault(place=f"--history {options.history}", problem="there is no such folder", remedy="--keep makes it")
        raise InputError(fault)
    new = _read(options.files)
    earlier = _earlier(options, new)
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    found = check(new, earlier, options.threshold)
    if not found and not options.keep:
        problem = "too few ranks or measurements to compare with each other, and no earlier run"
        remedy = "--baseline OLD or --history FOLDER, or a run of three ranks or more"
        raise InputError(Fault(place=", ".join(map(str, options.files)), problem=problem, remedy=remedy))
    if options.plot is not None:
        draw_history(options.plot, [*earlier, new], found)
    facts = changed_facts(new.machine.facts, earlier[-1].machine.facts) if earlier else []
    if options.junit is not None:
        write_whole(options.junit, junit(found), "--junit")
    if options.prometheus is not None:
        write_whole(options.prometheus, prometheus(found, new), "--prometheus")
    bad = any(one.bad for one in found)
    if options.keep and options.history is not None:
        _keep(options.files, options.history, new)
    answer = {"schema_version": 1, "worse": bad, "changed": facts, "findings": [one.as_json() for one in found]}
    answer |= {"clocks": clocks(new)} if clocks(new) else {}
    answer |= {"links": rows} if (rows := links(new)) else {}
    _print(json_text(answer) if options.as_json else "\n".join([*matrix(rows), text(found, facts)]))
    options.page(answer)
    return WORSE if bad else 0


def _earlier(options: CheckOptions, new: SampleFile) -> list[SampleFile]:
    """Earlier runs of the machine, oldest first: never the run itself, which a history holds once it was kept."""
    runs = _distinct([_read([path]) for path in options.baseline] + list(_history(options.history)))
    others = [run for run in runs if run.samples != new.samples]
    if len(others) < len(runs):
        print("left out: the run itself, among the earlier ones", file=sys.stderr)  # noqa: T201  progress
    for one in others:
        _comparable(new, one)
    return sorted(others, key=lambda one: one.machine.text("date"))


def run_fleet(paths: Sequence[Path], *, threshold: float, plot: Path | None, as_json: bool) -> int:
    """One report over many nodes: files of samples, and folders of them (histories). Exit code 0 or 1."""
    if plot is not None:
        check_picture(plot, "--plot")
    runs = _distinct([run for path in paths for run in (_history(path) if path.is_dir() else [_read([path])])])
    if not runs:
        fault = Fault(
            place=", ".join(map(str, paths)), problem="holds no samples", remedy="a --history of `check --keep`"
        )
        raise InputError(fault)
    nodes = fleet(runs, threshold)
    if not any(node.findings for node in nodes):
        problem = "; ".join(alone(nodes))
        raise InputError(Fault(", ".join(map(str, paths)), problem, "files of all nodes, at least three of a kind"))
    if plot is not None:
        draw_fleet(plot, nodes)
    bad = any(node.worst is not None for node in nodes)
    answer = {"schema_version": 1, "worse": bad, "nodes": [node.as_json() for node in nodes]}
    _print(json_text(answer) if as_json else fleet_text(nodes))
    return WORSE if bad else 0


def _distinct(runs: Sequence[SampleFile]) -> list[SampleFile]:
    """Each run once, however often it was given: as a file, in a history."""
    found = list({run.samples: run for run in runs}.values())
    if len(found) < len(runs):
        print(f"left out: {len(runs) - len(found)} of {len(runs)} runs, given twice", file=sys.stderr)  # noqa: T201  progress
    return found


def _read(paths: Sequence[Path]) -> SampleFile:
    found = read_samples(paths)
    for fault in found.faults[:5]:
        print(f"left out: {fault}", file=sys.stderr)  # noqa: T201  progress
    return found


def _history(folder: Path | None) -> Iterator[SampleFile]:
    if folder is None or not folder.is_dir():
        return
    runs: dict[str, list[Path]] = {}
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz"))):
        runs.setdefault(path.name.partition(".rank")[0].partition(".jsonl")[0], []).append(path)
    for paths in runs.values():
        yield _read(paths)


def _comparable(new: SampleFile, old: SampleFile) -> None:
    device, before = new.machine.text("device"), old.machine.text("device")
    if device != before:
        problem = f"is of {before or 'an unnamed device'}, and the new one of {device or 'an unnamed device'}"
        raise InputError(Fault(place=", ".join(old.sha256), problem=problem, remedy="a baseline of the same machine"))


def _keep(files: Sequence[Path], history: Path, new: SampleFile) -> None:
    """Add the run to the history, named by its date; whole or not at all, and never over another."""
    history.mkdir(parents=True, exist_ok=True)
    date = "".join(c for c in new.machine.text("date") if c.isalnum()) or "undated"
    read = [path for path in files if path.name in new.sha256]  # the others were left out, and said
    for index, path in enumerate(read):
        target = history / f"{date}-{new.machine.id}{f'.rank{index}' if index else ''}.jsonl.gz"
        if target.exists():
            continue
        data = path.read_bytes()
        write_whole(target, data if path.suffix == ".gz" else gzip.compress(data, mtime=0), "--history")


# --- diff


def run_diff(old: Path, new: Path, studies: Sequence[Path], *, cluster: str | None, as_json: bool) -> int:
    """What is different between two runs of `calibrate run`, or two calibrations, and what it does to studies' steps."""
    faults = Faults()
    if cluster is not None:  # a name that nothing has is an error also where no study asks for it
        faults.attempt(partial(Cluster.load, cluster))
    sides = [side for path in (old, new) if (side := faults.attempt(partial(_side, path, cluster))) is not None]
    for path in studies:
        faults.attempt(partial(read_study, path, {}, {}, ()))
    if faults:
        raise InputError(faults)
    rows, facts = _changes(*sides) if all(side.samples is not None for side in sides) else ([], [])
    if not rows and not studies:
        problem = "too few measurements of both to compare, and no --study to predict with either"
        raise InputError(Fault(f"{old}, {new}", problem, "two runs of the same phases, or --study STUDY.toml"))
    steps = [_steps(path, *sides) for path in studies]
    if as_json:
        answer = {"schema_version": 1, "changed": facts, "parts": rows, "studies": steps}
        _print(json_text(answer))
        return 0
    lines = [*(f"changed: {line}" for line in facts), *(_row(row) for row in rows if row["beyond_noise"])]
    if sides[0].samples is not None:
        lines.append(f"{sum(row['beyond_noise'] for row in rows)} of {len(rows)} parts differ beyond noise")
    _print("\n".join([*lines, *(_step_line(step) for step in steps)]))
    return 0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a file's samples, None for a calibration; what predicts with it, made when a study needs it."""

    path: Path
    samples: SampleFile | None
    cluster_name: str | None

    def calibration(self, study: Study) -> tuple[Calibration, Study]:
        """Fitted on the study's cluster; of a CPU the machine itself takes the cluster's place."""
        if self.samples is None:
            return Calibration.load(self.path), study
        result, calibration = fitted(self.samples, self.path.name.partition(".")[0], None, self.cluster_name)
        if result.cluster is None:
            return calibration, study
        return calibration, replace(study, cluster=result.cluster, stack=result.stack)


def _side(path: Path, cluster: str | None) -> Side:
    if path.name.endswith(".json"):
        Calibration.load(path)  # a file that is none is an error before anything is fitted
        return Side(path, None, cluster)
    return Side(path, _read([path]), cluster)


def _changes(old: Side, new: Side) -> tuple[list[dict[str, Any]], list[str]]:
    """Parts by category and group, all ranks together: a change of a driver or of NCCL is no rank's own."""
    if old.samples is None or new.samples is None:
        return [], []
    _comparable(new.samples, old.samples)
    logs: dict[Component, list[float]] = {}
    for part, values in against_baseline(measured(new.samples), measured(old.samples)).items():
        who = part.who if part.what == "link" else "every rank"
        logs.setdefault(Component(part.what, who, part.category), []).extend(values)
    judged = {part: one for part, values in sorted(logs.items()) if (one := judge(values)) is not None}
    p = corrected({part: min(1.0, 2 * min(one.p_slower, one.p_faster)) for part, one in judged.items()})
    rows = [_json_row(part, one, p[part]) for part, one in judged.items()]
    return rows, changed_facts(new.samples.machine.facts, old.samples.machine.facts)


def _json_row(part: Component, one: Judged, p: float) -> dict[str, Any]:
    return {
        "who": part.who, "category": part.category, "ratio": one.ratio, "low": one.low, "high": one.high,
        "count": one.count, "confidence": 1 - p, "beyond_noise": p < SURE and abs(one.percent) >= 1,
    }  # fmt: skip


def _row(row: dict[str, Any]) -> str:
    word = "slower" if row["ratio"] > 1 else "faster"
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    return f"{row['who']}: {row['category']}: {row['ratio']:.3f} x ({interval}), {word}, confidence {100 * row['confidence']:.4g} %"


def _steps(path: Path, old: Side, new: Side) -> dict[str, Any]:
    """A study's predicted step with either side's calibration."""
    study = read_study(path, {}, {}, ())
    before, after = (_predicted(study, side) for side in (old, new))
    return {
        "study": str(path), "before_s": float(before.step_s), "after_s": float(after.step_s),
        "before_interval_s": [float(before.low_s), float(before.high_s)],
        "after_interval_s": [float(after.low_s), float(after.high_s)],
        "ratio": float(after.step_s / before.step_s),
    }  # fmt: skip


def _predicted(study: Study, side: Side) -> Prediction:
    if side.samples is not None and side.cluster_name is None and side.samples.machine.text("architecture") != "cpu":
        side = replace(side, cluster_name=_name_of(study.cluster))
    calibration, loaded = side.calibration(study)
    return predict(loaded.model, loaded.plan, loaded.cluster, calibration, loaded.stack)


def _name_of(cluster: Cluster) -> str:
    """The study's cluster by its name, where one is shipped under it."""
    try:
        Cluster.load(cluster.name)
    except InputError:
        fault = Fault(place="--cluster", problem=f"{cluster.name} is a file", remedy="--cluster FILE, the study's")
        raise TableError(fault) from None
    return cluster.name


def _step_line(step: dict[str, Any]) -> str:
    change = 100 * (step["ratio"] - 1)
    return f"{step['study']}: predicted step {format_seconds(step['before_s'])} -> {format_seconds(step['after_s'])} ({change:+.1f} %)"


def _print(answer: str) -> None:
    print(answer)  # noqa: T201  the answer
