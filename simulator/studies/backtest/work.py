"""The amounts of work of a step on one GPU: the terms of the stronger baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from simulator.base.kernels import Attention, Gemm, Kernel, Scan
from simulator.base.sums import summed
from simulator.parallel.model_shard import whole_body
from simulator.spec.plan import Plan
from simulator.studies.backtest.measured import step_seconds
from simulator.studies.backtest.outcome import RefusedError, Work
from simulator.studies.backtest.resolve import Run
from simulator.work.ops import Block, build_blocks, recompute_ops
from simulator.work.script import UnitComm, communication, shard_ranks

_Amounts = Counter[str]


def measured_step_s(run: Run) -> float | None:
    """Seconds that the row's run measured a step; None where it measured memory alone.

    Raises RefusedError where the model's FLOP in that time are more than the devices' peak: the row contradicts itself.
    """
    seconds = step_seconds(run.row, run.plan.num_devices, run.flop_convention, run.model)
    mfu = work_of(run).ideal_s / seconds if seconds else 0.0
    if mfu > 1:
        raise RefusedError(("faster than the peak", f"an MFU of {100 * mfu:.0f} %: its batch or time cannot be right"))
    return seconds


def work_of(run: Run) -> Work:
    """The amounts of one step of `run` on one GPU; of a pipeline, on the last stage, with its even share of the layers."""
    plan, model = run.plan, run.model
    blocks = build_blocks(model, run.stack, plan)
    counts, step = Counter(whole_body(model, plan)), _block(blocks.embedding) + _block(blocks.head)
    for block in blocks.body:
        count = -(-counts[block.name] // plan.pp)  # type: ignore[index]
        again = _kernels(k for op in recompute_ops(block, plan, run.stack) for k in op.forward)
        step += _scaled(_block(block), count) + _scaled(again, _checkpointed(plan, count))
    tokens = run.micro_batches * plan.micro_batch_size * plan.num_data_parallel * plan.seq_len
    flop_per_device = model.model_flop_per_token(plan.seq_len) * tokens / plan.num_devices
    return Work(
        gemm_flop=step["gemm"] * run.micro_batches,
        attention_flop=step["attention"] * run.micro_batches,
        stream_bytes=step["stream"] * run.micro_batches,
        communication_bytes=summed(_received(comm, plan, run.micro_batches) for comm in communication(model, plan)),
        ideal_s=flop_per_device / run.cluster.device.peak(plan.product_dtype),
    )


def _checkpointed(plan: Plan, num_layers: int) -> int:
    if plan.recompute.mode == "none":
        return 0
    return -(-num_layers // plan.recompute.every) if plan.recompute.mode == "every_k" else num_layers


def _block(block: Block) -> _Amounts:
    return _kernels(k for op in block.ops for k in (*op.forward, *op.backward))


def _kernels(kernels: Iterable[Kernel]) -> _Amounts:
    """FLOP of products and of attention (scans among it), bytes of everything else."""
    amounts: _Amounts = Counter()
    for kernel in kernels:
        if isinstance(kernel, Gemm):
            amounts["gemm"] += kernel.flop
        elif isinstance(kernel, Attention | Scan):
            amounts["attention"] += kernel.flop
        else:
            amounts["stream"] += kernel.num_bytes
    return amounts


def _scaled(amounts: _Amounts, times: int) -> _Amounts:
    return Counter({kind: times * amount for kind, amount in amounts.items()})


def _received(comm: UnitComm, plan: Plan, micro_batches: float) -> float:
    """Bytes that one GPU receives for one unit in a step: (n−1)/n of a gather or a scatter, twice that to reduce to all."""
    shards, replicas = shard_ranks(plan), plan.dp_replicate
    gathered = comm.all_gather_forward_bytes * _others(shards)
    gathered += comm.all_gather_backward_bytes * _others(comm.backward_gather_ranks)
    ranks = replicas if plan.zero > 0 and replicas > 1 else plan.num_data_parallel
    reduced = comm.reduce_scatter_bytes * _others(shards) + 2 * comm.all_reduce_bytes * _others(ranks)
    reduced += summed(hop.size_bytes for hop in comm.hops)
    syncs = micro_batches if plan.syncs_every_micro_batch else 1
    return gathered * micro_batches + reduced * syncs + comm.parameter_gather_bytes * _others(shards)


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks
