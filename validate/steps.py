"""One training step of a built plan, its phases announced as they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.parallel import Built

PHASES = ("forward", "backward", "optimizer")
Announce = Callable[[str], None]


def ignore_phase(_phase: str) -> None:
    """Nobody listens."""


class TrainingStep:
    """A batch and everything that one optimizer step does with it."""

    micro_batches_here = 1  # of the batch on the device

    def __init__(self, built: Built, model: Model, plan: Plan, stack: Stack, device: torch.device) -> None:
        shape = (self.micro_batches_here * plan.micro_batch_size, plan.seq_len // plan.cp)
        self.built, self.plan, self.stack, self.device = built, plan, stack, device
        self.ids = torch.randint(0, model.vocab_size, shape, device=device)
        self.labels = torch.randint(0, model.vocab_size, shape, device=device)

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.labels

    def run(self, announce: Announce = ignore_phase, num_micro_batches: int | None = None) -> None:
        """All micro-batches, then the optimizer. `announce(phase)` is called as each phase begins, and with "end"."""
        count = num_micro_batches or self.plan.num_micro_batches
        optimizer = self.built.optimizer
        assert optimizer is not None
        with set_checkpoint_early_stop(self.stack.kernels.early_stop):
            for index in range(count):
                self._micro_batch(announce, sync=self.plan.syncs_every_micro_batch or index == count - 1, scale=count)
        announce("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        announce("end")

    def _micro_batch(self, announce: Announce, *, sync: bool, scale: int) -> None:
        with self._synchronised(sync=sync), self.split_loss():
            announce("forward")
            with self.precision():
                logits = self.built.network(self.ids)
            loss = self.built.loss(logits, self.labels)
            del logits
            announce("backward")
            if scale > 1:
                loss = loss / scale
            loss.backward()
            del loss

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward."""
        autocast = self.built.autocast
        return contextlib.nullcontext() if autocast is None else torch.autocast(self.device.type, autocast)

    def split_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Logits that are split by vocabulary have a loss and a backward of their own."""
        if self.plan.tp == 1:
            return contextlib.nullcontext()
        from validate.tensor_parallel import split_loss

        return split_loss(self.plan)

    def _synchronised(self, *, sync: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced in this micro-batch, or kept for a later one."""
        network = self.built.network
        if hasattr(network, "set_requires_gradient_sync"):
            network.set_requires_gradient_sync(sync)
        elif hasattr(network, "no_sync") and not sync:
            return network.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def make_optimizer_state(self) -> None:
        """The optimizer's state, by one step on gradients of zero: what a first training step would leave."""
        optimizer = self.built.optimizer
        assert optimizer is not None
        for parameter in self.built.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
