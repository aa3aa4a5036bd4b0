"""One rank that measures: started by validate.measure, told by one JSON argument, answers with lines on its stdout.

It ends when its parent does: the kernel tells it (Linux), and the pipe that it holds from the parent closes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from validate import bench_collectives, bench_compute, bench_memory
from validate.bench_compute import Item
from validate.machine import describe
from validate.phases import FEWEST, SHARES
from validate.samples import sample_line
from validate.stopwatch import Session, Setting

ITEMS: dict[str, Callable[[Session], Iterator[Item]]] = {
    "host": bench_compute.host_items,
    "gemm": bench_compute.gemm_items,
    "streams": bench_compute.stream_items,
    "attention": bench_compute.attention_items,
    "loss": bench_compute.loss_items,
    "optimizer": bench_compute.optimizer_items,
    "collectives": bench_collectives.collective_items,
    "groups": bench_collectives.group_items,
    "overlap": bench_collectives.overlap_items,
    "transfers": bench_memory.transfer_items,
    "allocations": bench_memory.allocation_items,
    "storage": bench_memory.storage_items,
    "sustained": bench_compute.sustained_items,
}
_STORE_S = 120
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Measure the phases that the argument names."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    told |= {key: tuple(told[key]) for key in ("phases", "done")}
    setting = Setting(**told)
    die_with_parent()
    write = _own_stdout()
    import torch  # noqa: PLC0415  the only import that costs a second

    torch.set_num_threads(setting.threads)
    torch.manual_seed(setting.rank)
    if setting.device == "cuda":
        torch.cuda.set_device(setting.rank % torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(_fraction(torch))
    session = Session(setting=setting, torch=torch, write=write, control=_join(torch, setting))
    facts = describe(
        torch, setting.device, num_ranks=setting.num_ranks, threads=setting.threads, command=["shardwise calibrate run"]
    )
    write(sample_line("machine", **facts))
    for index, phase in enumerate(setting.phases):
        _play(session, phase, SHARES[phase] / sum(SHARES[p] for p in setting.phases[index:]))
    write(sample_line("section", name="", state="done", seconds=0))
    sys.stdout.flush()
    os._exit(0)  # communicators may hang in their own tear-down; everything is written


def _play(session: Session, phase: str, share: float) -> None:
    """Items until the phase's time is over; the first ones always, or nothing could be fitted on a busy machine."""
    session.begin(phase, share)
    for index, item in enumerate(ITEMS[phase](session)):
        if not session.go() and index >= FEWEST.get(phase, 1):
            return
        item()


def _fraction(torch: Any) -> float:  # noqa: ANN401
    free, total = torch.cuda.mem_get_info()
    return float(0.9 * free / total)


def _join(torch: Any, setting: Setting) -> Any:  # noqa: ANN401
    """The process group of all ranks; the gloo group that carries decisions is returned."""
    if setting.num_ranks == 1:
        return None
    dist, patience = torch.distributed, timedelta(seconds=_STORE_S)
    rendezvous = "env://" if "TORCHELASTIC_RUN_ID" in os.environ else Path(setting.folder, "store").as_uri()
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=setting.rank, world_size=setting.num_ranks, timeout=patience
    )
    return dist.new_group(backend="gloo", timeout=patience)


def _own_stdout() -> Callable[[str], None]:
    """A writer of whole lines to the parent; whatever libraries print goes to stderr instead."""
    ours = os.dup(1)
    os.dup2(2, 1)

    def write(line: str) -> None:
        data = line.encode()
        while data:
            data = data[os.write(ours, data) :]

    return write


def die_with_parent() -> None:
    """End this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
