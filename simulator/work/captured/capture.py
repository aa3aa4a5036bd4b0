"""Capture files: what one step of a program does on some of its ranks, in host order. gzip of one JSON object (version 2).

    format, version    "shardwise capture", 2
    torch, target      version of torch; what was run, as it was given
    world_size, gpus_per_node, device
    signatures         each operator once: [name, arguments, results]; a tensor is ["T", dtype, shape, strides]
                       (strides null: contiguous; a fifth entry "cpu" or "pinned" where it is not on the GPU)
    names              paths of modules, kinds of collectives
    groups             ranks of each process group
    ranks              one object for each captured rank, the first of its kind:
      rank             its number
      categories       storage -> what it is for, as memory names it
      answers          what only a real run knows, and was answered: what -> how often
      host             phase -> what the host did beside launches, as counts in the order of `HOST`; absent in older files
      events           [kind, ...], see `Kind`; in the file `tokens` of all ranks, see `simulator.work.captured.folding`
      steady           index of the event at which the recorded step begins; storages are followed from the begin, and
                       what is kept of operators until then is the first product of a forward and of a backward
                       (older files: none), since a thread's first one takes cuBLAS's workspace
    costs              signature -> what its author says that it costs, where a `kernel_cost` did
    tokens_per_step    of all ranks, where somebody said so when it was captured

Written by `validate.capture`, read (`simulator.formats.readers.capture`) without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from simulator.work.captured.cost import KernelCost


class Kind(IntEnum):
    """What an event is, and its values."""

    OPERATOR = 0  # signature, stream (or `CPU`), name of the module, phase
    COLLECTIVE = 1  # number, name of the kind, group, bytes of the full tensor, stream
    ALLOCATE = 2  # storage, bytes, stream
    FREE = 3  # storage
    RECORD = 4  # event, stream
    WAIT_EVENT = 5  # stream, event
    WAIT_STREAM = 6  # stream, the stream waited for
    WAIT_WORK = 7  # stream, number of the collective
    SYNCHRONIZE = 8  # stream (-1: the device): the host waits
    WAIT_HOST = 9  # event: the host waits
    RECORD_STREAM = 10  # storage, stream that uses it
    STEP = 11  # number of the step that ended
    # number (counted with the collectives), 0 sent 1 received, group, peer, bytes, stream, batch (-1: alone)
    MESSAGE = 12


ARITY = {
    Kind.OPERATOR: 4,
    Kind.COLLECTIVE: 5,
    Kind.ALLOCATE: 3,
    Kind.FREE: 1,
    Kind.RECORD: 2,
    Kind.WAIT_EVENT: 2,
    Kind.WAIT_STREAM: 2,
    Kind.WAIT_WORK: 2,
    Kind.SYNCHRONIZE: 1,
    Kind.WAIT_HOST: 1,
    Kind.RECORD_STREAM: 2,
    Kind.STEP: 1,
    Kind.MESSAGE: 7,
}  # fmt: skip  values of each kind of event


class Phase(IntEnum):
    """What a program does meanwhile."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


# Operators that launch nothing; autograd's nodes; DTensor's own operators; tensors that become DTensors, or tensors again;
# changes of a DTensor's layout
HOST = ("views", "nodes", "dispatches", "wraps", "layouts")
VIEW, NODE, DISPATCH, WRAP, LAYOUT = range(len(HOST))

CPU = 1 << 21  # in place of a stream: the host runs an operator on its own tensors
STATE = ("parameters", "optimizer_state")  # categories of what a checkpoint saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured rank. events: of all steps until the recorded one ended, which begins at `steady`.

    others: further ranks of the same file, which have no others themselves.
    """

    target: str
    torch: str
    rank: int
    world_size: int
    gpus_per_node: int
    device: str
    signatures: Sequence[tuple[str, Any, Any]]
    names: Sequence[str]
    groups: Sequence[tuple[int, ...]]
    categories: Mapping[int, str]
    answers: Mapping[str, int]
    events: Sequence[Sequence[int]]
    steady: int
    others: tuple[Capture, ...] = ()
    costs: Mapping[int, KernelCost] = field(default_factory=dict)
    tokens_per_step: int = 0
    host: Mapping[Phase, tuple[int, ...]] = field(default_factory=dict)

    def standing(self, at: int | None = None) -> dict[int, Sequence[int]]:
        """Storages that are there when the recorded step begins, or before event `at` -> the events that began them."""
        found: dict[int, Sequence[int]] = {}
        for event in self.events[: self.steady if at is None else at]:
            if event[0] == Kind.ALLOCATE:
                found[event[1]] = event
            elif event[0] == Kind.FREE:
                del found[event[1]]
        return found

    def resident(self, at: int | None = None) -> dict[int, int]:
        """The bytes of `standing`."""
        return {storage: event[2] for storage, event in self.standing(at).items()}

    @property
    def state_bytes(self) -> int:
        """Of all ranks, what several hold counted once: this rank's, times the ranks among which gradients are scattered."""
        own = sum(size for storage, size in self.resident().items() if self.categories.get(storage) in STATE)
        calls = (event for event in self.events[self.steady :] if event[0] == Kind.COLLECTIVE)
        # with tensor parallelism among activations too, which no file tells apart
        scatters = [self.groups[event[3]] for event in calls if self.names[event[2]] == "reduce_scatter"]
        return own * max(map(len, scatters), default=1)
