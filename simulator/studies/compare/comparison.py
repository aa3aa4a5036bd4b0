"""Several predictions compared with a first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.play.lower import lowered
from simulator.predict import Prediction, memory_of, predict, prediction_of
from simulator.predict.difference import Difference, Timed, difference, sharing, timed
from simulator.predict.parameter_server import Servers, served
from simulator.predict.program import predict_program, usual_stack
from simulator.predict.telemetry import Telemetry, telemetry
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.prices import AtPrice, Prices, cost
from simulator.spec.software.stack import Stack
from simulator.studies.compare.ablations import Gain, ablated, ablated_program
from simulator.studies.search.front import SECONDS_PER_DAY, pareto
from simulator.work.captured.capture import Capture

SCHEMA_VERSION: Final = 2  # rises when a key is removed or changes its meaning; new keys do not raise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One column: its inputs and its name. calibration, stack: None as for `predict`; prices: None: no costs.

    program: what was captured, instead of model and plan; its tokens a step must be known. servers: beside the plan's replicas.
    """

    name: str
    cluster: Cluster
    model: Model | None = None
    plan: Plan | None = None
    program: Capture | None = None
    calibration: Calibration | None = None
    stack: Stack | None = None
    prices: Prices | None = None
    servers: Servers | None = None

    def same_software(self, other: Subject) -> bool:
        """Whether only machines and prices differ."""
        mine, theirs = (self.model, self.plan, self.stack), (other.model, other.plan, other.stack)
        return mine == theirs and self.program == other.program

    def predicted(self, *, quick: bool = False) -> Prediction:
        """quick: a plan's figures, without words about them. Raises as `predict` and `predict_program` do."""
        if self.program is not None:
            return predict_program(self.program, self.cluster, self.calibration, self.stack)
        assert self.model is not None
        assert self.plan is not None
        inputs = (self.model, self.plan, self.cluster, self.calibration, self.stack)
        if not quick:
            return predict(*inputs)
        lowering = lowered(*inputs)
        return prediction_of(lowering, memory_of(lowering, quick=True), quick=True)

    def served(self, prediction: Prediction) -> float | None:
        """Tokens a second with parameter servers; None: not asked for. Raises PlanError."""
        if self.model is None or self.plan is None or self.servers is None:
            return None
        inputs = (self.model, self.plan, self.cluster, self.calibration, self.stack)
        return served(self.servers, prediction.tokens_per_s, *inputs).tokens_per_s

    def counters(self, prediction: Prediction) -> Telemetry | None:
        """The step's use of each part of the machine; not available for a captured program."""
        if self.model is None or self.plan is None:
            return None
        return telemetry(prediction, self.model, self.plan, self.cluster, self.calibration, self.stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A subject's prediction; against_first: its seconds a token over the first's (None for the first itself)."""

    subject: Subject
    prediction: Prediction
    against_first: Difference | None
    gains: tuple[Gain, ...]
    costs: tuple[Cost, ...] = ()
    counters: Telemetry | None = None
    served_tokens_per_s: float | None = None

    @property
    def s_per_token(self) -> float:
        return self.prediction.step_s / self.prediction.tokens_per_step

    @property
    def device_s_per_token(self) -> float:
        return self.s_per_token * self.prediction.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All predictions, the reference first."""

    rows: tuple[Compared, ...]

    @property
    def on_front(self) -> tuple[bool, ...]:
        """Rows that fit and that no other such beats in both seconds and money a token, at each one's cheapest price."""
        fits = [row for row in self.rows if row.prediction.fits]
        best = pareto([(row.s_per_token, min((c.billion_tokens for c in row.costs), default=0.0)) for row in fits])
        found = {id(row): one for row, one in zip(fits, best, strict=True)}
        return tuple(found.get(id(row), False) for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        rows = zip(self.rows, self.on_front, strict=True)
        subjects = [_data(row) | ({"on_front": best} if row.costs else {}) for row, best in rows]
        return {"schema_version": SCHEMA_VERSION, "subjects": subjects}


def compare(
    subjects: Sequence[Subject], *, ablate: bool = True, run_tokens: int | None = None, count: bool = False
) -> Comparison:
    """Predict each and compare it with the first. Raises as `predict` does, and if a cluster has no price.

    count: also how busy each part of the machine is.
    """
    rows: list[Compared] = []
    for subject in subjects:
        prediction = subject.predicted()
        rows.append(
            Compared(
                subject=subject,
                prediction=prediction,
                against_first=_against(subject, prediction, rows[0]) if rows else None,
                gains=_gains(subject, prediction) if ablate else (),
                costs=costs_of(prediction, subject.cluster, subject.prices, run_tokens) if subject.prices else (),
                counters=subject.counters(prediction) if count else None,
                served_tokens_per_s=subject.served(prediction),
            )
        )
    return Comparison(rows=tuple(rows))


def _gains(subject: Subject, prediction: Prediction) -> tuple[Gain, ...]:
    inputs = subject.calibration or Calibration.for_device(subject.cluster.device)
    if subject.program is not None:
        return ablated_program(
            subject.program, subject.cluster, inputs, subject.stack or usual_stack(subject.program), prediction
        )
    assert subject.model is not None
    assert subject.plan is not None
    stack = subject.stack or Stack.of(subject.plan)
    return ablated(subject.model, subject.plan, subject.cluster, inputs, stack, prediction)


def _against(subject: Subject, prediction: Prediction, first: Compared) -> Difference:
    """A subject's prediction against the first's, by seconds a token."""
    mine, theirs = _timed(subject, prediction), _timed(first.subject, first.prediction)
    return difference(*(sharing(mine, theirs) if subject.same_software(first.subject) else (mine, theirs)))


def _timed(subject: Subject, prediction: Prediction) -> Timed:
    step_s, device = float(prediction.step_s) / prediction.tokens_per_step, subject.cluster.device.name
    if subject.plan is None:
        runs = subject.program and (device, *subject.program.signatures)
        return Timed(
            step_s=step_s, spread=prediction.spread, stack_sigma=prediction.stack_sigma, kernels=runs, traffic=runs
        )
    return timed(step_s, prediction.spread, prediction.stack_sigma, subject.plan, device)


def _data(row: Compared) -> dict[str, Any]:
    p, against = row.prediction, row.against_first
    return {
        "name": row.subject.name,
        "model": p.model,
        "cluster": p.cluster,
        "num_devices": p.num_devices,
        "verdict": p.verdict,
        "step_s": float(p.step_s),
        "low_s": float(p.low_s),
        "high_s": float(p.high_s),
        "tokens_per_step": p.tokens_per_step,
        "tokens_per_s": p.tokens_per_s,
        "device_s_per_token": row.device_s_per_token,
        "mfu": p.mfu,
        "used_bytes": p.memory.used_bytes,
        "capacity_bytes": p.memory.capacity_bytes,
        "breakdown_s": {name: float(seconds) for name, seconds in p.breakdown.items()},
        "against_first": asdict(against) | {"distinguishable": against.distinguishable} if against else None,
        "ablations": [asdict(gain) for gain in row.gains],
        "costs": [asdict(one) for one in row.costs],
        **({"served_tokens_per_s": row.served_tokens_per_s} if row.served_tokens_per_s is not None else {}),
        **({"utilisation": busy(row.counters)} if row.counters is not None else {}),
    }


def busy(counters: Telemetry) -> dict[str, dict[str, float]]:
    """Part -> mean and highest utilisation, of the rank class that uses it most."""
    return {name: {"mean": use.mean, "peak": use.peak} for name, (use, _) in counters.busiest.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(AtPrice):
    """Money of one price. run, run_days: of so many tokens, where asked for."""

    step: float
    billion_tokens: float
    run: float | None = None
    run_days: float | None = None


def costs_of(
    prediction: Prediction, cluster: Cluster, prices: Prices, run_tokens: int | None = None
) -> tuple[Cost, ...]:
    """The cost of a plan at each price of its cluster. Raises InputError where there is none."""
    step_s, tokens = float(prediction.step_s), prediction.tokens_per_step
    found = []
    for price in prices.of(cluster):
        step = cost(price, prediction.num_devices, step_s)
        steps = run_tokens / tokens if run_tokens else None
        found.append(
            Cost(
                **prices.told(price),
                step=step,
                billion_tokens=step / tokens * 1e9,
                run=step * steps if steps else None,
                run_days=step_s * steps / SECONDS_PER_DAY if steps else None,
            )
        )
    return tuple(found)
