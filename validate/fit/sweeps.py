"""Published nccl-tests sweeps as the simulator's own calls, by the rules of the backtest; and which rows are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from simulator.base.errors import InputError
from simulator.formats.readers.measured_table import few_rows, read_collectives
from simulator.studies.backtest.collective_rules import degraded, resolve
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import CollectiveRow
from simulator.work.collectives.call import Call
from simulator.work.collectives.cost import call_of

MIN_BYTES, MID_BYTES, LARGE_BYTES = 1024, 64 * 2**10, 64 * 2**20


@dataclass(frozen=True)
class Sample:
    """One measured call: the simulator's own description of it, and how long it took. gpu, nodes: to split by."""

    machine: str
    call: Call
    time_s: float
    gpu: str = ""

    @property
    def place(self) -> str:
        return f"{self.call.kind} {self.call.place.num_domains}x{self.call.place.ranks_per_domain}"

    @property
    def network(self) -> str:
        """Kind of the network between nodes; "" inside one."""
        return self.call.network if self.call.place.num_domains > 1 else ""


def read_samples(path: Path) -> Iterator[tuple[Sample | None, str]]:
    """Each row as a sample, or None and why it is left out; rows equal to an earlier one are passed over."""
    seen: set[CollectiveRow] = set()
    for row in few_rows(read_collectives(path), str(path)):
        if not isinstance(row, CollectiveRow):
            yield None, "bad rows"
            continue
        plain = replace(row, line=0)
        if plain not in seen:
            seen.add(plain)
            yield _sample(row)


def _sample(row: CollectiveRow) -> tuple[Sample | None, str]:
    reason = left_out(row)
    if reason:
        return None, reason
    try:
        run = resolve(row)
    except RefusedError as exc:
        return None, exc.kind
    except InputError as exc:
        return None, f"{exc.noun} refused"
    if run.assumed and row.usual_network != "y":
        return None, "network unknown"
    call = call_of(run.kind, run.size_bytes, run.shape, run.cluster, run.nccl)
    source = row.source.split("@")[0].removeprefix("github:").removeprefix("https://github.com/")
    gpu = row.gpu.split(" (")[0]
    machine = f"{source} {gpu} {row.notes[:40] if row.n_nodes != 1 else ''}".strip()
    return Sample(machine, call, row.time_us * 1e-6, gpu), ""


def left_out(row: CollectiveRow) -> str:
    """Empty, or why the row is not fitted: what its table says, or too small a message."""
    small = "below 1 KiB" if row.size_bytes < MIN_BYTES else ""
    return row.left_out or ("degraded" if degraded(row) else small)


def band(size_bytes: int) -> str:
    """The three bands that quality is reported in."""
    return "small" if size_bytes < MID_BYTES else "mid" if size_bytes < LARGE_BYTES else "large"
