"""Ops that frameworks write out operator by operator: their kernels beside the same lines run by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from simulator.base.kernels import Stream, launches
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import Op, build_blocks

LLAMA = Model.load("llama3-8b")
PLAN = Plan(zero=0, seq_len=512, micro_batch_size=8, master_dtype="bf16")
TOKENS = 8 * 512


def built(**fields: Any) -> Any:
    attention = AttentionBackend(kernel="flash2", expand_kv_heads=False)
    stack = Stack(name="s", framework="f", date="2026-01", attention=attention, **{"blocks": "eager", **fields})
    return build_blocks(LLAMA, stack, PLAN)


def stream_bytes(ops: Sequence[Op], phase: str) -> int:
    return sum(k.num_bytes for op in ops for k in getattr(op, phase) if isinstance(k, Stream))


def launched(run: Any) -> list[str]:
    """Names of the operators that `run` calls on the way there and back, views apart."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Recorder():
        run(torch)
    views = ("view", "_unsafe_view", "select", "detach", "expand", "unsqueeze", "alias", "ones", "ones_like")
    return [name for name in seen if name not in views]


def test_pairs_are_turned_by_as_many_kernels_as_torchtune_launches() -> None:
    """modules/position_embeddings.py of torchtune 0.6: its expression on a bf16 tensor, forward and backward."""

    def turn(torch: Any) -> None:
        x = torch.ones(1, 4, 2, 4, dtype=torch.bfloat16, requires_grad=True)
        table = torch.ones(1, 4, 1, 2, 2)
        pairs = x.float().reshape(1, 4, 2, -1, 2)
        cos, sin = table[..., 0], table[..., 1]
        both = [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin]
        out = torch.stack(both, -1).flatten(3).type_as(x)
        out.backward(gradient=torch.ones_like(out))

    names = launched(turn)
    zeros_and_copies = names.count("select_backward")  # a kernel that fills and one that copies
    ops = [op for op in built(rope="pairs_fp32").layer.ops if op.name.startswith("q.")]
    assert sum(launches(k) for op in ops for k in (*op.forward, *op.backward)) == len(names) + zeros_and_copies


@pytest.mark.parametrize(("norm", "forward", "backward"), [("eager", 40, 104), ("eager_cast", 36, 92)])
def test_a_norms_result_is_cast_before_or_after_its_weight(norm: str, forward: int, backward: int) -> None:
    ops = [op for op in built(norm=norm).head.ops if op.name.partition(".")[0] == "norm"]
    for phase, each in (("forward", forward), ("backward", backward)):
        assert stream_bytes(ops, phase) / (TOKENS * LLAMA.d_model) == pytest.approx(each, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "kept", "held"),
    [
        ({"loss": "output_chunks", "blocks": "compiled"}, 2, []),  # 16-bit logits
        ({"loss": "output_chunks"}, 4, ["logits"]),  # fp32 log-probabilities; a list of logits until the loss is known
        ({"loss": "linear_chunks"}, 4, []),
    ],
)
def test_chunks_of_torchtunes_loss_keep_what_their_backward_reads(
    fields: dict[str, Any], kept: int, held: list[str]
) -> None:
    numel, weight = TOKENS * LLAMA.vocab_size, 2 * LLAMA.vocab_size * LLAMA.d_model
    head = built(**fields).head
    chunks, scope = (next(op for op in head.ops if op.name == name) for name in ("chunked_cross_entropy", "loss.scope"))
    sizes = {t.name: t.num_bytes for t in chunks.outputs}
    assert [sizes[name] for name in chunks.saved if name in sizes] == [kept * numel]
    assert [name for name in scope.inputs if name == "logits"] == held
    sums = 7 * 3 * weight  # of eight gradients of the weight
    loss = {2: 4, 4: 26}[kept]  # read and write 2; or zeros 4, log-softmax 16, cast 6
    assert stream_bytes([chunks], "backward") == loss * numel + sums


def test_a_second_gradient_of_the_weight_stands_beside_the_first() -> None:
    """While seven of eight compiled chunks still have their logits."""
    head = built(loss="output_chunks", blocks="compiled").head
    op = next(op for op in head.ops if op.name == "chunked_cross_entropy")
    assert op.backward_temporary_bytes == 2 * LLAMA.vocab_size * (LLAMA.d_model - TOKENS // 8)
