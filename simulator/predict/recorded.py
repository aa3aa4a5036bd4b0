"""replay_recording(): a recorded step played by the engine, as it was and as it would be.

Unchanged, a recording gives its own step back, which shows that it was read whole. Every what-if is the difference that a change
makes on the same engine: Daydream (arXiv 2006.03318) and dPRO (arXiv 2205.02473) transform profiled graphs so, Lumos (arXiv
2504.09307) those of language models with their streams and collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.base.errors import ClusterError, Fault, InputError
from simulator.base.patterns import compiled
from simulator.base.sums import summed
from simulator.base.units import counted, format_seconds
from simulator.play.engine import run
from simulator.play.lower.recorded import recorded_programs
from simulator.predict.prediction import Source
from simulator.predict.repriced import AS_IT_WAS, DeviceRatio, Fabric, How, Tally, collective_ratio, sized, volume_ratio
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.work.recorded import what_if
from simulator.work.recorded.ranks import Ranks, aligned
from simulator.work.recorded.recording import HOST_CATEGORY, RecordedOp, Recording
from simulator.work.recorded.script import END, RecordedScript, recorded_script
from simulator.work.recorded.what_if import Op
from simulator.work.script.instructions import Communicate
from simulator.work.trace import Timeline

_SHARDED = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changes of a recorded step; none: it is played as it was.

    faster: (regular expression, factor): what `what_if.matches` so many times as fast. communication: "hidden" or "free".
    without_host: launches cost nothing, as from a CUDA graph. data_parallel: ranks of the largest groups. tokens: factor of
    those of a micro-batch: everything on the compute stream but the optimizer and copies of parameters takes so many times as
    long. without_recompute: no layer's forward is run again.
    cluster: what it would run on; calibration: of its device. recorded_on: what it did run on.
    """

    faster: tuple[tuple[str, float], ...] = ()
    communication: str | None = None
    without_host: bool = False
    data_parallel: int | None = None
    tokens: float = 1.0
    without_recompute: bool = False
    cluster: Cluster | None = None
    calibration: Calibration | None = None
    recorded_on: Cluster | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """What a recorded step takes. recorded_s, replayed_s: as it was, by the profiler and played again; step_s: changed.

    breakdown, before: seconds by category of the slowest rank, changed and as it was; they sum to the step.
    communication: kind -> (exposed, hidden) seconds. repriced: way -> (ops, seconds before, seconds after).
    unshaped: kernels without recorded shapes that another device changes -> how many. changes: in words.
    """

    name: str
    num_ranks: int
    world_size: int | None
    step: int | None
    num_steps: int
    recorded_s: float
    replayed_s: float
    step_s: float
    breakdown: Mapping[str, float]
    before: Mapping[str, float]
    communication: Mapping[str, tuple[float, float]]
    repriced: Mapping[str, tuple[int, float, float]]
    unshaped: Mapping[str, int]
    changes: tuple[str, ...]
    sources: tuple[Source, ...]
    peaks: tuple[int, int] | None
    timeline: Timeline = field(repr=False)


def replay_recording(recordings: Sequence[Recording], what_if: WhatIf | None = None) -> ReplayedStep:
    """Play a recorded step of one rank, or of several. Raises InputError with every fault of what is asked."""
    what_if = what_if or WhatIf()
    ranks = aligned(recordings)
    scripts = [
        recorded_script(one, rank=one.rank or 0, shift_s=shift)
        for one, shift in zip(ranks.recordings, ranks.shifts_s, strict=True)
    ]
    before = _Played(scripts, ranks)
    changes = _Changes(ranks, what_if)
    changed = [replace(one, step=changes.of(one, rec)) for one, rec in zip(scripts, ranks.recordings, strict=True)]
    changes.check()
    after = _Played(changed, ranks) if changes.words else before
    slowest = after.slowest
    timeline = after.timeline
    kinds = dict.fromkeys(span.category for span in timeline.of(slowest) if span.is_collective)
    first = recordings[0]
    return ReplayedStep(
        name=first.name if len(recordings) == 1 else f"{first.name} and {counted(len(recordings) - 1, 'more rank')}",
        num_ranks=len(recordings), world_size=first.world_size, step=first.step, num_steps=len(first.step_times_s),
        recorded_s=max(one.step_s for one in recordings), replayed_s=before.step_s, step_s=after.step_s,
        breakdown=after.breakdown, before=before.breakdown,
        communication=timeline.communication(kinds, slowest),
        repriced={method: (int(n), a, b) for method, (n, a, b) in changes.tally.methods.items()},
        unshaped=dict(sorted(changes.tally.unshaped.items())), changes=tuple(changes.words),
        sources=tuple(_sources(ranks, changes)), peaks=first.peaks, timeline=timeline,
    )  # fmt: skip


class _Played:
    """Scripts played: the step of the slowest rank, each counted from its own begin."""

    def __init__(self, scripts: Sequence[RecordedScript], ranks: Ranks) -> None:
        programs = recorded_programs(scripts, ranks.roles)
        self.timeline = run(programs)
        steps = {}
        for program, script in zip(programs, scripts, strict=True):
            end = next(span for span in reversed(self.timeline.of(program.name)) if span.label == END)
            steps[program.name] = float(end.end_s) - script.shift_s
        self.slowest = max(steps, key=lambda name: steps[name])
        self.step_s = steps[self.slowest]
        parts = {name: float(s) for name, s in self.timeline.breakdown(self.slowest).items() if name != "idle"}
        waited = next(s.shift_s for p, s in zip(programs, scripts, strict=True) if p.name == self.slowest)
        if waited and HOST_CATEGORY in parts:  # until this rank began
            parts[HOST_CATEGORY] = max(0.0, parts[HOST_CATEGORY] - waited)
        self.breakdown = parts


class _Changes:
    """The requested changes, applied to one script after another, with notes."""

    def __init__(self, ranks: Ranks, what_if: WhatIf) -> None:
        self._what_if, self._first = what_if, ranks.recordings[0]
        self.tally, self.words = Tally(), list[str]()
        self._faults: list[Fault] = []
        self._rules = [(self._compiled(text), factor) for text, factor in what_if.faster]
        self._repeated = 0
        self._found = dict.fromkeys((text for text, _ in what_if.faster), 0)
        self._carried = [op.carried for one in ranks.recordings for op in one.ops if op.carried is not None]
        self._widest = max((len(one.ranks) or one.group_size or 0 for one in self._carried), default=0)
        self._sharded = any(one.kind in _SHARDED for one in self._carried)
        self.recorded_on = self._where()
        self._device = self._device_ratio()
        self._fabrics = self._both_fabrics()
        self._tell()
        if self._faults:
            raise InputError(self._faults)

    def of(self, script: RecordedScript, recording: Recording) -> list[Op]:
        """The script's instructions with every change."""
        ops = {label: recording.ops[index] for label, index in script.sources.items()}
        step = what_if.scaled(script.step, lambda one: self._factor(one, ops.get(one.label)))
        if self._what_if.without_recompute:
            step, repeated = what_if.without_recompute(step)
            self._repeated += repeated
        if self._what_if.without_host:
            step = what_if.without_host(step, on_host=recording.on_host)
        if self._what_if.communication == "free":
            step = what_if.free(step)
        return what_if.hidden(step) if self._what_if.communication == "hidden" else step

    def check(self) -> None:
        """Raise InputError for changes that the recording has no ops for."""
        faults = [
            Fault(place=f"--faster {text}", problem="matches no kernel's name and no category", remedy=self._known())
            for text, count in self._found.items()
            if not count
        ]
        if self._what_if.without_recompute and not self._repeated:
            problem = "no layer's forward is run again in it, as far as its attention tells"
            faults.append(Fault(place="--recompute none", problem=problem, remedy="leave it out"))
        InputError.raise_for(faults)

    # -- one op

    def _factor(self, one: Op, op: RecordedOp | None) -> float:
        if op is None or one.measured is None:
            return 1.0
        factor = self._communication(op) if isinstance(one, Communicate) else self._kernel(op)
        for (pattern, times), (text, _) in zip(self._rules, self._what_if.faster, strict=True):
            if pattern is not None and what_if.matches(pattern, one):
                self._found[text] += 1
                factor /= times
        return factor

    def _kernel(self, op: RecordedOp) -> float:
        factor = 1.0
        if self._device is not None:
            factor, method = self._device.of(op)
            self.tally.add(method, op.duration_s, factor)
            if op.operator is None:
                self.tally.unshaped[op.name] += 1
        if op.category != "optimizer" and op.stream == 0 and not what_if.OF_PARAMETERS.search(op.name):
            factor *= self._what_if.tokens
        elif op.category == "optimizer" and self._what_if.data_parallel and self._sharded:
            factor *= self._widest / self._what_if.data_parallel
        return factor

    def _communication(self, op: RecordedOp) -> float:
        if self._fabrics is None and self._what_if.data_parallel is None:
            return 1.0
        factor, method = self._ratio(op)
        self.tally.add(f"collectives {method}", op.duration_s if op.alone_s is None else op.alone_s, factor)
        return factor

    def _ratio(self, op: RecordedOp) -> How:
        if self._fabrics is not None:
            return collective_ratio(op, *self._fabrics, self._resized)
        assert op.carried is not None
        size = len(op.carried.ranks) or op.carried.group_size or 0
        if size != self._widest or not self._what_if.data_parallel:
            return 1.0, AS_IT_WAS
        return volume_ratio(op.carried.kind, size, self._what_if.data_parallel)

    def _resized(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """A group's ranks, of which there are as many as asked where it is one of the largest."""
        count = self._what_if.data_parallel
        if count is None or len(ranks) != self._widest:
            return ranks
        stride = ranks[1] - ranks[0]
        return tuple(ranks[0] + stride * i for i in range(count))

    # -- what is asked, judged

    def _compiled(self, text: str) -> re.Pattern[str] | None:
        found = compiled(text)
        if found is None:
            problem = "no regular expression, or one that could take for ever to try"
            remedy = "as Python's re has them, without repeated groups: gemm, flash.*bwd"
            self._faults.append(Fault(place=f"--faster {text}", problem=problem, remedy=remedy))
        return found

    def _known(self) -> str:
        kinds = dict.fromkeys(op.category for op in self._first.ops)
        return f"categories of this recording: {', '.join(kinds)}"

    def _where(self) -> Cluster | None:
        """The cluster of the recording: as stated, else one of the recorded device, which is enough for kernels."""
        cluster, world = self._what_if.recorded_on, self._first.world_size or self._widest
        return sized(cluster, world, "--recorded-on") if cluster is not None and world else cluster

    def _old_device(self) -> Device | None:
        if self.recorded_on is not None:
            return self.recorded_on.device
        try:
            return Device.load(self._first.device) if self._first.device else None
        except ClusterError:
            return None

    def _device_ratio(self) -> DeviceRatio | None:
        new = self._what_if.cluster
        if new is None:
            return None
        if self._first.on_host:
            problem = "was recorded on a CPU, whose operators say nothing of a GPU's kernels"
            remedy = "shardwise capture predicts the program on a GPU; or record it on one"
            self._faults.append(Fault(place=self._first.name, problem=problem, remedy=remedy))
            return None
        old = self._old_device()
        if old is None:
            unknown = f" ({self._first.device!r} is no device known here)" if self._first.device else ""
            problem = f"does not say which device it was recorded on{unknown}"
            self._faults.append(Fault(place=self._first.name, problem=problem, remedy="--recorded-on CLUSTER"))
            return None
        if old == new.device:
            return None
        return DeviceRatio(old, new.device, self._what_if.calibration)

    def _both_fabrics(self) -> tuple[Fabric, Fabric] | None:
        """Links before and after, where either is changed and the collectives can be priced on both."""
        what_if, world = self._what_if, self._first.world_size or self._widest
        if self._widest < 2 or (what_if.cluster is None and what_if.data_parallel is None) or self._first.on_host:
            return None
        if what_if.data_parallel is not None and world % self._widest:
            problem = f"{world} ranks are no multiple of its largest group, {self._widest}"
            self._faults.append(Fault(place="--dp-ranks", problem=problem))
            return None
        if self.recorded_on is None:
            problem = f"its {len(self._carried):,} collectives are priced anew from the fabric that they ran on, which it does not name"
            self._faults.append(Fault(place=self._first.name, problem=problem, remedy="--recorded-on CLUSTER"))
            return None
        after = world // self._widest * what_if.data_parallel if what_if.data_parallel else world
        new = sized(what_if.cluster or self.recorded_on, after, "--cluster")
        curves = what_if.calibration.links if what_if.calibration else None
        links = default_curves()
        return Fabric(cluster=self.recorded_on, world=world, curves=links), Fabric(
            cluster=new, world=after, curves=curves or links
        )

    def _tell(self) -> None:
        what_if = self._what_if
        self.words += [f"{text} {factor:g} times as fast" for text, factor in what_if.faster]
        if what_if.tokens != 1:
            self.words.append(f"{what_if.tokens:g} times as many tokens a micro-batch")
        self.words += ["without recomputation"] if what_if.without_recompute else []
        if what_if.data_parallel is not None:
            if self._widest < 2:
                problem = "it has no collective of several ranks"
                self._faults.append(Fault(place=f"--dp-ranks {what_if.data_parallel}", problem=problem))
            self.words.append(f"{what_if.data_parallel:,} data-parallel ranks instead of {self._widest:,}")
        if what_if.cluster is not None:
            self.words.append(f"on {what_if.cluster.name} ({what_if.cluster.device.name})")
        self.words += ["launches cost the host nothing"] if what_if.without_host else []
        self.words += [f"communication {what_if.communication}"] if what_if.communication else []


def _sources(ranks: Ranks, changes: _Changes) -> list[Source]:
    """What is recorded, what is inferred."""
    found: list[Source] = []
    for one in ranks.recordings:
        gaps = summed(op.duration_s for op in one.ops)
        where = one.device or ("a CPU" if one.on_host else "a GPU")
        detail = f"{one.name}: {len(one.ops):,} ops, {format_seconds(gaps)} of them on {where}"
        found.append(Source(what="recording", kind="measured", detail=detail))
        found += [Source(what="recording", kind="assumed", detail=note) for note in one.notes]
    found += [Source(what="ranks", kind="assumed", detail=note) for note in ranks.notes]
    if changes.recorded_on is not None:
        found.append(Source(what="recorded on", kind="given", detail=changes.recorded_on.name))
    unknown = changes.tally.methods.get(f"collectives {AS_IT_WAS}")
    if unknown:
        detail = f"{int(unknown[0]):,} collectives without a size, a group or a model take what they took"
        found.append(Source(what="collectives", kind="assumed", detail=detail))
    return found
