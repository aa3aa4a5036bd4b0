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
# Of a tower: a layer, one with windows, and what joins its features to the text's embeddings
TowerKind = Literal["tower", "tower_window", "joint"]
BodyKind = LayerKind | Bf16Kind | TowerKind | Literal["mtp"]  # what stands between embedding and head
ModelPart = BodyKind | Literal["embedding", "head"]
Shape = tuple[int, ...]
Parameter = tuple[str, Shape]

BF16_SUFFIX: Final = "_bf16"
FORWARD_SUFFIX: Final = "-forward"  # of layers below all that is trained
LOWEST_SUFFIX: Final = "-lowest"  # of the first layer above them, whose input needs no gradient


TOWER_KINDS: Final[tuple[TowerKind, ...]] = ("tower", "tower_window", "joint")


def marked(kind: BodyKind, mark: str) -> BodyKind:
    """A layer that differs from others of its kind: `@3` is trained as layer 3 is, `@3-forward` has no backward."""
    return cast("BodyKind", f"{kind}{mark}")


def number_of(unit: ModelPart) -> int | None:
    """The layer as which a marked one is trained."""
    _, sign, rest = unit.partition("@")
    return int(rest.removesuffix(BF16_SUFFIX).partition("-")[0]) if sign else None


def plain(unit: ModelPart) -> LayerKind | TowerKind | Literal["embedding", "mtp", "head"]:
    """The kind of a unit by its contents, whatever the precision of its products and what of it is trained."""
    return cast("LayerKind", unit.removesuffix(BF16_SUFFIX).partition("@")[0])
