"""Where the claims of ZeRO-Offload and ZeRO-Infinity hold in this model, and what they cost in step time.

    python experiments/offload.py

Prints, for arXiv 2101.06840: the largest model on one 32 GB V100 without and with the optimizer on the host (the paper:
1.4B and 13B), for arXiv 2104.07857: 175B on one GPU and 30T and more on 512; then one block's activations by the ways to
move them, and an object-by-object placement over the memory hierarchy. Every number is predicted, none is fitted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.base.errors import ClusterError
from simulator.base.fit import Fit
from simulator.base.units import format_bytes, format_seconds
from simulator.memory import MemoryUse, simulate_memory
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.predict.tiers import with_lower_tiers
from simulator.predict.verdict import cause_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.plan.records import DeepSpeedPlan, PrecisionPlan, RecomputePlan
from simulator.spec.software.stack import Stack
from simulator.work.offload import Object, hierarchy, place

NOTHING = Offload()
STATES = Offload(optimizer="host", activations="host")
INFINITY = Offload(optimizer="nvme", parameters="nvme", activations="host")
# (layers, hidden size) of 1.1B to 13.3B parameters, as GPT-like models are built
MODELS = ((20, 2048), (24, 2048), (40, 2304), (40, 4096), (50, 4096), (65, 4096))
# A DGX-2: 1.5 TB of memory, 30 TB of NVMe (data sheet; the papers: 1.5 TB, 28 TB)
DGX2 = {"memory_bytes": 1500 * 10**9, "memory_bytes_per_s": 203e9, "nvme_bytes": 28 * 10**12}


def gpt(layers: int, hidden: int) -> Model:
    """A model as the papers build them: learned positions, 1024 tokens, GPT-2's vocabulary."""
    return Model(
        name=f"gpt-{layers}x{hidden}",
        family="gpt2",
        num_layers=layers,
        d_model=hidden,
        num_heads=hidden // 128,
        num_kv_heads=hidden // 128,
        d_ff=4 * hidden,
        mlp="gelu",
        norm="layer",
        positions="learned",
        max_positions=1024,
        vocab_size=50304,
        tied_embeddings=True,
    )


def v100s(num_nodes: int, gpus: int) -> Cluster:
    """Nodes of a DGX-2's memory and drives with `gpus` V100s of 32 GB behind one NVLink switch."""
    preset = Cluster.load("dgx1-v100-8")
    data = {field: getattr(preset, field) for field in Cluster.model_fields}
    intra = {"kind": "nvlink2", "shape": "switch", "bytes_per_s": 150e9}
    size = {"num_nodes": num_nodes, "gpus_per_node": gpus, "nvlink_domain_size": gpus}
    return Cluster.parse({**data, **size, "intra": intra, "tier": DGX2}, "dgx2", ClusterError)


def asked(
    model: Model, cluster: Cluster, zero: int, offload: Offload, micro_batch_size: int = 1, accumulated: int = 1
) -> Answer:
    """A step with DeepSpeed, fp16, every block checkpointed."""
    plan = Plan(
        data_parallel="deepspeed",
        zero=zero,
        dp_shard=cluster.num_devices,
        seq_len=1024,
        precision=PrecisionPlan(compute="fp16"),
        micro_batch_size=micro_batch_size,
        num_micro_batches=accumulated,
        recompute=RecomputePlan(mode="full"),
        offload=offload,
        # the papers' models leave little room for a gigabyte of bucket
        deepspeed=DeepSpeedPlan(reduce_bucket_numel=200_000_000),
    )
    return answer(model, plan, cluster)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A lowered plan and its memory."""

    lowering: Lowering
    memory: MemoryUse

    @property
    def verdict(self) -> Fit:
        return self.memory.fit


def answer(model: Model, plan: Plan, cluster: Cluster) -> Answer:
    """As predict() does, without looking for what would fit instead, and without playing what does not."""
    stack = Stack.load(plan.stack)
    lowering = lower(model, plan, cluster, stack, Calibration.for_device(cluster.device), default_curves())
    memory, _ = simulate_memory(model, plan, stack, lowering.blocks, cluster.device)
    return Answer(lowering=lowering, memory=with_lower_tiers(memory, lowering))


def row(name: str, a: Answer) -> str:
    """One line: verdict, time and where the bytes are."""
    m = a.memory
    if not a.verdict.runs:
        return f"{name:<34} {a.verdict}   {cause_of(m)}"
    played = play(a.lowering)
    slow = sorted(((s, k) for k, s in played.breakdown.items() if k.startswith("exposed")), reverse=True)[:2]
    waits = ", ".join(f"{k.removeprefix('exposed:')} {format_seconds(s)}" for s, k in slow)
    # recomputation counted, as the papers do
    teraflop = a.lowering.hardware_flop / played.step_s / a.lowering.plan.num_devices / 1e12
    used = f"{format_bytes(m.used_bytes):>9} of {format_bytes(m.capacity_bytes)}"
    below = f"host {format_bytes(m.host_bytes):>9}  nvme {format_bytes(m.nvme_bytes):>9}"
    time = f"{format_seconds(played.step_s):>8} {teraflop:6.1f} TFLOP/s"
    return f"{name:<34} {a.verdict:<5} {used}  {below}  {time}  {waits}"


def zero_offload() -> Iterator[str]:
    """Section 6.2.1 of 2101.06840: the largest model on one V100 of 32 GB."""
    one = v100s(1, 1)
    for layers, hidden in MODELS:
        model = gpt(layers, hidden)
        for name, offload in (("GPU only", NOTHING), ("ZeRO-Offload", STATES)):
            yield row(f"{model.num_parameters / 1e9:5.1f}B {name}", asked(model, one, 2, offload))
    for name, offload, hidden in (("GPU only", NOTHING, 2048), ("ZeRO-Offload", STATES, 4096)):
        yield f"largest that fits, {hidden} wide, {name}: {largest(one, offload, hidden) / 1e9:.1f}B"
    yield row("10.3B ZeRO-Offload, 64 × 8 a step", asked(gpt(50, 4096), one, 2, STATES, 8, 64))


def largest(cluster: Cluster, offload: Offload, hidden: int) -> int:
    """Parameters of the deepest model of this width that does not run out of memory, one sequence at a time."""
    fits, fails = 1, 128
    while fails - fits > 1:
        layers = (fits + fails) // 2
        if asked(gpt(layers, hidden), cluster, 2, offload).verdict is Fit.DOES_NOT_FIT:
            fails = layers
        else:
            fits = layers
    return gpt(fits, hidden).num_parameters


def zero_infinity() -> Iterator[str]:
    """Figures 1 and 6 of 2104.07857: 175B on one GPU; tens of trillions on 512."""
    one, many = v100s(1, 1), v100s(32, 16)
    gpt3 = gpt(96, 12288)
    yield row(f"{gpt3.num_parameters / 1e9:.0f}B, 1 GPU", asked(gpt3, one, 3, INFINITY))
    yield row(f"{gpt3.num_parameters / 1e9:.0f}B, 1 GPU, host alone", asked(gpt3, one, 3, _hosts()))
    for layers, hidden in ((128, 25600), (195, 65536), (620, 65536), (4070, 25600)):
        model = gpt(layers, hidden)
        name = f"{model.num_parameters / 1e12:.1f}T ({layers} × {hidden}), 512 GPUs"
        yield row(name, asked(model, many, 3, INFINITY))


def _hosts() -> Offload:
    return Offload(optimizer="host", parameters="host", activations="host")


def movers() -> Iterator[str]:
    """Llama 3 8B on 8 H100: one way to move activations beside the others."""
    cluster = Cluster.load("hgx-h100-8")
    model = Model.load("llama3-8b")
    for name, offload in (
        ("kept", NOTHING),
        ("copies, one block ahead", Offload(activations="host")),
        ("copies, on demand", Offload(activations="host", prefetch=0)),
        ("copies of pageable memory", Offload(activations="host", pinned=False)),
        ("unified memory, prefetched", Offload(activations="host", migration="prefetch")),
        ("unified memory, by faults", Offload(activations="host", migration="fault")),
    ):
        yield row(name, answer(model, Plan(dp_shard=8, seq_len=8192, offload=offload), cluster))


def placed() -> Iterator[str]:
    """The states of a 70B model for one H100 of a node where all eight, or two, work: hottest first."""
    for busy in (8, 2):
        tiers = hierarchy(Cluster.load("hgx-h100-8"), busy)
        numel = 70_600_000_000 // busy
        objects = [
            Object(name="parameters", num_bytes=2 * numel, read_bytes=4 * numel, write_bytes=2 * numel),
            Object(name="gradients", num_bytes=2 * numel, read_bytes=2 * numel, write_bytes=2 * numel),
            Object(name="optimizer state", num_bytes=12 * numel, read_bytes=12 * numel, write_bytes=12 * numel),
        ]
        where, seconds = place(objects, tiers)
        for name, parts in where.items():
            text = ", ".join(f"{format_bytes(size)} in {tier}" for tier, size in parts.items())
            yield f"{busy} ranks  {name:<16} {text}"
        yield f"{busy} ranks  {format_seconds(seconds)} of transfers a step, one after another"


if __name__ == "__main__":
    for title, lines in (
        ("ZeRO-Offload, one V100 32 GB (paper: 1.4B without, 13B with)", zero_offload()),
        ("ZeRO-Infinity (paper: 175B on one GPU, 32T on 512)", zero_infinity()),
        ("Activations of Llama 3 8B, 8 H100", movers()),
        ("70B over the hierarchy", placed()),
    ):
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")
