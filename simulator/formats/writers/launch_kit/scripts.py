"""The kit's scripts: environment, one node's start, SLURM's job, Kubernetes' job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from simulator.formats.writers.launch_kit.parts import Kit
from simulator.formats.writers.plans.megatron import hardware_queues
from simulator.spec.cluster.host import idle_nics

_PORT: Final = 29_500
_TRAIN: Final = {
    "torchtitan": "-m torchtitan.train --job.config_file plan/torchtitan.toml",
    "deepspeed": "${TRAIN:?your training script} --deepspeed --deepspeed_config plan/deepspeed.json",
}
_UNKNOWN: Final = "${TRAIN:?your training script}"


def environment(kit: Kit) -> dict[str, str]:
    """Variables of every process: the order of GPUs, what the framework needs, NCCL's as the stack has them."""
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    plan = kit.job.plan
    if queues := hardware_queues(plan):
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
    settings = [plan.memory.alloc_conf] if plan.memory.alloc_conf else []
    if plan.memory.policy == "expandable" and plan.memory.conf.expandable_segments is None:
        settings = ["expandable_segments:True", *settings]
    found |= {"PYTORCH_CUDA_ALLOC_CONF": ",".join(settings)} if settings else {}
    if nics := _nics(kit):
        found["NCCL_IB_HCA"] = "=" + ",".join(nics)
    return {**found, **kit.job.stack.nccl.env}


def _nics(kit: Kit) -> list[str]:
    """The NICs that GPUs are near, where the source names them; storage and management NICs are left out."""
    if kit.host is None or kit.cluster.inter is None or kit.cluster.inter.kind not in ("infiniband", "roce"):
        return []
    idle = set(idle_nics(kit.host))
    return [nic.alias or nic.name for nic in kit.host.nics if nic.name not in idle]


def env_sh(kit: Kit) -> str:
    """`source env.sh`."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(kit).items()]
    return "\n".join(["# Of every process of the job", *lines, ""])


def launch_sh(kit: Kit, formats: Mapping[str, str]) -> str:
    """Start this node's processes. formats: the plan's files, by format."""
    lines = [
        "#!/bin/bash",
        "# Starts this node's ranks: NODE_RANK=0 MASTER_ADDR=first-host ./launch.sh [arguments of the training script]",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        "source env.sh",
        f'export MASTER_ADDR="{_first_host(kit)}" MASTER_PORT="${{MASTER_PORT:-{_PORT}}}"',
        *_node_rank(kit),
        *(_torchrun(kit, formats) if kit.in_blocks else _one_by_one(kit, formats)),
    ]
    return "\n".join(lines) + "\n"


def _first_host(kit: Kit) -> str:
    if kit.named or kit.num_nodes == 1:
        return f"${{MASTER_ADDR:-{kit.hosts[0]}}}"
    return "${MASTER_ADDR:?the first host}"


def _node_rank(kit: Kit) -> Iterator[str]:
    """The node's index: given, SLURM's, or its line in the hostfile."""
    if kit.num_nodes == 1:
        yield "NODE_RANK=0"
        return
    if kit.named:
        yield 'HERE="${SLURMD_NODENAME:-$(hostname -s)}"'
        yield 'LINE="$(grep -nm1 "^$HERE " hostfile | cut -d: -f1 || true)"'
        yield 'NODE_RANK="${NODE_RANK:-${LINE:+$((LINE - 1))}}"'
    yield 'NODE_RANK="${NODE_RANK:-${SLURM_NODEID:?NODE_RANK, the place of this node among the hosts}}"'


def _torchrun(kit: Kit, formats: Mapping[str, str]) -> Iterator[str]:
    orders = _orders(kit)
    if len(set(orders)) == 1:
        yield f"export CUDA_VISIBLE_DEVICES={orders[0]}"
    else:
        yield 'case "$NODE_RANK" in'
        for order in dict.fromkeys(orders):
            nodes = "|".join(str(node) for node, own in enumerate(orders) if own == order)
            yield f"  {nodes}) export CUDA_VISIBLE_DEVICES={order} ;;"
        yield "esac"
    rendezvous = '--master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"'
    launch = f'torchrun --nnodes {kit.num_nodes} --nproc_per_node {kit.per_node} --node_rank "$NODE_RANK" {rendezvous}'
    yield from _train(kit, formats, launch)


def _orders(kit: Kit) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each node: its ranks' GPUs, in the order of ranks."""
    found: list[list[str]] = [[] for _ in kit.hosts]
    for slot in kit.seats:
        found[slot.node].append(str(kit.cuda_index(slot.gpu)))
    return [",".join(order) for order in found]


def _one_by_one(kit: Kit, formats: Mapping[str, str]) -> Iterator[str]:
    """Ranks of a node that are not consecutive: one process each, which sees only its GPU."""
    yield f"export WORLD_SIZE={len(kit.seats)} LOCAL_WORLD_SIZE=1 LOCAL_RANK=0"
    yield "pids=()"
    yield "while IFS=$'\\t' read -r rank node _ _ _ cuda _; do"
    yield '  [ "$node" = "$NODE_RANK" ] || continue'
    (start,) = _train(kit, formats, "python", prefix="")
    yield f'  RANK="$rank" CUDA_VISIBLE_DEVICES="$cuda" {start} &'
    yield "  pids+=($!)"
    yield "done < <(tail -n +2 ranks.tsv)"
    yield "trap 'kill \"${pids[@]}\" 2>/dev/null || true' INT TERM"
    yield 'for pid in "${pids[@]}"; do wait "$pid"; done'


def _train(kit: Kit, formats: Mapping[str, str], launch: str, prefix: str = "exec ") -> Iterator[str]:
    if "megatron" in formats and kit.job.plan.implementation == "megatron":
        plain = launch.replace('"', "")
        yield f'{prefix}env LAUNCH="{plain}" bash plan/megatron.sh "$@"'
        return
    own = {"deepspeed": "deepspeed", "fsdp2": "torchtitan", "ddp": "torchtitan"}.get(kit.job.plan.implementation, "")
    train = _TRAIN[own] if own in formats and own in _TRAIN else _UNKNOWN
    yield f'{prefix}{launch} {train} "$@"'


def job_slurm(kit: Kit) -> str:
    """`sbatch job.slurm`: a task a node, whole nodes, below one leaf switch where they fit."""
    fabric, nodes = kit.cluster.fabric, kit.num_nodes
    lines = ["#!/bin/bash", "#SBATCH --job-name=shardwise", f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1"]
    lines += [
        f"#SBATCH --gpus-per-node={kit.cluster.gpus_per_node}",
        "#SBATCH --exclusive",
        "#SBATCH --distribution=block",
    ]
    if nodes > 1:
        leaves = -(-nodes // fabric.nodes_per_leaf)
        shared = f"# {fabric.nodes_per_leaf} nodes share a leaf"
        lines += [f"{shared}: as few leaves as hold the job, waited for at most a day"]
        lines += [f"#SBATCH --switches={leaves}@1-00:00:00"]
    if kit.named:
        lines += [f"#SBATCH --nodelist={','.join(kit.hosts)}"]
    first = kit.hosts[0] if kit.named else '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    lines += ["", "set -euo pipefail", f'export MASTER_ADDR="${{MASTER_ADDR:-{first}}}"']
    lines += ['exec srun --kill-on-bad-exit=1 bash "${KIT:-$SLURM_SUBMIT_DIR}/launch.sh" "$@"', ""]
    return "\n".join(lines)


def kubernetes_yaml(kit: Kit) -> str:
    """An indexed job, a pod a node, with hints that keep its pods below one switch; the image is yours to name."""
    import yaml

    service, job = yaml.safe_load_all(Path(__file__).with_name("kubernetes.yaml").read_text(encoding="utf-8"))
    job["spec"] |= {"completions": kit.num_nodes, "parallelism": kit.num_nodes}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    name = service["metadata"]["name"]
    variables = {**environment(kit), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(_PORT)}
    container["env"] += [{"name": variable, "value": value} for variable, value in variables.items()]
    container["resources"]["limits"]["nvidia.com/gpu"] = kit.cluster.gpus_per_node
    return "# Fill in the image and the volume that holds this kit at /kit.\n" + str(
        yaml.safe_dump_all([service, job], sort_keys=False)
    )
