"""A launch kit: every file that starts a plan on a cluster, as name -> text. docs/guides/launch.md goes through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from simulator.base.units import counted
from simulator.formats.writers.launch_kit.parts import Kit, make_kit
from simulator.formats.writers.launch_kit.scripts import env_sh, job_slurm, kubernetes_yaml, launch_sh
from simulator.predict.transfers import Schedule
from simulator.spec.cluster.host import nearest_nics
from simulator.spec.plan import AXES

__all__ = ["Kit", "launch_kit", "make_kit", "ranks_table"]

SUFFIXES: Final = {"toml": "study.toml", "megatron": "megatron.sh", "deepspeed": "deepspeed.json",
                   "accelerate": "accelerate.yaml", "torchtitan": "torchtitan.toml"}  # fmt: skip


def launch_kit(
    kit: Kit, formats: Mapping[str, str], refused: Mapping[str, Sequence[str]], schedule: Schedule | None = None
) -> dict[str, str]:
    """The files. formats: the plan's text in each format that can express it; refused: why the others cannot.

    schedule: of this plan's transfers.
    """
    files = {
        "launch.sh": launch_sh(kit, formats),
        "env.sh": env_sh(kit),
        "job.slurm": job_slurm(kit),
        "kubernetes.yaml": kubernetes_yaml(kit),
        "hostfile": _hostfile(kit),
        "ranks.tsv": ranks_table(kit),
    }
    files |= {"rankfile": text} if (text := _rankfile(kit)) else {}
    if schedule is not None:
        files["transfers.tsv"] = _transfers(schedule)
    files |= {f"plan/{SUFFIXES[form]}": text for form, text in formats.items()}
    return {"README.md": _readme(kit, files, refused, schedule), **files}


def _hostfile(kit: Kit) -> str:
    counts = [0] * kit.num_nodes
    for slot in kit.seats:
        counts[slot.node] += 1
    return "".join(f"{host} slots={count}\n" for host, count in zip(kit.hosts, counts, strict=True))


def ranks_table(kit: Kit) -> str:
    """One line a rank: where it sits, the GPU as CUDA numbers it, its NIC, and its place in the mesh."""
    mesh, ids = kit.mesh(), kit.bus_ids
    nics = [",".join(one.nics) for one in nearest_nics(kit.host)] if kit.host is not None else []
    lines = ["\t".join(("rank", "node", "host", "local_rank", "gpu", "cuda", "pci_bus_id", "numa", "cards", *AXES))]
    seen = [0] * kit.num_nodes
    for rank, slot in enumerate(kit.seats):
        where = mesh.coordinates(rank)
        numa = kit.host.gpus[slot.gpu].numa if kit.host else ""
        fields = [rank, slot.node, kit.hosts[slot.node], seen[slot.node], slot.gpu, kit.cuda_index(slot.gpu)]
        text = [ids[slot.gpu] if ids else "", numa, nics[slot.gpu] if nics else ""]
        seen[slot.node] += 1
        lines.append("\t".join(str(value) or "-" for value in (*fields, *text, *(where[axis] for axis in AXES))))
    return "\n".join(lines) + "\n"


def _rankfile(kit: Kit) -> str:
    """Open MPI's: each rank on the cores near its GPU; only where the source states them."""
    if kit.host is None or not all(gpu.cpus for gpu in kit.host.gpus):
        return ""
    gpus = kit.host.gpus
    return "".join(
        f"rank {rank}={kit.hosts[slot.node]} slot={gpus[slot.gpu].cpus}\n" for rank, slot in enumerate(kit.seats)
    )


_SCHEDULE: Final = ("ranks", "start_s", "end_s", "needed_s", "slack_s", "released_s", "bytes", "action", "stream", "kind",
                    "what")  # fmt: skip


def _transfers(schedule: Schedule) -> str:
    """What travels when, by when it must be there, and when its room is free again."""
    lines = ["\t".join(_SCHEDULE)]
    for one in schedule.transfers:
        times = (one.start_s, one.end_s, one.needed_s, one.slack_s, one.released_s)
        cells = [one.ranks, *("-" if time is None else f"{time:.6f}" for time in times)]
        lines.append("\t".join([*cells, str(one.size_bytes), one.action, one.stream, one.kind, one.what]))
    return "\n".join(lines) + "\n"


_PURPOSES: Final = {
    "launch.sh": "starts one node's processes",
    "env.sh": "variables of every process",
    "job.slurm": "the whole job under SLURM",
    "kubernetes.yaml": "the whole job under Kubernetes, with hints that keep its pods close to each other",
    "hostfile": "the nodes, in order",
    "rankfile": "Open MPI's: each rank on the cores near its GPU",
    "ranks.tsv": "the GPU, card and place in the mesh of each rank",
    "transfers.tsv": "what the predicted step moves when: prefetches, evictions, reductions; by when each is needed",
}


def _readme(kit: Kit, files: Mapping[str, str], refused: Mapping[str, Sequence[str]], schedule: Schedule | None) -> str:
    plan = kit.job.plan
    degrees = " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1) or "one rank"
    lines = [
        f"# {kit.job.model.name} on {kit.num_nodes} × {kit.cluster.gpus_per_node} of {kit.cluster.name}\n",
        f"{counted(len(kit.seats), 'rank')}: {degrees}. Global batch {plan.global_batch_size} of {plan.seq_len} tokens.",
        "",
        "- By hand: copy this folder to every node; on each `NODE_RANK=N MASTER_ADDR=HOST ./launch.sh`.",
        "- SLURM: `sbatch job.slurm`, from this folder on a shared file system.",
        "- Kubernetes: fill in `kubernetes.yaml`, then `kubectl apply -f kubernetes.yaml`.",
        "",
        *_notes(kit, schedule),
        "",
        "| file | what it is |",
        "| --- | --- |",
        *(f"| `{name}` | {_PURPOSES.get(name, 'the plan')} |" for name in files),
    ]
    for form, why in refused.items():
        lines += ["", f"The plan is not expressible for {form}:", "", *(f"- {fault}" for fault in why)]
    return "\n".join(lines) + "\n"


def _notes(kit: Kit, schedule: Schedule | None) -> Iterator[str]:
    if not kit.named and kit.num_nodes > 1:
        yield "Hosts are named node0, node1, …: put yours into `hostfile`, or export again with --hosts."
    if kit.bus_ids:
        yield "GPUs are numbered by PCI bus id (CUDA_DEVICE_ORDER); `ranks.tsv` has the ids."
    else:
        yield "No source told PCI bus ids (--topology): GPU numbers are taken to be in their order already."
    if not kit.in_blocks:
        yield "Ranks of a node are not consecutive: `launch.sh` starts a process a rank instead of torchrun."
    if schedule is not None and schedule.num_shown < schedule.num_micro_batches:
        shown, total = schedule.num_shown, schedule.num_micro_batches
        yield f"`transfers.tsv` shows {shown} micro-batches of {total}: those between repeat the last but one."
