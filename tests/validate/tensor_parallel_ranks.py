"""One of two gloo ranks: models cut by tp, cp, ep or pp against the same models whole, in loss and every gradient. Run by a test."""

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
from validate.context_parallel import tokens_of
from validate.models import Decoder
from validate.parallel import Built, build, materialise
from validate.pipelined import PipelinedStep
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
    step = (PipelinedStep if plan.pp > 1 else TrainingStep)(built, model, plan, STACK, CPU)
    step.ids, step.labels = batch(model, plan)
    step.run()
    found = {
        of_whole(name, chunk): whole(parameter.grad)
        for chunk in built.chunks
        for name, parameter in chunk.named_parameters()
    }
    taken = losses[-plan.num_micro_batches :]  # torch's pipelines look for shapes by a loss of their own
    return mean([whole(one.detach()) for one in taken], plan), found


def batch(model: Model, plan: Plan) -> tuple[Tensor, Tensor]:
    """This rank's tokens and labels of one batch; a pipeline takes it as often as it has micro-batches."""
    torch.manual_seed(1)
    shape = (plan.micro_batch_size, plan.seq_len)
    both = [torch.randint(0, model.vocab_size, shape) for _ in range(2)]
    here = [i for one in tokens_of(plan, dist.get_rank() % plan.cp) for i in one]
    times = plan.num_micro_batches if plan.pp > 1 else 1
    ids, labels = (one[:, here].repeat(times, 1) for one in both)
    return ids, labels


def mean(losses: list[Tensor], plan: Plan) -> float:
    """Over the ranks that have a part of the tokens; of a pipeline's last stage."""
    if plan.cp == 1 and plan.pp == 1:
        return float(losses[0])
    told = torch.tensor([float(sum(losses)), float(len(losses))])
    dist.all_reduce(told)
    return float(told[0] / told[1])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy(source: Decoder, target: Decoder, plan: Plan) -> None:
    """Parameters of a whole model into one of which this rank holds a part."""
    given = dict(source.named_parameters())
    with torch.no_grad():
        for name, part in target.named_parameters():
            value = here(name, given[of_whole(name, target)], plan)
            if isinstance(part, DTensor):
                part.to_local().copy_(distribute_tensor(value, part.device_mesh, part.placements).to_local())
            else:
                part.copy_(value)


def of_whole(name: str, target: Decoder) -> str:
    """A chunk of a stage numbers its own layers from 0."""
    words = name.replace("_checkpoint_wrapped_module.", "").split(".")
    if words[0] == "layers":
        words[1] = str(target.part.layers[int(words[1])])
    return ".".join(words)


def here(name: str, value: Tensor, plan: Plan) -> Tensor:
    """Of experts, those that this rank has."""
    return value.chunk(plan.ep)[dist.get_rank() % plan.ep] if ".experts." in name else value


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
    torch.manual_seed(2)  # ranks hold different parts, and have drawn as many numbers
    with torch.no_grad():
        for parameter in reference.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    for chunk in split.chunks:
        copy(reference.chunks[0], chunk, asked)
    expected, wanted = gradients(reference, model, alone)
    loss, found = gradients(split, model, asked)
    wanted = {name: here(name, wanted[name], asked) for name in found}
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
