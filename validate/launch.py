"""How this process was started: by itself, or by torchrun or srun as one rank of several."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from simulator.base.errors import Fault, InputError

LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_PORTS = (20_000, 20_000)  # where srun's jobs meet: the first, and how many
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of a named interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """outside: a launcher gave this process its rank. local_rank, local_size: among the ranks of this machine.

    address, port: where ranks meet, as the launcher told; empty and 0 where it did not.
    """

    outside: bool
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.local_size)

    def device(self, visible: int) -> int:
        """Which of the visible GPUs is this rank's. SLURM may show each task its own only: that is number 0 then.

        Raises InputError where there are fewer than ranks, and more than one.
        """
        if visible == 1:
            return 0
        if self.local_rank >= visible:
            problem = f"local rank {self.local_rank} sees {visible} GPUs"
            raise InputError(
                Fault(place="GPUs", problem=problem, remedy="one visible GPU a rank, or all of the node's")
            )
        return self.local_rank

    @property
    def environment(self) -> dict[str, str]:
        """What torch's rendezvous reads, where a launcher did not set it itself."""
        if not self.outside or not self.address:
            return {}
        variables = dict(
            zip(_TORCHRUN, map(str, (self.rank, self.size, self.local_rank, self.local_size)), strict=True)
        )
        return {**variables, "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}

    @property
    def gloo_interface(self) -> dict[str, str]:
        """GLOO_SOCKET_IFNAME unless somebody set it: the loopback on one machine, else the way to rank 0's.

        By itself gloo binds to what the host name resolves to, which is 127.0.1.1 on many nodes.
        """
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return {}
        if not self.outside or self.num_nodes == 1:
            return {"GLOO_SOCKET_IFNAME": LOOPBACK}
        name = interface_to(self.address) if self.address else None
        return {"GLOO_SOCKET_IFNAME": name} if name else {}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """What torchrun's or srun's variables say. Raises InputError where they contradict each other."""
        variables = os.environ if environment is None else environment
        if "RANK" in variables and "WORLD_SIZE" in variables:
            usual = {"LOCAL_RANK": variables["RANK"], "LOCAL_WORLD_SIZE": variables["WORLD_SIZE"]}
            text = {name: variables.get(name, usual.get(name, "")) for name in _TORCHRUN}
            return cls._of(text, "torchrun", variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "0"))
        if "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            text = {name: variables.get(name, "") for name in _SRUN}
            text[_SRUN[3]] = _tasks_here(text[_SRUN[3]], variables.get("SLURM_NODEID", "0"))
            address = variables.get("MASTER_ADDR") or first_host(variables.get("SLURM_STEP_NODELIST", ""))
            return cls._of(text, "srun", address, variables.get("MASTER_PORT") or _srun_port(variables))
        return cls(outside=False)

    @classmethod
    def _of(cls, text: Mapping[str, str], who: str, address: str, port: str) -> Self:
        faults = [
            Fault(place=f"environment: {name}", problem=f"{value!r} is not a whole number", remedy=f"{who} sets it")
            for name, value in {**text, "MASTER_PORT": port}.items()
            if not value.isdigit()
        ]
        InputError.raise_for(faults)
        rank, size, local_rank, local_size = map(int, text.values())
        if rank >= size or local_rank >= local_size:
            problem = f"rank {rank} of {size}, local rank {local_rank} of {local_size}"
            raise InputError(
                Fault(place=f"environment: {next(iter(text))}", problem=problem, remedy=f"as {who} sets them")
            )
        return cls(
            outside=True, rank=rank, size=size, local_rank=local_rank, local_size=local_size, address=address, port=int(port)
        )  # fmt: skip


def host_name() -> str:
    """This machine's name: SLURM's, where it gave one, since nodes of one image may share the system's."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def usable_cores() -> int:
    """Cores that this process may run on; a container or a batch system may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(local_ranks: int) -> int:
    """Threads of each of so many ranks of this machine. SLURM says what a task has; else the cores are shared evenly."""
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if cpus.isdigit() and int(cpus) and "SLURM_STEP_ID" in os.environ and "RANK" not in os.environ:
        return int(cpus)
    return max(1, usable_cores() // local_ranks)


def _tasks_here(text: str, node: str) -> str:
    """Of "4(x2),3" the count of this node."""
    counts: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part.strip())
        if found is None:
            return text
        counts += [found[1]] * int(found[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else text


def first_host(nodes: str) -> str:
    """Of "node[03-06,9],other" the first name: node03."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return f"{found[1]}{found[2] or ''}{found[3] or ''}" if found else ""


def _srun_port(variables: Mapping[str, str]) -> str:
    """Every task of a step comes to the same port by itself."""
    numbers = [int(variables[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if variables.get(name, "").isdigit()]
    return str(_PORTS[0] + sum(number * factor for number, factor in zip(numbers, (1, 7919), strict=False)) % _PORTS[1])


def interface_to(address: str) -> str | None:
    """The network interface from which packets to `address` leave; None where the system does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
        if own.startswith("127."):
            return LOOPBACK
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
