"""Ops: what a block computes, one autograd node each, with the storages it makes and keeps.

An `Op` is the meeting point of time and memory: its kernels cost time, its tensors cost bytes. A block is a list of
ops in forward order; the backward runs them reversed. Which ops a block has depends on the software `Stack`
(eager or fused, which norm, which attention), so builders take (Model, Stack, shapes) and live below.

Legend: T tokens of one micro-batch on one rank, D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.kernels import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A storage made in the forward pass. `num_bytes` is exact, before any allocator rounding."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One autograd node.

    inputs:  names of the tensors it reads (views carry their base's name; parameters and buffers are not listed).
    outputs: storages it makes (empty for a view).
    saved:   names of the tensors kept until this op's backward has run (parameters and buffers are not listed).
    grad_inputs: storages that its backward makes, one gradient per differentiable input, named after the input;
             an input with several consumers gets its gradients summed (the first is kept, the rest are temporary).
    forward_temporary_bytes, backward_temporary_bytes: storages made and freed inside, largest moment.
    parameter_bytes: numel × dtype of the parameters whose gradients the backward makes (weight gradients).
    category: what its time is reported as: gemm, attention, elementwise, norm, loss, embedding.
    recompute: how activation checkpointing treats it: "always" recomputed, or "save" by the selective policy.
    """

    name: str
    category: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    saved: tuple[str, ...] = ()
    grad_inputs: tuple[Tensor, ...] = ()
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    parameter_numel: int = 0
    selective_save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A repeated piece of a model: its ops in forward order. `input` and `output` name the tensors at its borders."""

    name: str
    ops: tuple[Op, ...]
    input: str
    output: str
    num_parameters: int
