"""A job that torchrun or srun started: the parents of its ranks meet, refuse together, and end with one verdict."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from validate.gpus import ask
from validate.launch import Launch, host_name
from validate.supervise import Peers, PlaceInJob, ignore_sigterm

MEET_S: Final = 120.0  # until the last rank's parent is there: nodes load Python from slow disks
_PACKAGES: Final = ("shardwise", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_JOB: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


@contextmanager
def joined(
    refusal: InputError | None, facts: Mapping[str, str] | None = None, patience: float = 1.0
) -> Iterator[Peers | None]:
    """The other ranks' parents; None for a process that nobody launched, or whose launcher does not say where ranks meet.

    refusal: why this rank would not start: then none does, and all say why. facts: what must be the same on every rank,
    beside versions. patience: a factor on how long ranks wait for each other. Raises InputError.
    """
    launch = Launch.of_environment()
    if not launch.outside or launch.size == 1 or not launch.address:
        if refusal is not None:
            raise refusal
        yield None
        return
    address = "127.0.0.1" if launch.num_nodes == 1 else launch.address
    key = " ".join(os.environ.get(name, "") for name in _JOB)
    place = PlaceInJob(rank=launch.rank, size=launch.size, host=host_name(), address=address, port=launch.port, key=key)
    peers = Peers(place, MEET_S * patience)
    ignore_sigterm()
    peers.begin()
    try:
        _agree(peers, refusal, {**versions(), **(facts or {})})
        yield peers
    finally:
        peers.close()


def versions() -> dict[str, str]:
    """Versions that all ranks must share; without loading torch."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    drivers = ask("driver_version")
    return found | ({"driver": drivers[0][0]} if drivers else {})


def _agree(peers: Peers, refusal: InputError | None, facts: Mapping[str, str]) -> None:
    """Raise InputError on every rank if one refuses, is missing, or has other versions than most."""
    own = [] if refusal is None else [(fault.place, fault.problem, fault.remedy) for fault in refusal.faults]
    answers = peers.gather("begin", {"host": peers.place.host, "facts": dict(facts), "faults": own})
    faults = [*_missing(peers, answers), *_mixed(answers)]
    fault_counts = Counter(tuple(fault) for one in answers.values() for fault in one["faults"])
    everybody = [fault for fault, count in fault_counts.items() if count == len(answers)]
    faults += [Fault(place=place, problem=problem, remedy=remedy) for place, problem, remedy in everybody]
    faults += [
        Fault(place=f"{_who(rank, one)}: {place}", problem=problem, remedy=remedy)
        for rank, one in answers.items()
        for place, problem, remedy in one["faults"]
        if (place, problem, remedy) not in everybody
    ]
    if refusal is not None and len(faults) == len(refusal.faults):
        raise refusal
    InputError.raise_for(faults)


def _who(rank: int, answers: Mapping[str, Any]) -> str:
    return f"rank {rank} on {answers['host']}"


def _missing(peers: Peers, answers: Mapping[int, Any]) -> Iterator[Fault]:
    """Ranks that never came, or were lost while the others waited."""
    lost = {one.rank: f"on {one.host}: {one.detail}" for one in peers.troubles}
    for rank in range(peers.place.size):
        if rank not in answers:
            problem = lost.get(rank, f"not there after {peers.patience_s:g} s")
            remedy = "every rank runs the same command; --patience waits longer"
            yield Fault(place=f"rank {rank}", problem=problem, remedy=remedy)


def _mixed(answers: Mapping[int, Any]) -> Iterator[Fault]:
    """Ranks whose versions are not those of most."""
    for name in dict.fromkeys(name for one in answers.values() for name in one["facts"]):
        values = Counter(one["facts"].get(name, "none") for one in answers.values())
        usual = values.most_common(1)[0][0]
        for rank, one in answers.items():
            value = one["facts"].get(name, "none")
            if value != usual:
                problem = f"has {name} {value}, and {values[usual]} of {len(answers)} ranks have {usual}"
                yield Fault(place=_who(rank, one), problem=problem, remedy="the same software and study on every node")
