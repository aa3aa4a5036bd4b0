"""A tower: an encoder of images ahead of a language model, whose features take the places of tokens.

Legend: D d_model of the tower, K numbers of a patch, T tokens of an image in the tower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from simulator.base.schema import Strict
from simulator.spec.model.layer_kinds import Parameter, TowerKind

SIDE: Final = 448  # pixels, of towers that take images of any size; as `capture --recipe` has it
VISION, PROJECTOR = "vision", "projector"  # what names of the encoder's parameters begin with, and of what joins it
TOWER_WEIGHT: Final = f"{VISION}.patch.weight"  # a tower is trained whole, or frozen; so is what joins it
Count = Annotated[int, Field(ge=1, le=2**24)]
OrNone = Annotated[NonNegativeInt, Field(le=2**24)]
Tiles = Annotated[int, Field(ge=1, le=64)]
Grid = Annotated[tuple[Tiles, Tiles], Field(strict=False)]


class Tower(Strict):
    """An encoder of images: patches, layers that see both ways, and what joins its features to the language model.

    images: of a sequence (0: the tower is left out). side: pixels of an image's side; image_size: the one size that the tower
    takes (0: any). unread_layers: that run behind the one whose result is read. frames: that a patch spans (a lone image is
    repeated). flat_rows: class token and positions are stored under a leading dimension of one. pre_norm: before the layers.
    post_norm: behind them; unread: nobody runs it. layer_scale: each branch is multiplied by a weight a channel. window: pixels
    of a square that patches attend in, but in `full_layers` (0: everywhere). merge: side of the square of patches that becomes
    one token; merging: they are joined, averaged, or a product makes one of them. projector: widths of its linear layers (0: the
    language model's, -1: what it reads); its norm is over a patch, or over what was joined. extra_projectors: of further layers,
    into early layers of the language model (Qwen 3-VL's deepstack). tiles: rows and columns of tiles, as large as image_size, that
    an image may be cut into (none: it is not cut); they go through the tower beside the whole image, made as small. newline: what
    is padding is left out of the tiles' features, and a trained row follows each of their rows; where they are more than those of
    `dense_tiles`, they are resized (0: never).
    """

    num_layers: Count
    unread_layers: OrNone = 0
    d_model: Count
    num_heads: Count
    d_ff: Count
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    norm: Literal["rms", "layer"] = "layer"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    fused_qkv: bool = False
    qk_norm: bool = False
    positions: Literal["learned", "none"] = "learned"
    max_positions: OrNone = 0
    rotates: bool = False
    channels: Count = 3
    patch_size: Count
    frames: Count = 1
    patch_bias: bool = True
    class_token: bool = False
    flat_rows: bool = False
    pre_norm: bool = False
    post_norm: Literal["none", "read", "unread"] = "none"
    layer_scale: bool = False
    image_size: OrNone = 0
    window: OrNone = 0
    full_layers: tuple[int, ...] = Field(default=(), strict=False)
    merge: Count = 1
    merging: Literal["joined", "mean", "product"] = "joined"
    projector: tuple[int, ...] = Field(default=(0,), strict=False)
    projector_bias: bool = True
    projector_norm: Literal["none", "rms", "layer", "rms_joined", "layer_joined"] = "none"
    extra_projectors: OrNone = 0
    tiles: tuple[Grid, ...] = Field(default=(), strict=False)
    newline: bool = False
    dense_tiles: OrNone = 0
    images: NonNegativeInt = Field(le=2**16, default=1)
    side: OrNone = 0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        least = self.patch_size * self.merge
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.tiles and not self.image_size:
            raise ValueError("tiles are as large as image_size, which is missing")
        if (self.newline or self.dense_tiles) and not self.tiles:
            raise ValueError("newline and dense_tiles are of features of tiles, and there are no tiles")
        if self.image_size and self.side not in (0, self.image_size) and not self.tiles:
            raise ValueError(f"the tower takes images of {self.image_size} pixels a side, not {self.side}")
        if not least <= self.pixels <= 2**16:
            raise ValueError(f"an image has {self.pixels} pixels a side; {least} to {2**16} make patches of this tower")
        if self.positions == "learned" and not self.rotates and self.num_tokens > self.max_positions:
            raise ValueError(f"{self.num_tokens} tokens of an image have only {self.max_positions} positions")
        return self

    @property
    def pixels(self) -> int:
        """Of the side of what the tower takes: an image, or a tile of it."""
        return self.image_size if self.tiles else self.side or self.image_size or SIDE

    @property
    def grid(self) -> int:
        """Patches of that side: where images of any size are resized, a multiple of what is merged."""
        if self.image_size:
            return self.pixels // self.patch_size
        return max(1, round(self.pixels / self.patch_size / self.merge)) * self.merge

    @property
    def num_patches(self) -> int:
        """Of an image, or of a tile."""
        return self.grid**2

    @property
    def num_tokens(self) -> int:
        """T: of an image, or of a tile, in the tower."""
        return self.num_patches + self.class_token

    @property
    def cut(self) -> tuple[int, int]:
        """Rows and columns of an image's tiles: of those that keep most of its pixels, the fewest."""
        return min(self.tiles, key=lambda one: (-min(min(one) * self.image_size, self.side or SIDE), one[0] * one[1]))

    @property
    def inputs(self) -> int:
        """Of the tower, of an image."""
        return 1 + math.prod(self.cut) if self.tiles else 1

    @property
    def features(self) -> int:
        """That the projector makes of one of those."""
        return (self.grid // self.merge) ** 2

    @property
    def image_tokens(self) -> int:
        """Places that an image takes in the language model's sequence."""
        if not self.newline:
            return self.inputs * self.features
        sides = [tiles * self.grid // self.merge for tiles in self.cut]
        rows, columns = (side - (side - min(sides)) // 2 * 2 for side in sides)  # as much is padding on either side
        stretch = math.sqrt(rows * columns / (self.dense_tiles * self.features)) if self.dense_tiles else 1
        if stretch > 1.1:  # modeling_llava_onevision.py, pack_image_features
            rows, columns = int(rows // stretch), int(columns // stretch)
        return self.features + rows * (columns + 1)

    @property
    def taken(self) -> int:
        """Places that all images of a sequence take."""
        return self.images * self.image_tokens

    @property
    def patch_numel(self) -> int:
        """K: numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def attended(self) -> int:
        """Tokens that a token of a windowed layer sees, in the mean: windows at the edges are smaller."""
        width, whole = self.window // self.patch_size // self.merge, self.grid // self.merge
        if not 1 <= width < whole:
            return self.num_tokens
        number, rest = divmod(whole, width)
        return round(((number * width**2 + rest**2) / whole * self.merge) ** 2)

    @property
    def body(self) -> tuple[TowerKind, ...]:
        """Its units in order: layers whose result nobody reads, which may run anywhere; the others; the joint."""
        windowed: TowerKind = "tower_window" if self.attended < self.num_tokens else "tower"
        kinds = ("tower" if number in self.full_layers else windowed for number in range(self.num_layers))
        return (*["tower" for _ in range(self.unread_layers)], *kinds, "joint")  # type: ignore[arg-type]

    @property
    def layer_fields(self) -> dict[str, Any]:
        """Fields of a `Model` whose layers are the tower's."""
        same = ("num_layers", "d_model", "num_heads", "d_ff", "mlp", "norm", "qkv_bias", "out_bias", "mlp_bias", "fused_qkv",
                "qk_norm")  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "name": VISION, "family": VISION, "num_kv_heads": self.num_heads, "head_dim": self.d_model // self.num_heads,
            "vocab_size": 1, "norm_bias": self.norm == "layer", "qk_norm_wide": self.qk_norm,
            "positions": "rope" if self.rotates else "none", "max_positions": self.max_positions,
        }  # fmt: skip

    def projector_widths(self, d_model: int) -> tuple[int, ...]:
        """Columns into the projector's first layer, and out of each. d_model: the language model's."""
        read = self.d_model * (self.merge**2 if self.merging == "joined" else 1)
        return read, *({0: d_model, -1: read}.get(width, width) for width in self.projector)

    def end_parameters(self, d_model: int) -> Iterator[Parameter]:
        """(name, shape) of what is no layer, in registration order. d_model: the language model's."""
        d, lead = self.d_model, (1,) if self.flat_rows else ()
        norms = ("weight", "bias") if self.norm == "layer" else ("weight",)
        if self.class_token:
            yield f"{VISION}.class_token", (*lead, *lead, d)
        yield TOWER_WEIGHT, (d, self.patch_numel)
        if self.patch_bias:
            yield f"{VISION}.patch.bias", (d,)
        if self.positions == "learned":
            yield f"{VISION}.positions.weight", (*lead, self.max_positions, d)
        for name, there in (("pre_norm", self.pre_norm), ("post_norm", self.post_norm != "none")):
            yield from ((f"{VISION}.{name}.{one}", (d,)) for one in norms if there)
        for number in range(1 + self.extra_projectors):
            yield from self._projector(self.projector_widths(d_model), joins=number > 0)
        if self.newline:
            yield f"{PROJECTOR}.newline", (d_model,)

    def _projector(self, widths: tuple[int, ...], *, joins: bool) -> Iterator[Parameter]:
        """One projector; further ones have their norm over what was joined."""
        kind, _, joined = self.projector_norm.partition("_")
        for one in {"none": (), "rms": ("weight",), "layer": ("weight", "bias")}[kind]:
            yield f"{PROJECTOR}.norm.{one}", (widths[0] if joined or joins else self.d_model,)
        if self.merging == "product":
            yield f"{PROJECTOR}.merge.weight", (self.d_model, self.d_model * self.merge**2)
        for layer, (read, out) in enumerate(pairwise(widths)):
            yield f"{PROJECTOR}.{layer}.weight", (out, read)
            yield from ([(f"{PROJECTOR}.{layer}.bias", (out,))] if self.projector_bias else [])

    def forward_flop(self, d_model: int, layer: int) -> int:
        """FLOP of an image's forward through all that runs. layer: elements of a layer's matrices. d_model: the language model's."""
        layers, windowed = self.num_layers + self.unread_layers, self.body.count("tower_window")
        seen = windowed * self.attended + (layers - windowed) * self.num_tokens
        ends = self.num_patches * self.d_model * self.patch_numel
        each = sum(a * b for a, b in pairwise(self.projector_widths(d_model)))
        each += self.d_model**2 * self.merge**2 if self.merging == "product" else 0
        ends += (1 + self.extra_projectors) * self.features * each
        products = 2 * (layers * layer * self.num_tokens + ends)
        return self.inputs * (products + 4 * self.d_model * self.num_tokens * seen)
