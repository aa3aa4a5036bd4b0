"""Buffers: what an implementation of data parallelism allocates and frees around the units of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS
from simulator.work.parameters import is_matrix
from simulator.work.script.queries import trained_tensors, units
from simulator.work.script.sharding import ParameterUnit, Shape, keeps_layers, keeps_root, pieces, shard_ranks
from simulator.work.script.storage import ROOT, Storages


class Buffers:
    """What an implementation of data parallelism holds around the units of a step. This one: their gradients.

    unit: ROOT, or a layer's number among those of the rank. ahead: units whose parameters are gathered meanwhile.
    """

    keeps_gradients = True  # parameter gradients stay after the block's backward
    head = ROOT  # the head's unit
    late = False  # now: weights' gradients come apart from those of the inputs, behind which their unit's hook runs

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        self.storages, self.model, self.plan = storages, model, plan
        self.gradients: list[int] = []
        self.whole_table_numel = 0  # of the embedding, where DTensor makes its gradient whole on every rank
        self.stream_bytes = 0  # of a unit's input, where checkpoints are re-entrant
        self.redistributed_bytes = 0  # gradients that the optimizer first brings into their parameters' layout

    @property
    def adds_in_place(self) -> bool:
        """Gradients are there, and later ones are added to each as they come."""
        return self.keeps_gradients and bool(self.gradients)

    def begin(self) -> None:
        """Before the first micro-batch."""

    def before_forward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        """Parameters of the unit must be there."""

    def after_forward(self, unit: int) -> None:
        """They may go."""

    def end_forward(self) -> None:
        """A chunk's forward is over that ends without the head."""

    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        """They must be there again."""

    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:  # noqa: ARG002
        """Parameter gradients of the unit exist: (slot, elements) in the order of the backward."""
        if self.plan.optimizer.in_backward:
            self.storages.free(*[slot for slot, _ in gradients])
            return
        self.gradients.extend(slot for slot, _ in gradients)

    def after_inputs(self, unit: int) -> None:
        """The unit's hook in a half of the backward that makes its inputs' gradients alone."""

    def end_backward(self) -> None:
        """A micro-batch's backward is over."""

    def optimizer(self, state: Callable[[], None]) -> None:
        """The optimizer's step: `state` creates its state the first time."""
        state()
        if self.redistributed_bytes:
            self.storages.free(self.storages.alloc(self.redistributed_bytes, "temporaries"))
        self.temporaries([numel for tensor in self.stepped() for numel in tensor])

    def agree(self) -> None:
        """Replicas that took steps alone reduce one flat copy of their parameters."""
        if self.plan.sync_every_steps > 1:
            size = sum(self._trained)
            self.storages.free(self.storages.alloc(size, "temporaries"))

    def stepped(self) -> list[tuple[int, ...]]:
        """Elements of the tensors that the optimizer steps on this rank."""
        size = DTYPE_BYTES[self.plan.precision.master]
        return [(num_bytes // size,) for num_bytes in self._trained]

    @cached_property
    def _trained(self) -> list[int]:
        return trained_tensors(self.model, self.plan)

    def temporaries(self, numels: Sequence[int]) -> None:
        """Square roots of the second momenta: a group's at once (foreach), two of one parameter (loop), none (fused)."""
        # the moments before the step, which tell the gradient that was summed
        if self.plan.deepspeed.one_bit.kind == "lamb":
            self.storages.free(self.storages.alloc(4 * sum(numels), "temporaries"))
        on_host = self.plan.offload.optimizer != "none"
        if OPTIMIZERS[self.plan.optimizer.kind].matrices or self.plan.optimizer.kind == "adafactor":
            self._single()
            return
        if on_host or self.plan.optimizer.kind not in ("adam", "adamw") or self.plan.optimizer.impl == "fused":
            return
        size = DTYPE_BYTES[self.plan.optimizer.dtype]
        if self.plan.optimizer.impl == "foreach":
            for group in foreach_groups(numels, self.model, self.plan):
                self.storages.free(*self.storages.alloc_each([numel * size for numel in group], "temporaries"))
            return
        denominator: list[int] = []  # Python's variable holds the last parameter's until it is bound anew
        for numel in numels:
            root, quotient = (self.storages.alloc(numel * size, "temporaries") for _ in range(2))
            self.storages.free(root, *denominator)
            denominator = [quotient]
        self.storages.free(*denominator)

    def _single(self) -> None:
        """Of optimizers that step tensor by tensor: two of the largest kind of a tensor, and the update of the one before."""
        master = DTYPE_BYTES[self.plan.precision.master]
        before: list[int] = []
        for shape in _stepped_shapes(self.model, self.plan):
            sizes = _temporary_bytes(shape, master, self.plan)
            made = self.storages.alloc_each(sizes, "temporaries")
            self.storages.free(*before, *made[1:])
            before = made[:1]
        self.storages.free(*before)

    def zero_grad(self) -> None:
        self.storages.free(*self.gradients)
        self.gradients = []


def _stepped_shapes(model: Model, plan: Plan) -> list[Shape]:
    """Of what is stepped tensor by tensor, in order: a flat vector counts as one."""
    if not plan.traits.whole_modules:
        return [(sum(trained_tensors(model, plan)) // DTYPE_BYTES[plan.precision.master],)]
    every = plan.optimizer.kind == "adafactor"
    parts = pieces(model, plan)
    return [shape for name, shapes in parts for shape in shapes if every or is_matrix(name, shape)]


def _temporary_bytes(shape: Shape, master: int, plan: Plan) -> tuple[int, ...]:
    """Bytes of what one tensor's step makes; the first lives until the next tensor's does.

    Adafactor: update and its square, with gradient and parameter in fp32 where they are narrower. Muon: its moment towards the
    gradient, two iterates in bf16, two Gram matrices. GaLore: the step, unscaled and scaled, and two of its low rank.
    """
    numel, kind = prod(shape), plan.optimizer.kind
    if kind == "adafactor":
        return (numel * 4, numel * 4, *((numel * 4, numel * 4) if master < 4 else ()))
    if len(shape) < 2:
        return ()
    short, long = sorted(shape[-2:])
    if kind == "muon":
        return (2 * short * long, master * short * long, 2 * short * long, 2 * short**2, 2 * short**2)
    low = long * min(plan.optimizer.galore_rank, short)
    return (numel * master, numel * master, low * master, low * master)


def foreach_groups(numels: Sequence[int], model: Model, plan: Plan) -> list[Sequence[int]]:
    """What is stepped at once: all, but parameters that DTensor splits over `tp` apart from those that it does not.

    torch's foreach kernels take no DTensors of different meshes in one list, so scripts give the optimizer a group of each.
    """
    if plan.tp == 1 or plan.vocab_parallel or not (plan.traits.hooks_modules or plan.traits.whole_modules):
        return [numels]
    ranks = shard_ranks(plan) if plan.traits.shards_rows and plan.zero == 3 else 1
    split, unsplit = list[int](), list[int]()
    for name, shapes in pieces(model, plan):
        for shape in shapes:
            apart = len(shape) > 1 and name not in ("embedding", "head")
            (split if apart else unsplit).append(-(-shape[0] // ranks) * prod(shape[1:]))
    return [split, unsplit] if sum(split) + sum(unsplit) == sum(numels) else [numels]


class ShardedBuffers(Buffers):
    """Common to FSDP and ZeRO-3: units are gathered for use, and freed."""

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self.compute, self.master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.precision.master]
        self.reduced = DTYPE_BYTES[plan.gradient_dtype]
        self.units: dict[int, ParameterUnit] = dict(enumerate(units(model, plan), start=ROOT))
        self.parameters: dict[int, list[int]] = {}  # unit -> slots of its gathered parameters
        self.kept: dict[int, list[tuple[int, int]]] = {}  # unit -> gradients accumulated without a reduction
        self.shards: dict[int, int] = {}  # unit -> slot of its reduced gradient

    @override
    def begin(self) -> None:
        self.shards = {}

    def reshards(self, unit: int) -> bool:
        return not (keeps_root(self.plan) if unit < 0 else keeps_layers(self.plan))

    @override
    def zero_grad(self) -> None:
        self.storages.free(*self.shards.values())
        self.shards = {}

    def keep_shard(self, unit: int, slot: int) -> None:
        """The reduced gradient of a micro-batch: the first one stays, later ones are added to it; or it leaves HBM."""
        if self.leaves(unit):
            self.storages.free(slot)
        else:
            self.shards[unit] = slot

    def leaves(self, unit: int) -> bool:
        """The unit's reduced gradient does not stay as it is: it is added to an earlier one, or goes to the host."""
        return unit in self.shards or self.plan.offload.optimizer != "none"

    def accumulate(self, unit: int, gradients: Sequence[tuple[int, int]], element_bytes: int) -> None:
        """Without a reduction, whole gradients stay, in `element_bytes` an element; one after the other."""
        known, kept = unit in self.kept, self.kept.setdefault(unit, [])
        for slot, numel in gradients:
            if not known:
                kept.append((self.storages.alloc(numel * element_bytes, "gradients"), numel))
            self.storages.free(slot)

    def take_kept(self, unit: int, gradients: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Gradients to reduce: this micro-batch's, added to those kept before."""
        buffers = self.kept.pop(unit, None)
        if buffers is None:
            return gradients
        self.storages.free(*[slot for slot, _ in gradients])
        return buffers
