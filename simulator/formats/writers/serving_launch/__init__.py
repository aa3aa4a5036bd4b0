"""Files that start a serving plan: the engine's own command for each of its pools, and a Kubernetes manifest."""

from __future__ import annotations

import shlex
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.formats.writers.serving_launch.launcher import Launcher, Pool, pools_of
from simulator.formats.writers.serving_launch.manifest import manifest
from simulator.formats.writers.serving_launch.sglang import SGLANG
from simulator.formats.writers.serving_launch.tensorrt_llm import TENSORRT_LLM
from simulator.formats.writers.serving_launch.tgi import TGI
from simulator.formats.writers.serving_launch.vllm import VLLM
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan

LAUNCHERS: Final[tuple[Launcher, ...]] = (VLLM, SGLANG, TENSORRT_LLM, TGI)
_PORT: Final = 8000


def launcher_of(stack: Stack) -> Launcher:
    """The engine that the stack describes. Raises PlanError where no launch of it can be written."""
    names = {name.casefold() for entry in stack.describes for name in entry.software}
    found = next((one for one in LAUNCHERS if one.software.casefold() in names), None)
    if found is None:
        known = [one.software for one in LAUNCHERS]
        problem = f"describes no engine whose launch is known: {', '.join(known)}"
        raise PlanError.at(f"stack {stack.name}", problem, 'stack = "vllm-2025", or its like')
    return found


def launch_files(
    plan: InferencePlan, model: Model, cluster: Cluster, stack: Stack, *, checkpoint: str | None = None
) -> dict[str, str]:
    """Name -> text. The plan has its engine's defaults. checkpoint: what its weights are known to be stored in.

    Raises PlanError with everything that the engine has no option for.
    """
    launcher = launcher_of(stack)
    faults = [*launcher.faults(plan), *_faults(plan, cluster)]
    if max(plan.pcp, plan.prefill_pcp) > 1 and launcher is VLLM and model.latent is None:
        faults.append(Fault("inference: pcp", "vLLM parts prompts of models with latents (MLA) alone", "1"))
    PlanError.raise_for(faults)
    pools = pools_of(plan, model, quantised=checkpoint == plan.weights)
    extra = {name: text for pool in pools for name, text in launcher.files(pool).items()}
    return {
        "launch.sh": _script(launcher, pools, model, cluster),
        **extra,
        "kubernetes.yaml": manifest(launcher, pools, model, extra),
    }


def _faults(plan: InferencePlan, cluster: Cluster) -> list[Fault]:
    """Of plans that no engine here is started for by one command."""
    faults, gpus = [], cluster.gpus_per_node
    for name, pool in (("tp", plan), ("prefill_tp", plan.prefill_pool)):
        if pool is not None and (size := pool.engine_devices) > gpus:
            problem = (
                f"an engine of {size} GPUs lies on several nodes of {gpus}, each of which needs a command of its own"
            )
            faults.append(Fault(f"inference: {name}", problem, f"engines of {gpus} GPUs at most"))
    for name, given, off in (("host_cache", plan.host_cache, "0"), ("prefix_store", plan.prefix_store != "gpu", "gpu")):
        if given:
            problem = "each engine's connector to other memory is set up in its own way"
            faults.append(Fault(f"inference: {name}", problem, f"{off}, and the engine's own flags"))
    if plan.replicate:
        faults.append(Fault("inference: replicate", "no engine holds these whole on every GPU", "leave it out"))
    return faults


def _script(launcher: Launcher, pools: tuple[Pool, ...], model: Model, cluster: Cluster) -> str:
    """One engine after another on the GPUs of this node; engines that find no room here belong to the next node."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {model.name} by {launcher.software}: starts the engines of one node. NODE=1 starts those of the second, and so on.",
        *(f"# {note}" for pool in pools for note in launcher.notes(pool)),
        "set -euo pipefail",
        f': "${{MODEL:?the checkpoint of {model.name}: a name or a folder}}"',
        "NODE=${NODE:-0}",
        'if [ -e "$MODEL" ]; then MODEL=$(realpath "$MODEL"); fi',
        'cd "$(dirname "$0")"',
    ]
    place, gpus = 0, cluster.gpus_per_node
    for pool in pools:
        for number in range(pool.plan.dp):
            node, first, place = _placed(place, pool.plan.engine_devices, gpus)
            devices = ",".join(str(gpu) for gpu in range(first, first + pool.plan.engine_devices))
            command = " ".join(map(_quoted, launcher.command(pool, _PORT + first)))
            lines.append(f'[ "$NODE" = {node} ] && CUDA_VISIBLE_DEVICES={devices} {command} &  # {pool.name} {number}')
    return "\n".join([*lines, "wait", ""])


def _placed(place: int, size: int, gpus: int) -> tuple[int, int, int]:
    """(node, first GPU, the next free place) of an engine that lies in one node."""
    if place % gpus + size > gpus:
        place += gpus - place % gpus
    return place // gpus, place % gpus, place + size


def _quoted(word: str) -> str:
    return '"$MODEL"' if word == "$MODEL" else shlex.quote(word)
