"""A tower: an encoder of images ahead of a language model, whose features take the places of tokens.

Legend: D d_model of the tower, K numbers of a patch, T tokens of an image in the tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.schema import Strict
from simulator.spec.model.layer_kinds import Parameter, TowerKind

SIDE: Final = 448  # pixels, of towers that take images of any size; as `capture --recipe` has it
_MOST: Final = 2**16
VISION: Final = "vision"  # what names of the encoder's parameters begin with
PROJECTOR: Final = "projector"
TOWER_WEIGHT: Final = f"{VISION}.patch.weight"  # a tower is trained whole, or frozen


class Tower(Strict):
    """An encoder of images: patches, layers that see both ways, and what joins its features to the language model.

    images: of a sequence (0: the tower is left out). side: pixels of an image's side; image_size: the one size that the tower
    takes (0: any). unread_layers: that run behind the one whose result is read. frames: that a patch spans (a lone image is
    repeated). flat_rows: class token and positions are stored under a leading dimension of one (InternVL). pre_norm: before
    the layers. post_norm: behind them; unread: it is a parameter that nobody runs. layer_scale: each branch is
    multiplied by a weight a channel. window: pixels of a square that patches attend in, but in `full_layers` (0: everywhere).
    merge: side of the square of patches that becomes one token; merging: they are joined, averaged, or a product makes one of
    them. projector: widths of its linear layers (0: the language model's, -1: what it reads). extra_projectors: of further layers, into early
    layers of the language model (Qwen 3-VL's deepstack).
    """

    num_layers: int = Field(ge=1, le=4096)
    unread_layers: int = Field(ge=0, le=4096, default=0)
    d_model: int = Field(ge=1, le=2**20)
    num_heads: int = Field(ge=1, le=_MOST)
    d_ff: int = Field(ge=1, le=2**24)
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    norm: Literal["rms", "layer"] = "layer"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    fused_qkv: bool = False
    qk_norm: bool = False
    positions: Literal["learned", "none"] = "learned"
    max_positions: int = Field(ge=0, le=2**24, default=0)
    rotates: bool = False
    channels: int = Field(ge=1, le=_MOST, default=3)
    patch_size: int = Field(ge=1, le=_MOST)
    frames: int = Field(ge=1, le=1024, default=1)
    patch_bias: bool = True
    class_token: bool = False
    flat_rows: bool = False
    pre_norm: bool = False
    post_norm: Literal["none", "read", "unread"] = "none"
    layer_scale: bool = False
    image_size: int = Field(ge=0, le=_MOST, default=0)
    window: int = Field(ge=0, le=_MOST, default=0)
    full_layers: tuple[int, ...] = Field(default=(), strict=False)
    merge: int = Field(ge=1, le=1024, default=1)
    merging: Literal["joined", "mean", "product"] = "joined"
    projector: tuple[int, ...] = Field(default=(0,), strict=False)
    projector_bias: bool = True
    projector_norm: Literal["none", "rms", "layer", "rms_joined", "layer_joined"] = "none"
    extra_projectors: int = Field(ge=0, le=64, default=0)
    images: int = Field(ge=0, le=_MOST, default=1)
    side: int = Field(ge=0, le=_MOST, default=0)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = []
        if self.d_model % self.num_heads:
            wrong.append(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        if self.image_size and self.side not in (0, self.image_size):
            wrong.append(
                f"the tower takes images of {self.image_size} pixels a side, not {self.side}: leave --image-size out"
            )
        if not wrong and (self.pixels < self.patch_size or self.grid < self.merge):
            least = self.patch_size * self.merge
            wrong.append(
                f"an image of {self.pixels} pixels a side has no patch of {least}: --image-size {least} at least"
            )
        if not wrong and self.positions == "learned" and not self.rotates and self.num_tokens > self.max_positions:
            wrong.append(f"{self.num_tokens} tokens of an image have only {self.max_positions} positions")
        if any(not 0 <= layer < self.num_layers for layer in self.full_layers):
            wrong.append(f"full_layers {list(self.full_layers)} of {self.num_layers} layers, numbered from 0")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    @property
    def pixels(self) -> int:
        """Of an image's side."""
        return self.side or self.image_size or SIDE

    @property
    def grid(self) -> int:
        """Patches of an image's side: where images of any size are resized, a multiple of what is merged."""
        if self.image_size:
            return self.pixels // self.patch_size
        return max(1, round(self.pixels / self.patch_size / self.merge)) * self.merge

    @property
    def num_patches(self) -> int:
        """Of an image."""
        return self.grid**2

    @property
    def num_tokens(self) -> int:
        """T: of an image, in the tower."""
        return self.num_patches + self.class_token

    @property
    def image_tokens(self) -> int:
        """Places that an image takes in the language model's sequence."""
        return (self.grid // self.merge) ** 2

    @property
    def patch_numel(self) -> int:
        """K: numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def attended(self) -> int:
        """Tokens that a token of a windowed layer sees, in the mean: windows at the edges are smaller."""
        width = self.window // self.patch_size // self.merge
        if not self.window or width < 1 or width * self.merge >= self.grid:
            return self.num_tokens
        whole, rest = divmod(self.grid // self.merge, width)
        squares = whole * width**2 + rest**2
        return round((squares / (self.grid // self.merge)) ** 2 * self.merge**2)

    @property
    def body(self) -> tuple[TowerKind, ...]:
        """Its units in order: layers whose result nobody reads, which may run anywhere; the others; the joint."""
        windowed: TowerKind = "tower_window" if self.attended < self.num_tokens else "tower"
        kinds: list[TowerKind] = [
            "tower" if number in self.full_layers else windowed for number in range(self.num_layers)
        ]
        return (*["tower" for _ in range(self.unread_layers)], *kinds, "joint")  # type: ignore[arg-type]

    @property
    def layer_fields(self) -> dict[str, Any]:
        """Fields of a `Model` whose layers are the tower's."""
        return {
            "name": VISION, "family": VISION, "num_layers": self.num_layers, "d_model": self.d_model, "d_ff": self.d_ff,
            "num_heads": self.num_heads, "num_kv_heads": self.num_heads, "head_dim": self.d_model // self.num_heads,
            "vocab_size": 1, "mlp": self.mlp, "norm": self.norm, "norm_bias": self.norm == "layer",
            "qkv_bias": self.qkv_bias, "out_bias": self.out_bias, "mlp_bias": self.mlp_bias, "fused_qkv": self.fused_qkv,
            "qk_norm": self.qk_norm, "qk_norm_wide": self.qk_norm,
            "positions": "rope" if self.rotates else "none", "max_positions": max(1, self.max_positions),
        }  # fmt: skip

    @property
    def projector_width(self) -> int:
        """Columns that the projector's first layer reads."""
        return self.d_model * (self.merge**2 if self.merging == "joined" else 1)

    def projector_widths(self, d_model: int) -> tuple[int, ...]:
        """Columns out of the projector's layers. d_model: the language model's."""
        return tuple({0: d_model, -1: self.projector_width}.get(width, width) for width in self.projector)

    def end_parameters(self, d_model: int) -> Iterator[Parameter]:
        """(name, shape) of what is no layer, in registration order. d_model: the language model's."""
        d, lead = self.d_model, (1,) if self.flat_rows else ()
        if self.class_token:
            yield f"{VISION}.class_token", (*lead, *lead, d)
        yield f"{VISION}.patch.weight", (d, self.patch_numel)
        if self.patch_bias:
            yield f"{VISION}.patch.bias", (d,)
        if self.positions == "learned":
            yield f"{VISION}.positions.weight", (*lead, self.max_positions, d)
        for name, there in (("pre_norm", self.pre_norm), ("post_norm", self.post_norm != "none")):
            yield from _norm(f"{VISION}.{name}", d, bias=self.norm == "layer") if there else ()
        for number in range(1 + self.extra_projectors):
            yield from self._projector(d_model, number)

    def _projector(self, d_model: int, number: int) -> Iterator[Parameter]:
        """One projector; further ones have their norm over what was joined."""
        kind, _, joined = self.projector_norm.partition("_")
        width = self.projector_width
        if kind != "none":
            yield from _norm(f"{PROJECTOR}.norm", width if joined or number else self.d_model, bias=kind == "layer")
        if self.merging == "product":
            yield f"{PROJECTOR}.merge.weight", (self.d_model, self.d_model * self.merge**2)
        for layer, out in enumerate(self.projector_widths(d_model)):
            yield f"{PROJECTOR}.{layer}.weight", (out, width)
            if self.projector_bias:
                yield f"{PROJECTOR}.{layer}.bias", (out,)
            width = out

    def forward_flop(self, d_model: int, matrices: int) -> int:
        """FLOP of an image's forward through all that runs. matrices: elements of a layer's. d_model: the language model's."""
        layers, tokens = self.num_layers + self.unread_layers, self.num_tokens
        windowed = self.body.count("tower_window")
        pairs = tokens * (windowed * self.attended + (layers - windowed) * tokens)
        ends = self.num_patches * self.d_model * self.patch_numel
        widths = (self.projector_width, *self.projector_widths(d_model))
        each = sum(a * b for a, b in zip(widths, widths[1:], strict=False))
        each += self.d_model**2 * self.merge**2 if self.merging == "product" else 0
        ends += (1 + self.extra_projectors) * self.image_tokens * each
        return 2 * (layers * matrices * tokens + ends) + 4 * self.d_model * pairs


def _norm(name: str, width: int, *, bias: bool) -> Iterator[Parameter]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)
