"""Kinds of what a model is made of, and how its parameters are written down."""

from __future__ import annotations

from typing import Final, Literal, cast

from simulator.spec.model.hybrid import HybridKind

# dense_layer: without experts, in a model that has some; the others: layers of one branch, of hybrids
LayerKind = Literal["layer", "dense_layer"] | HybridKind
# Layers whose products stay in bf16, where those of the others are narrower
Bf16Kind = Literal[
    "layer_bf16", "dense_layer_bf16", "mamba_bf16", "attention_bf16", "both_bf16", "mlp_bf16", "moe_bf16"
]  # fmt: skip
BodyKind = LayerKind | Bf16Kind | Literal["mtp"]  # what stands between embedding and head
ModelPart = BodyKind | Literal["embedding", "head"]
Shape = tuple[int, ...]
Parameter = tuple[str, Shape]

BF16_SUFFIX: Final = "_bf16"


def wide(kind: LayerKind) -> Bf16Kind:
    """The same layer with products in bf16."""
    return cast("Bf16Kind", f"{kind}{BF16_SUFFIX}")


def plain(unit: ModelPart) -> LayerKind | Literal["embedding", "mtp", "head"]:
    """The kind of a unit by its contents, whatever the precision of its products."""
    return cast("LayerKind", unit.removesuffix(BF16_SUFFIX))
