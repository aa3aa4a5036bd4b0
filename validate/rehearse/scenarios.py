"""What is rehearsed: a fault, where it strikes, and what must be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

RANKS, NODES = 8, 2
Launcher = Literal["torchrun", "srun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """job: `validate run --mode full` or `calibrate run`. fault: of validate.faults, or of a rank's own start.

    kind: the verdict that must name rank and host; "refused": none starts, and the rank is named; "slow": the run is
    fine, and says who is slow. patience: on deadlines; those of ranks that hang must be short.
    """

    job: Literal["run", "calibrate"]
    rank: int
    phase: str
    fault: str
    kind: str
    launcher: Launcher = "torchrun"
    patience: float = 1.0
    quick: bool = False

    @property
    def name(self) -> str:
        where = f" at {self.phase}" if self.phase else ""
        return f"{self.job}, {self.launcher}: rank {self.rank} {self.fault}{where}"

    @property
    def host(self) -> str:
        return f"node{self.rank // (RANKS // NODES)}"

    @property
    def at_start(self) -> bool:
        """A fault of the rank's parent, before anything runs."""
        return self.fault in ("other version", "other study", "never comes", "no folder")


def _run(rank: int, phase: str, fault: str, kind: str, **more: object) -> Scenario:
    return Scenario(job="run", rank=rank, phase=phase, fault=fault, kind=kind, **more)  # type: ignore[arg-type]


def _calibrate(rank: int, phase: str, fault: str, kind: str, **more: object) -> Scenario:
    return Scenario(job="calibrate", rank=rank, phase=phase, fault=fault, kind=kind, **more)  # type: ignore[arg-type]


_HANGS: Final = {"patience": 0.08}  # 10 s a phase
SCENARIOS: Final[Sequence[Scenario]] = (
    # a rank that dies, in every phase
    *(_run(5, phase, "kill", "killed") for phase in ("load", "join", "build", "memory", "warm-up 1", "profile")),
    _run(5, "step 2", "kill", "killed", quick=True),
    _run(0, "step 2", "kill", "killed"),
    _run(6, "step 1", "kill", "killed", launcher="srun"),
    _run(1, "step 2", "segfault", "killed"),
    _run(7, "step 2", "abort", "failed"),
    _run(2, "step 1", "exit", "failed", launcher="srun"),
    _run(3, "memory", "quit", "no_result"),
    _run(4, "step 2", "exception", "failed"),
    _run(4, "build", "exception", "failed", launcher="srun"),
    _run(6, "load", "missing", "missing"),
    # memory, disk, ports
    _run(3, "build", "tensor_memory", "out_of_memory", quick=True),
    _run(2, "step 2", "tensor_memory", "out_of_memory", launcher="srun"),
    _run(7, "memory", "host_memory", "out_of_memory"),
    _run(1, "profile", "disk", "storage_full"),
    _run(6, "build", "disk", "storage_full", launcher="srun"),
    _run(4, "join", "port", "port_taken"),
    # ranks that hang
    _run(6, "step 2", "hang", "hung", quick=True, **_HANGS),
    _run(2, "build", "hang", "hung", **_HANGS),
    _run(5, "join", "hang", "hung", launcher="srun", **_HANGS),
    _run(3, "step 1", "loop", "hung", **_HANGS),
    _run(4, "step 2", "stop", "hung", **_HANGS),
    _run(1, "memory", "stop", "hung", launcher="srun", **_HANGS),
    _run(3, "step 2", "garbage", "bad_report"),
    # nodes that are lost: the rank's parent dies with it
    _run(5, "step 2", "parent", "killed", quick=True, launcher="srun"),
    _run(3, "join", "parent", "killed"),
    _run(7, "build", "parent", "killed", launcher="srun"),
    _run(0, "step 2", "parent", "killed"),
    # what does not start
    _run(5, "", "other version", "refused", quick=True),
    _run(2, "", "other study", "refused", launcher="srun"),
    _run(6, "", "never comes", "refused", patience=0.05),
    # a slow rank is no fault, and is named
    _run(5, "step 1", "slow", "slow"),
    # calibrations go on without the phase
    _calibrate(5, "gemm", "kill", "killed", quick=True),
    _calibrate(0, "streams", "kill", "killed"),
    _calibrate(3, "collectives", "kill", "killed", launcher="srun"),
    _calibrate(5, "pairs", "segfault", "killed"),
    _calibrate(6, "overlap", "abort", "failed"),
    _calibrate(2, "attention", "exception", "failed", launcher="srun"),
    _calibrate(7, "optimizer", "tensor_memory", "out_of_memory"),
    _calibrate(4, "storage", "disk", "storage_full"),
    _calibrate(1, "loss", "stop", "hung", patience=0.25),
    _calibrate(3, "groups", "hang", "hung", launcher="srun", patience=0.25),
    _calibrate(5, "gemm", "garbage", "bad_report"),
    _calibrate(6, "transfers", "parent", "killed"),
    _calibrate(4, "", "other version", "refused"),
    _calibrate(2, "", "no folder", "refused", launcher="srun"),
    _calibrate(7, "", "never comes", "refused", launcher="srun", patience=0.05),
)
