"""A kernel's category by its name, and the kind of collective of a communication library's kernel."""

from __future__ import annotations

import re

_CATEGORIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("copies", r"^mem(cpy|set)\b"),
        ("optimizer", r"adam|sgd|multi_tensor|Optimizer\.step"),
        ("attention", r"scaled_dot_product|flash|fmha|attention"),
        ("loss", r"cross_entropy|softmax|nll_loss"),
        ("norm", r"rms_?norm|layer_?norm|GammaBeta"),
        ("embedding", r"embedding|index_?select"),
        ("gemm", r"gemm|cutlass|xmma|nvjet|cublas|::(add|b)?mm(_|$)|::linear|::matmul"),
    )
)
_COLLECTIVES = (
    ("all_reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("send_recv", re.compile(r"send|recv", re.IGNORECASE)),
)
_LIBRARIES = re.compile(r"^(gloo:|nccl)", re.IGNORECASE)


def category_of(name: str) -> str:
    """A kernel's category; unknown names are elementwise."""
    return next((category for category, pattern in _CATEGORIES if pattern.search(name)), "elementwise")


def collective_of(name: str, recorded_name: str = "") -> str | None:
    """The kind of collective that a kernel of a communication library is; None for other kernels.

    asked: what the program called, where the trace says so: all-to-all runs as NCCL's SendRecv.
    """
    if not _LIBRARIES.match(name):
        return None
    for text in (recorded_name, name):
        for kind, pattern in _COLLECTIVES:
            if pattern.search(text):
                return kind
    return "collective"
