"""Ring attention step by step, as Transformer Engine and torch run it: what each rank computes, sums and waits for."""

from __future__ import annotations

from fractions import Fraction

import pytest

from simulator.base.kernels import Attention, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.ops.core import Op

MODEL, SEQ = Model.load("llama3-8b"), 16384
ENGINE, TORCH = "megatron-core-2025", "torchtitan-2025-eager"


def core(stack: str, cp: int) -> Op:
    plan = Plan(cp=cp, seq_len=SEQ, micro_batch_size=1, stack=stack)
    return next(op for op in build_blocks(MODEL, Stack.load(stack), plan).body[0].ops if op.name == "attention")


def shares(cp: int) -> Fraction:
    """Of its queries, what a rank works on in all steps after the first: all of them up to its own number, then half. The mean of all."""
    return Fraction(sum(1 if i <= rank else Fraction(1, 2) for rank in range(cp) for i in range(1, cp)), cp)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("stack", [ENGINE, TORCH])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_step_works_on_as_many_pairs_and_only_the_first_is_masked(stack: str, cp: int, direction: str) -> None:
    whole = next(k for k in getattr(core(stack, 1), direction) if isinstance(k, Attention))
    steps = [k for k in getattr(core(stack, cp), direction) if isinstance(k, Attention)]
    assert [k.causal for k in steps] == [True] + [False] * (cp - 1)
    assert {k.flop for k in steps} == {whole.flop // cp**2}
    assert sum(k.flop for k in steps) == whole.flop // cp


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_transformer_engine_adds_16_bit_results_behind_the_steps(cp: int) -> None:
    numel = SEQ // cp * MODEL.q_width
    sums = [k for k in core(ENGINE, cp).forward if isinstance(k, Stream)]
    # the first result is scaled (read, written); of each further one two tensors are read and one is written
    assert sum(k.read_bytes for k in sums) == numel * 2 * (1 + 2 * shares(cp))
    assert sum(k.write_bytes for k in sums) == numel * 2 * (1 + shares(cp))
    assert sum(k.launches for k in sums) == cp


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_torch_merges_results_in_fp32_operator_by_operator(cp: int) -> None:
    numel, keys = SEQ // cp * MODEL.q_width, 2 * SEQ // cp * MODEL.q_width  # it repeats keys and values for all heads
    widened, halves = 1 + shares(cp), Fraction(cp - 1, 2)
    # a cast; `out - block`, times a weight, `out - product`; `cat` where half of it is new; the cast back
    read = 2 * widened + (8 + 4 + 8) * shares(cp) + 4 * halves + 4
    written = 4 * widened + (4 + 4 + 4) * shares(cp) + 4 * halves + 2
    sums = [k for k in core(TORCH, cp).forward if isinstance(k, Stream)]
    assert sum(k.read_bytes for k in sums) == numel * read + 2 * keys * (cp - 1)
    assert sum(k.write_bytes for k in sums) == numel * written + 2 * keys * (cp - 1)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_compiler_merges_each_step_in_one_pass(cp: int) -> None:
    numel, keys = SEQ // cp * MODEL.q_width, 2 * SEQ // cp * MODEL.q_width
    halves = Fraction(cp - 1, 2)
    # 16 bits of the first; then the whole fp32 sum and 16 bits of all queries or of half of them; the cast back
    read = 2 + 4 * (cp - 1) + 2 * halves + 2 * Fraction(1, 2) * halves + 4
    sums = [k for k in core("torchtitan-2025-compiled", cp).forward if isinstance(k, Stream)]
    assert sum(k.read_bytes for k in sums) == numel * read + 2 * keys * (cp - 1)
    assert sum(k.write_bytes for k in sums) == numel * (4 * cp + 2) + 2 * keys * (cp - 1)


@pytest.mark.parametrize("cp", [2, 8])
def test_torch_waits_for_all_keys_behind_its_first_step_and_transformer_engine_before_the_last(cp: int) -> None:
    assert [(e.kind, e.at, e.beside) for e in core(TORCH, cp).forward_exchanges] == [("all_gather", 0, 1)]
    assert [(e.kind, e.at, e.beside) for e in core(ENGINE, cp).forward_exchanges] == [("all_gather", 0, cp - 1)]
    backward = [(e.kind, e.at, e.beside) for e in core(TORCH, cp).backward_exchanges]
    assert backward == [("all_gather", 0, 1), ("reduce_scatter", 1, cp - 1)]


def test_heads_that_are_swapped_need_no_steps() -> None:
    plan = Plan(cp=4, cp_exchange="all_to_all", seq_len=SEQ, micro_batch_size=1, stack=ENGINE)
    op = next(op for op in build_blocks(MODEL, Stack.load(ENGINE), plan).body[0].ops if op.name == "attention")
    assert len(op.forward) == len(op.backward) == 1
