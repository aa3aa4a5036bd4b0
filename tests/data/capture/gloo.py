"""A rank of a program run for real over gloo, whose collectives torch's own dispatcher tells: OUT SCRIPT ARGS.

What is written: the kind, bytes and ranks of each call of one step, from the end of an optimizer's step to that of the next.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all",
    "broadcast_": "broadcast", "send": "send", "recv_": "receive",
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


class Spy(TorchDispatchMode):
    calls: ClassVar[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._schema.name.split("::")[1])
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            self.calls.append([kind, *size_and_group(kind, func, args, found)])
        return found


def size_and_group(kind: str, func: Any, args: Any, found: Any) -> tuple[int, list[int]]:
    if func.namespace == "c10d":
        group = next(one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()))
        name = distributed.ProcessGroup.unbox(group).group_name
        full = args[1] if kind == "reduce_scatter" else args[0]
    else:
        name = args[-1]
        full = args[0] if kind == "reduce_scatter" else found
    ranks = distributed.get_process_group_ranks(distributed.distributed_c10d._resolve_process_group(name))
    return sum(one.numel() * one.element_size() for one in tree_leaves(full) if isinstance(one, torch.Tensor)), ranks


def main() -> None:
    out, script, *rest = sys.argv[1:]
    sys.argv = [script, *rest]
    steps: list[int] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(len(Spy.calls)))
    with Spy():
        runpy.run_path(script, run_name="__main__")
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(Spy.calls[steps[1] : steps[2]]))


main()
