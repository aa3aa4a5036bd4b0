"""Instructions of a StepScript: what one rank issues in a step, in host order, without seconds and without addresses.

Two grains. What a described model does is written unit by unit (a unit is a block, or the embedding or head at an end of
the model): `Unshard`, `Run`, `Reshard`, `Gradient`, `Reduce`, grouped into a `Pass` of one micro-batch through a chunk of
layers. What somebody captured of a real program is written op by op: `Launch`, `Communicate`, `Storages`. Every
reader takes both: time (`play.lower`) skips storages, memory skips seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from simulator.base.kernels import Kernel
from simulator.parallel.pipeline import Action

# loss: the head's cross-entropy behind the model's own forward, and before its own backward.
# inputs, weights: halves of a backward that a schedule splits
LAUNCH_QUEUE: Final = 1024  # of CUDA: launches that the device has not begun; the host waits where it is full
Phase = Literal["forward", "loss", "loss_backward", "backward", "inputs", "weights"]
Direction = Literal["forward", "backward", "inputs", "weights"]


class Unshard(NamedTuple):
    """A unit's parameters must be whole before it runs.

    gathers: all-gathers to issue now, as (unit, unit whose run in this pass they wait for; None: none). They may be of
    units ahead, and none where every rank holds the parameters.
    """

    unit: int
    gathers: tuple[tuple[int, int | None], ...] = ()


class Run(NamedTuple):
    """A unit's compute. after: unit whose reduction in this pass must be over, as its buffer is used again."""

    unit: int
    phase: Phase
    after: int | None = None


class Reshard(NamedTuple):
    """The unit has run: of its parameters only the shard need stay."""

    unit: int


class Evict(NamedTuple):
    """What the unit's forward saved leaves the GPU; the unit after the next waits until it has left."""

    unit: int


class Restore(NamedTuple):
    """What the unit's backward needs must be back on the GPU.

    fetches: what to send for now, as (unit, unit whose backward in this pass makes room; None: there is room). It may be
    of units ahead.
    """

    unit: int
    fetches: tuple[tuple[int, int | None], ...] = ()


class Gradient(NamedTuple):
    """The gradients of a unit's parameters exist: they are packed to be reduced, or kept for later micro-batches."""

    unit: int


class Reduce(NamedTuple):
    """The unit's gradients are reduced among ranks, and leave the GPU where the optimizer is elsewhere."""

    unit: int


class GatherUpdated(NamedTuple):
    """The unit's parameters, of which each rank updated a shard, become whole again on all."""

    unit: int
    chunk: int = 0


UnitInstruction = Unshard | Run | Reshard | Evict | Restore | Gradient | Reduce | GatherUpdated


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One micro-batch through a chunk of a rank's layers, in one direction.

    first: the chunk's first forward of the step; last: its last backward. syncs: gradients are reduced in this pass.
    units: instructions by unit, in the order in which the micro-batch passes them; the ends of the model that the chunk
    does not hold have none. action: what a pipeline schedule calls it.
    """

    chunk: int
    micro_batch: int
    direction: Direction
    units: tuple[tuple[UnitInstruction, ...], ...]
    first: bool = False
    last: bool = False
    syncs: bool = False
    action: Action | None = None


class Receive(NamedTuple):
    """What an action needs of another pipeline stage."""

    action: Action


class Send(NamedTuple):
    """What an action made for another pipeline stage."""

    action: Action


class Together(NamedTuple):
    """A forward and a backward of different micro-batches at once. by_layer: a layer of each in turn."""

    forward: Pass
    backward: Pass
    by_layer: bool


class Update(NamedTuple):
    """The optimizer's step, once every gradient is there."""


class Agree(NamedTuple):
    """Replicas that take steps alone agree on their parameters."""


class Measured(NamedTuple):
    """A recorded op with its measured time (`play.lower.recorded`).

    seconds: it ran, of a collective from its last member's arrival on. gap_s: passed before with nothing that it is known to
    have waited for. host_s: until the host had issued it. lane: the stream of a collective.
    """

    seconds: float
    gap_s: float = 0.0
    host_s: float = 0.0
    lane: str = ""


class Launch(NamedTuple):
    """Kernels on a stream. after: labels of launches and collectives on other streams that they wait for.

    stream: 0 is the compute stream; what runs on others beside it is not slowed by it, nor slows it. waits: the host, for
    their end. measured: of a recorded program, which has no kernels to price. handled: what the host does besides: views,
    autograd's nodes, DTensor's operators.
    """

    label: str
    category: str
    kernels: tuple[Kernel, ...]
    after: tuple[str, ...] = ()
    stream: int = 0
    waits: bool = False
    measured: Measured | None = None
    handled: tuple[float, ...] = ()


class Communicate(NamedTuple):
    """A collective of `size_bytes` (of the full tensor) among the ranks of a role (`play.lower.fabric`), on its stream.

    waits: the host, for its end. meets, members: what it is called among several scripts that are played together, and how
    many of them meet. lane: its stream, where that is not the role's. sends: of a message, whether this is the sender's
    end. hooked: hooks around modules issue it, which takes the host their time.
    """

    label: str
    kind: str
    role: str
    size_bytes: int
    after: tuple[str, ...] = ()
    waits: bool = False
    meets: str = ""
    members: int = 1
    lane: str = ""
    sends: bool = True
    hooked: bool = False
    measured: Measured | None = None


class Free(NamedTuple):
    """A storage ends whose room waits for an event before others get it."""

    storage: Hashable
    event: int


class Storages(NamedTuple):
    """Storages that begin and end in a row, as events of a capture: (kind, storage, bytes, stream), (kind, storage).

    stream: whose frees the allocator may reuse at once (`memory.tape`).
    """

    events: Sequence[Sequence[int]]


class Happened(NamedTuple):
    """What the allocator waits for has come."""

    event: int


Issued = Launch | Communicate
Storage = Free | Storages | Happened
Instruction = Pass | Receive | Send | Together | GatherUpdated | Update | Agree | Issued | Storage
