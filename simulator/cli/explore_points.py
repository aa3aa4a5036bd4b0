"""What `shardwise explore` evaluates: a study at every combination of its axes' values, on all cores, kept in a journal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import TypeAdapter, create_model

from simulator.base.errors import Fault, InputError
from simulator.base.fit import Fit
from simulator.base.processes import mapped
from simulator.base.schema import nearest
from simulator.formats.study import Study, read_study
from simulator.formats.study.tables import ROOTS
from simulator.predict import Prediction, predict
from simulator.spec.plan import Plan
from simulator.spec.prices import Prices, cost
from simulator.studies.search import Journal
from simulator.studies.search.journal import checked
from simulator.studies.search.study import identity_of

_SPAN: Final = re.compile(r"\d.*\.\.\d.*")  # LOW..HIGH
NOUNS: Final = ("model", "cluster", "nodes", "calibration")
MOST_POINTS: Final = 20_000
DIGITS: Final = 6  # of a figure: more than any prediction can tell, and a page of thousands stays small
ILLEGAL: Final = "illegal"
_Illegal = Literal["illegal"]
Record = dict[str, Any]
FIGURES: Final = (
    *("step_s", "low_s", "high_s", "tokens_per_s", "mfu", "used_bytes", "capacity_bytes", "num_devices"),
    *("device_s_per_token", "communication_s", "waiting_s", "billion_tokens"),
)
Point = tuple[str, ...]  # KEY=VALUE of each axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What varies, and its values as given."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """KEY=V,V of --vary. Raises InputError."""
        key, _, values = (part.strip() for part in text.partition("="))
        found = tuple(dict.fromkeys(one.strip() for one in values.split(",") if one.strip()))
        key = "nodes" if key == "cluster.nodes" else f"plan.{key}" if key in Plan.flat_fields() else key
        place = f"--vary {text}"
        if not found:
            raise InputError.at(place, "has no values", "--vary plan.tp=1,2,4")
        if spans := [one for one in found if _SPAN.fullmatch(one)]:
            remedy = "name each value: --vary plan.tp=1,2,4; `shardwise sensitivity --vary` draws from ranges"
            raise InputError.at(place, f"{spans[0]} is a range", remedy)
        if key not in NOUNS and key.partition(".")[0] not in (*ROOTS, "link"):
            known = [*NOUNS, *(f"plan.{name}" for name in Plan.flat_fields())]
            raise InputError.at(place, f"there is no {key!r}", nearest(key, known))
        return cls(key=key, values=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """A study and its axes. flags, settings: as for predict. prices: where costs are asked for."""

    file: Path | None
    flags: Mapping[str, str]
    settings: tuple[str, ...]
    axes: tuple[Axis, ...]
    prices: Prices | None = None

    @property
    def count(self) -> int:
        """Number of combinations."""
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def points(self) -> list[Point]:
        """Every combination, the last axis fastest."""
        named = [[f"{axis.key}={value}" for value in axis.values] for axis in self.axes]
        return list(product(*named))

    def study(self, point: Sequence[str] = ()) -> Study:
        """The study at a point. Raises InputError."""
        flags, settings = dict(self.flags), list(self.settings)
        for one in point:
            key, _, value = one.partition("=")
            if key in NOUNS:
                flags[key] = value
            else:
                settings = [old for old in settings if old.partition("=")[0].strip() != key]
                settings.append(one)
        return read_study(self.file, flags, {}, settings)

    def check(self) -> Study:
        """The study as it stands. Raises InputError with every fault of it, and of each axis' values alone."""
        faults: dict[Fault, None] = {}
        study = self.study()
        if self.count > MOST_POINTS:
            problem = f"{self.count:,} combinations"
            faults[Fault("--vary", problem, f"at most {MOST_POINTS:,}: fewer values or axes")] = None
        for axis in self.axes:
            for value in axis.values:
                faults |= dict.fromkeys(self._faults_of(axis, value))
        if self.prices is not None:
            self.prices.of(study.cluster)
        InputError.raise_for(faults)
        return study

    def _faults_of(self, axis: Axis, value: str) -> Iterator[Fault]:
        """Faults of a value on its own. A plan that is illegal with it is not a fault but a result."""
        try:
            self.study((f"{axis.key}={value}",))
        except InputError as exc:
            for fault in exc.faults:
                if fault.place in (f"--set {axis.key}", f"--{axis.key}"):
                    yield replace(fault, place=f"--vary {axis.key}={value}")

    @property
    def identity(self) -> str:
        """A hash of everything that a record depends on, but for the point."""
        return identity_of("explore", *self.study().parts, self.prices)


class PointJournal(Journal):
    """A journal of records by point."""

    def records(self) -> dict[str, Record]:
        """All records by point. Raises InputError if a row cannot be read."""
        figures: dict[str, Any] = dict.fromkeys(FIGURES, (float, ...)) | {"billion_tokens": (float, 0.0)}
        run = create_model("Run", verdict=(Fit, ...), **figures)
        row = TypeAdapter[Any](run | create_model("Illegal", verdict=(_Illegal, ...), why=(str, ...)))
        return self._read(lambda text: checked(row, text))

    def keep(self, key: str, record: Record) -> None:
        """Append a record; it is on disk when this returns."""
        self._write(key, json.dumps(record, ensure_ascii=False))


def explored(
    exploration: Exploration, store: PointJournal | None, jobs: int, on_progress: Callable[[int, int], None]
) -> list[Record]:
    """One record per point, in order; points in the journal are not predicted again."""
    points = exploration.points
    known = store.records() if store is not None else {}
    missing = [point for point in points if json.dumps(point) not in known]
    found = mapped(_evaluated, [(exploration, point) for point in missing], jobs, chunk=8)
    for done, (point, record) in enumerate(zip(missing, found, strict=True), start=1):
        if store is not None:
            store.keep(json.dumps(point), record)
        known[json.dumps(point)] = record
        on_progress(done, len(missing))
    return [known[json.dumps(point)] for point in points]


def _evaluated(task: tuple[Exploration, Point]) -> Record:
    exploration, point = task
    try:
        study = exploration.study(point)
        prediction = predict(*study.parts)
    except InputError as exc:
        return {"verdict": ILLEGAL, "why": str(exc.faults[0])}
    record = record_of(prediction)
    if exploration.prices is not None:
        step = cost(exploration.prices.cheapest(study.cluster), prediction.num_devices, prediction.step_s)
        record["billion_tokens"] = _rounded(step / (prediction.tokens_per_step / 1e9))
    return record


def record_of(p: Prediction) -> Record:
    """The figures of a prediction that points are compared by."""
    exposed = sum(float(s) for name, s in p.breakdown.items() if name.startswith(("exposed", "wait", "interference")))
    waits = sum(float(p.breakdown.get(name, 0.0)) for name in ("bubble", "host", "idle"))
    figures = {
        "step_s": p.step_s,
        "low_s": p.low_s,
        "high_s": p.high_s,
        "tokens_per_s": p.tokens_per_s,
        "mfu": p.mfu,
        "used_bytes": p.memory.used_bytes,
        "capacity_bytes": p.memory.capacity_bytes,
        "num_devices": p.num_devices,
        "device_s_per_token": p.step_s * p.num_devices / p.tokens_per_step,
        "communication_s": exposed,
        "waiting_s": waits,
    }
    return {"verdict": str(p.verdict), **{name: _rounded(value) for name, value in figures.items()}}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{float(value):.{DIGITS}g}")
