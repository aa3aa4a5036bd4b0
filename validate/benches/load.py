"""What else this machine's cores did while a phase was measured: other processes, and other virtual machines."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from validate.launch import host_name
from validate.stopwatch import Session

_STAT = Path("/proc/stat")
_STEAL = 7  # columns of proc(5): user nice system idle iowait irq softirq steal
_BUSY = (0, 1, 2, 5, 6)


@dataclass(frozen=True, slots=True)
class Load:
    """Ticks of all cores by what they did, and this process's seconds, at one moment."""

    ticks: tuple[int, ...]
    own_s: float

    @classmethod
    def now(cls) -> Self:
        try:
            line = _STAT.read_text(encoding="ascii").splitlines()[0]
        except (OSError, IndexError):
            return cls((), 0.0)
        return cls(tuple(map(int, line.split()[1:9])), time.process_time())

    def since(self, session: Session) -> dict[str, float]:
        """Shares of all cores' time that were stolen, and that processes other than ranks used; empty where nobody counts."""
        now = Load.now()
        own = _own_here(session, now.own_s - self.own_s)
        if not self.ticks or len(now.ticks) != len(self.ticks):
            return {}
        spent = [after - before for after, before in zip(now.ticks, self.ticks, strict=True)]
        total = sum(spent)
        if total <= 0:
            return {}
        ranks = own * os.sysconf("SC_CLK_TCK")
        others = max(0.0, sum(spent[i] for i in _BUSY) - ranks)
        return {"steal_share": round(spent[_STEAL] / total, 4), "others_share": round(others / total, 4)}


def _own_here(session: Session, own_s: float) -> float:
    """Seconds of all ranks on this host."""
    if session.control is None:
        return own_s
    pids: list[Any] = [None] * session.num_ranks
    session.torch.distributed.all_gather_object(pids, (host_name(), own_s), group=session.control)
    return float(sum(seconds for host, seconds in pids if host == host_name()))
