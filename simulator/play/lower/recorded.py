"""Recorded scripts as programs: measured times on the recording's own streams, without a cost model or link loads."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.work.program import COMPUTE_STREAM, Collective, CollectiveCost, Compute, Program, ProgramOp
from simulator.work.recorded.script import HOST_STREAM, RecordedScript
from simulator.work.script.instructions import Communicate, Launch, Measured

GAP = "gaps"  # category of what passes before an op with nothing that it is known to wait for


def recorded_programs(scripts: Sequence[RecordedScript], joined: frozenset[str] = frozenset()) -> list[Program]:
    """A program a rank. joined: roles whose collectives the ranks of all scripts that have any meet in, in order."""
    roles = [{one.role for one in script.step if isinstance(one, Communicate)} for script in scripts]
    members = {role: sum(role in each for each in roles) for role in joined}
    return [_Lowering(script, members).program() for script in scripts]


class _Lowering:
    def __init__(self, script: RecordedScript, members: dict[str, int]) -> None:
        self._script, self._members = script, members
        self._ops: list[ProgramOp] = []
        self._ids: dict[str, int] = {}
        self._met: dict[str, int] = {}  # collectives so far of each role

    def program(self) -> Program:
        for one in self._script.step:
            measured = one.measured or Measured(0.0)
            after = tuple(sorted({self._ids[label] for label in one.after}))
            if isinstance(one, Launch):
                self._launch(one, measured, after)
            else:
                self._communicate(one, measured, after)
            self._ids[one.label] = len(self._ops) - 1
        return Program(name=f"rank {self._script.rank}", num_ranks=1, ops=tuple(self._ops))

    def _launch(self, one: Launch, measured: Measured, after: tuple[int, ...]) -> None:
        named = {0: COMPUTE_STREAM, HOST_STREAM: "host"}
        stream = named.get(one.stream, f"stream {one.stream}")
        parts = ((GAP, measured.gap_s), (one.category, measured.seconds))
        self._compute(one.label, stream, after, parts, measured.host_s, waits=one.waits)

    def _communicate(self, one: Communicate, measured: Measured, after: tuple[int, ...]) -> None:
        stream, host_s = f"nccl:{measured.lane}", measured.host_s
        if measured.gap_s:
            self._compute(f"before {one.label}", stream, after, ((GAP, measured.gap_s),), host_s)
            after, host_s = (), 0.0
        number = self._met[one.role] = self._met.get(one.role, 0) + 1
        joined = self._members.get(one.role, 1)
        whose = "" if joined > 1 else f" of {self._script.rank}"
        self._ops.append(
            Collective(
                id=len(self._ops),
                stream=stream,
                after=after,
                label=one.label,
                kind=one.kind,
                key=f"{one.role}:{number}{whose}",
                members=joined,
                cost=CollectiveCost(latency_s=measured.seconds, link_bytes={}),
                size_bytes=one.size_bytes,
                host_s=host_s,
                blocking=one.waits,
            )
        )

    def _compute(
        self,
        label: str,
        stream: str,
        after: tuple[int, ...],
        parts: tuple[tuple[str, float], ...],
        host_s: float,
        *,
        waits: bool = False,
    ) -> None:
        nonzero = tuple((category, seconds) for category, seconds in parts if seconds)
        self._ops.append(
            Compute(
                id=len(self._ops),
                stream=stream,
                after=after,
                label=label,
                duration_s=sum(seconds for _, seconds in nonzero),
                parts=nonzero,
                host_s=host_s,
                blocking=waits,
            )
        )
