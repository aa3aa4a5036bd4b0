"""Checkpoints inside of compiled regions: the partitioner makes their operators again, and no hook does.

As Dynamo hands them on, of either variant (torch 2.13, `_higher_order_ops.wrap`, tag_activation_checkpoint_impl): operators are
marked while a region is traced. What the backward does not read, as a block's last product, is then not made again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from typing import Any

from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.fx.traceback import preserve_node_meta
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

_numbers = count()  # which operators belong together


def install(traced: Callable[[], bool]) -> None:
    """In this process. traced: whether a region is being traced."""
    original = checkpoints.checkpoint

    @wraps(original)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not traced():
            return original(function, *args, **kwargs)
        made = kwargs.get("context_fn", noop_context_fn)
        if made is noop_context_fn:
            made = partial(create_selective_checkpoint_contexts, _again)

        def contexts() -> tuple[Any, Any]:
            forward, again = made()
            forward.ac_graph_id = next(_numbers)
            return forward, again

        kwargs |= {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
        with preserve_node_meta(), checkpoints.set_checkpoint_early_stop(False):
            return original(function, *args, **kwargs)

    checkpoints.checkpoint = checkpoint_wrapper.torch_utils_checkpoint = checkpoint


def _again(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
