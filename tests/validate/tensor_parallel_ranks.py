"""One of two gloo ranks: split models against the same models whole, in loss and in every gradient. Run by a test."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.models import Decoder
from validate.parallel import Built, build, materialise
from validate.steps import TrainingStep

CPU = torch.device("cpu")
STACK = Stack.load("torch-2.13-cpu")


class Kept:
    """In the optimizer's place: gradients stay."""

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


def gradients(built: Built, model: Model, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """The loss, and each parameter's gradient whole, of a batch that is the same on every rank."""
    losses: list[Tensor] = []
    loss = built.loss
    built.loss = lambda logits, labels: losses.append(loss(logits, labels)) or losses[-1]  # type: ignore[func-returns-value]
    built.optimizer = Kept()  # type: ignore[assignment]
    torch.manual_seed(1)
    TrainingStep(built, model, plan, STACK, CPU).run()
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad)
        for name, parameter in built.module.named_parameters()
    }
    return float(whole(losses[0].detach())), found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy(source: Decoder, target: Decoder) -> None:
    """Parameters of a whole model into one of which this rank holds a part."""
    with torch.no_grad():
        for (_, value), (_, part) in zip(source.named_parameters(), target.named_parameters(), strict=True):
            if isinstance(part, DTensor):
                part.to_local().copy_(distribute_tensor(value, part.device_mesh, part.placements).to_local())
            else:
                part.copy_(value)


def compare(model: Model, options: dict[str, object]) -> dict[str, float]:
    """Largest differences, relative to the largest gradient of each parameter.

    A bias of keys shifts all scores of a query alike, so its gradient is zero but for rounding: hence the floor.
    """
    common = {"precision": "fp32", "seq_len": 16, "micro_batch_size": 2}
    alone, asked = Plan.model_validate({**common, "zero": 0}), Plan.model_validate({**common, **options})
    reference, split = build(model, alone, STACK, CPU), build(model, asked, STACK, CPU)
    for built in (reference, split):
        torch.manual_seed(0)
        materialise(built, CPU)
    with torch.no_grad():
        for parameter in reference.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    copy(reference.module, split.module)
    expected, wanted = gradients(reference, model, alone)
    loss, found = gradients(split, model, asked)
    floor = 1e-2 * max(float(g.abs().max()) for g in wanted.values())
    far = {name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), floor) for name, g in wanted.items()}
    return {"loss": abs(loss - expected) / expected, **far}


def main(rank: int, store: str, out: Path, cases: list[dict[str, object]]) -> None:
    """Play every case; rank 0 writes the largest difference of each and where it is."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    told = []
    for case in cases:
        far = compare(Model.model_validate(case["model"]), dict(case["plan"]))  # type: ignore[call-overload]
        worst = max(far, key=lambda name: far[name])
        told.append([worst, far[worst]])
    dist.destroy_process_group()
    if rank == 0:
        out.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
