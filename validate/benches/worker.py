"""One rank that measures: `python -m validate.benches.worker SETTING.json`, supervised (`validate.supervise`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from validate.benches import (
    Item,
    attention,
    collectives,
    host,
    libraries,
    memory,
    pairs,
    parts,
    passes,
    products,
    variants,
)
from validate.benches.load import Load
from validate.gpus import ClockLog
from validate.launch import Launch, host_name
from validate.machine import describe, own_gpu
from validate.phases import FEWEST, SHARES
from validate.report import RankReport, kind_of
from validate.report import describe as describe_error
from validate.stopwatch import Session, SessionSettings

ITEMS: dict[str, Callable[[Session], Iterator[Item]]] = {
    "host": host.host_items,
    "gemm": products.gemm_items,
    "streams": passes.stream_items,
    "attention": lambda s: chain(attention.attention_items(s), variants.decoding_items(s)),
    "loss": parts.loss_items,
    "optimizer": parts.optimizer_items,
    "collectives": collectives.collective_items,
    "pairs": pairs.pair_items,
    "groups": collectives.group_items,
    "overlap": collectives.overlap_items,
    "transfers": memory.transfer_items,
    "allocations": memory.allocation_items,
    "storage": memory.storage_items,
    "sustained": lambda s: chain(products.sustained_items(s), variants.variant_items(s)),
    "libraries": libraries.library_items,
}


def main(path: str) -> int:
    """Measure the phases that the file names. Exit status: 0 when done, 1 with a fault reported."""
    report = RankReport.to_parent()
    try:
        job: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        job |= {key: tuple(job[key]) for key in ("phases", "done")}
        measure(SessionSettings(**job), report)
    except BaseException as exc:  # noqa: BLE001  whatever it is, the parent must be told
        report.fault(kind_of(exc), describe_error(exc))
        return 1
    return 0


def measure(setting: SessionSettings, report: RankReport) -> None:
    """Every phase of one rank."""
    session = begun(setting, report)
    log = clock_log(session)
    for index, phase in enumerate(setting.phases):
        _play(session, phase, SHARES[phase] / sum(SHARES[p] for p in setting.phases[index:]), log)
    log.close()
    report.result({})


def clock_log(session: Session) -> ClockLog:
    """What this rank's GPU says of its clocks from now on."""
    return ClockLog(own_gpu(session.torch.cuda.current_device()) if session.gpu else None)


def begun(setting: SessionSettings, report: RankReport) -> Session:
    """A rank that has its device, has met the others, and has said what machine it is."""
    import torch

    torch.set_num_threads(setting.threads)
    torch.manual_seed(setting.rank)
    launch = Launch.of_environment()
    if setting.device == "cuda":
        visible = torch.cuda.device_count()
        number = launch.device(visible) if launch.outside else setting.rank
        torch.cuda.set_device(number)
        torch.cuda.set_per_process_memory_fraction(_fraction(torch, setting.memory_fraction))
    control = _join(torch, setting, launch)
    hosts = _hosts(torch, setting, control)
    session = Session(
        setting=setting, torch=torch, report=report, control=control, host=host_name() if len(hosts) > 1 else ""
    )
    facts = describe(
        torch, setting.device, num_ranks=setting.num_ranks, threads=setting.threads, command=[setting.command]
    )
    # ranks of one run are one machine to a fit, whatever host they sit on
    record = {**facts, "hostname": hosts[0], "num_hosts": len(hosts), "memory_cap_bytes": session.free_bytes}
    report.sample({"kind": "machine", **record})
    return session


def _play(session: Session, phase: str, share: float, log: ClockLog) -> None:
    """Items until the phase's time is over; the first ones always, or nothing could be fitted on a busy machine."""
    log.taken()  # what was read between phases is of none
    load = Load.now()
    session.begin(phase, share)
    for index, item in enumerate(ITEMS[phase](session)):
        if index >= FEWEST.get(phase, 1) and not session.go():
            break
        item()
    others = load.since(session)
    session.end({**log.taken(), **(others if session.setting.rank == 0 else {})})


def _fraction(torch: Any, share: float) -> float:  # noqa: ANN401
    free, total = torch.cuda.mem_get_info()
    return float(share * free / total)


def _hosts(torch: Any, setting: SessionSettings, control: Any) -> list[str]:  # noqa: ANN401
    """Names of the machines that take part, rank 0's first."""
    if control is None:
        return [host_name()]
    hosts: list[Any] = [None] * setting.num_ranks
    torch.distributed.all_gather_object(hosts, host_name(), group=control)
    return list(dict.fromkeys(hosts))


def _join(torch: Any, setting: SessionSettings, launch: Launch) -> Any:  # noqa: ANN401
    """The process group of all ranks; the gloo group that carries decisions is returned."""
    if setting.num_ranks == 1:
        return None
    dist, patience = torch.distributed, timedelta(seconds=setting.join_s)
    backend = "nccl" if setting.device == "cuda" else "gloo"
    where = "env://" if launch.outside else Path(setting.folder, "store").as_uri()
    store, rank, size = next(dist.rendezvous(where, setting.rank, setting.num_ranks, timeout=patience))
    store.set_timeout(patience)
    # the launcher's store outlives an attempt, and remembers what its ranks told each other
    apart = dist.PrefixStore(f"shardwise-{setting.attempt}", store)
    dist.init_process_group(backend, store=apart, rank=rank, world_size=size, timeout=patience)
    return dist.new_group(backend="gloo", timeout=patience)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # communicators may hang in their own tear-down; everything is written
