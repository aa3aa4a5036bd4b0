"""Fine-tuning: adapters beside frozen weights, what else is trained or frozen, and how frozen weights are stored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Final, Literal, NamedTuple

from pydantic import Field, field_validator

from simulator.base.schema import Strict, nearest
from simulator.spec.plan.order import MAX_COUNT

Method = Literal["none", "full", "lora", "qlora", "dora", "ia3", "prefix"]
BaseWeights = Literal["compute", "fp32", "fp8", "int8", "nf4", "nf4_double", "gptq"]

# Weights that project keys and values of one width: a prefix can stand ahead of these
KEYS: Final = frozenset({"attention.k.weight", "attention.qkv.weight"})
# Words of libraries for the modules of a layer, as peft's `target_modules` and torchtune's `lora_attn_modules` have them
_ALSO: Final[dict[str, str]] = {
    **dict.fromkeys(("q_proj", "wq", "query"), "q"),
    **dict.fromkeys(("k_proj", "wk", "key"), "k"),
    **dict.fromkeys(("v_proj", "wv", "value"), "v"),
    **dict.fromkeys(("o_proj", "wo", "out_proj", "output_proj", "linear_proj"), "out"),
    **dict.fromkeys(("c_attn", "query_key_value", "qkv_proj", "W_pack", "linear_qkv", "Wqkv"), "qkv"),
    **dict.fromkeys(("gate_proj",), "gate"),
    **dict.fromkeys(("up_proj", "fc1", "dense_h_to_4h", "c_fc", "mlp_up"), "up"),
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "linear_fc2", "mlp_down"), "down"),
    **dict.fromkeys(("linear_fc1", "gate_up_proj"), "gate_up"),
    **dict.fromkeys(("embed_tokens", "wte", "tok_embeddings"), "embedding"),
    **dict.fromkeys(("head", "output"), "lm_head"),
    **dict.fromkeys(("all-linear", "all_linear", "linear"), "all"),
    **dict.fromkeys(("norms", "norm"), "norms"),
    **dict.fromkeys(("visual", "vision_tower", "vision_model"), "vision"),
    **dict.fromkeys(("multi_modal_projector", "merger"), "projector"),
}
_TOWERS: Final = ("vision", "projector")  # parts that these words alone name
# Words that name several modules
_WIDER: Final = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_KNOWN: Final = (
    *("all", "attention", "mlp", "experts", "shared", "mamba", "embedding", "positions", "lm_head", "norms", "router"),
    *("q", "k", "v", "qkv", "out", "gate", "up", "gate_up", "down", "q_down", "q_up", "kv_down", "kv_up"),
    *("in_proj", "x_proj", "dt_proj"),
    *("vision", "projector"),
)
_NOT_LINEAR: Final = ("embedding", "positions", "lm_head", "router", "shared_gate", "mamba.conv")
# `layers.0-11.mlp:8`: in layers 0 to 11, with pairs of rank 8; `layers.8-`: from layer 8 on
_WORD: Final = re.compile(r"(?:layers\.(\d{1,6})(?:(-)(\d{1,6})?)?(?:\.|$|(?=:)))?([^:]*)(?::(\d{1,7}))?")
_END: Final = 10**6
_IA3: Final = ("k", "v", "down")  # peft's, of Llama and its kin (utils/constants.py)


class _Word(NamedTuple):
    """A word of a list: modules, in all layers or some (first, last), with pairs of a rank of their own (0: the plan's)."""

    first: int
    last: int
    name: str
    rank: int = 0

    def __str__(self) -> str:
        last = f"-{self.last if self.last < _END else ''}" if self.last > self.first else ""
        scope = f"layers.{self.first}{last}" if self.first >= 0 else ""
        return ".".join(filter(None, (scope, self.name))) + (f":{self.rank}" if self.rank else "")


@cache
def _parsed(text: str) -> _Word:
    """Raises ValueError where it is no word."""
    found = _WORD.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no module: for example mlp, layers.0-11, layers.0-11.mlp, q:32 (its rank)")
    first, dash, end, name, rank = found.groups()
    last = end or (f"{_END}" if dash else first)
    word = _Word(int(first or -1), int(last or -1), _ALSO.get(name, name), int(rank or 0))
    if word.last < word.first or rank == "0":
        msg = f"{text!r}: layers from {first} to {last}" if word.last < word.first else f"{text!r} has a rank of 0"
        raise ValueError(msg)
    if not (word.name in _KNOWN or (not word.name and first is not None) or set(word.name) & set("*?[")):
        nearby = nearest(word.name, _KNOWN) or "for example attention, mlp, q, v"
        raise ValueError(f"{text!r} names no module: {nearby}")
    return word


class PeftPlan(Strict):
    """`[plan.peft]`: what is trained, of how many parameters, beside which frozen weights. `peft = "lora"` alone sets `method`."""

    method: Method = Field(
        default="none",
        description="adapters ([guide](../guides/fine-tuning.md)): low-rank pairs (LoRA), the same beside 4-bit weights, with "
        "magnitudes (DoRA), vectors (IA³), keys and values ahead of the sequence; all other weights are frozen. `full` trains all "
        "weights, as `none` does, and remedies name adapters and shorter sequences too",
    )
    rank: int = Field(ge=1, le=MAX_COUNT, default=16, description="of LoRA's and DoRA's pairs")
    targets: tuple[str, ...] = Field(
        default=("all",),
        strict=False,
        description="modules that have adapters: `all` linear layers but the head and routers, or `attention`, `mlp`, `experts`, "
        "`q`, `k`, `v`, `out`, `gate`, `up`, `down`, `embedding`, `lm_head`; peft's and Megatron's names are read too. "
        "`layers.0-11.mlp`: in these layers only (numbered from 0), `layers.8-`: all of layer 8 and of those behind it; `q:32`: with this rank",
    )
    dropout: float = Field(
        ge=0, lt=1, default=0.0, description="in front of each pair; above 0 it makes and keeps a mask"
    )
    prefix_tokens: int = Field(ge=1, le=MAX_COUNT, default=20, description="keys and values of `prefix`, a layer")
    base: BaseWeights | None = Field(
        default=None,
        description="how frozen matrices of layers are stored: as they compute; wider, in `fp32`, and cast by autocast where a "
        "product reads them; or dequantised at each use: fp8, int8, NF4 in blocks of 64 (`nf4_double`: scales quantised too), GPTQ "
        "int4 in groups of 128; not set: `nf4_double` of `qlora`",
    )
    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="dtype that pairs multiply in; not set: that of the other products, which autocast casts them to. `fp32`: "
        "peft's own adapters without autocast. They are stored in `master_dtype`",
    )
    master: Literal["fp32"] | None = Field(
        default=None,
        description="dtype that pairs, and their states, are stored in beside narrower modules that are trained whole, as peft's "
        "`modules_to_save` of a 16-bit model; not set: `master_dtype`",
    )
    upcasts: bool = Field(
        default=False,
        description="frozen embeddings, norms and heads are stored in fp32, and the residual stream is fp32 under autocast, as "
        "peft's `prepare_model_for_kbit_training` leaves them",
    )
    trained: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="modules that are trained whole beside adapters (peft's `modules_to_save`), by the words of `targets`, "
        "without ranks",
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="without adapters: modules that are not trained, by the words of `targets`, or parameters by a pattern "
        "(`attention.*`); `layers.0-11`: all of these layers. Below the lowest layer with something to train there is no "
        "backward (with adapters and recomputation there is: peft makes the embedding's output need gradients)",
    )

    @field_validator("targets", "trained", "frozen", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        """Words of libraries become ours; a flag's text is split."""
        words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            return words
        return [str(_parsed(word)) for word in words if word]

    @field_validator("trained", "frozen")
    @classmethod
    def _rankless(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if _parsed(word).rank:
                raise ValueError(f"{word!r}: a rank is of pairs, which lora_targets names")
        return words

    @property
    def adds(self) -> bool:
        """Adapters are trained, and the model is frozen."""
        return self.method not in ("none", "full")

    @property
    def any(self) -> bool:
        """Something is frozen."""
        return self.adds or bool(self.frozen)

    @property
    def pairs(self) -> bool:
        """Adapters are low-rank pairs."""
        return self.method in ("lora", "qlora", "dora")

    @property
    def stored(self) -> BaseWeights:
        """How frozen matrices of layers are stored."""
        return self.base or ("nf4_double" if self.method == "qlora" else "compute")

    @property
    def quantised(self) -> bool:
        """Frozen matrices of layers are dequantised, or cast, at each use."""
        return self.any and self.stored != "compute"

    @property
    def words(self) -> tuple[str, ...]:
        """The modules that adapters stand beside."""
        return _IA3 if self.method == "ia3" and self.targets == ("all",) else self.targets

    @property
    def by_layer(self) -> bool:
        """Layers differ in what is trained."""
        return any(_parsed(word).first >= 0 for word in (*self.targets, *self.trained, *self.frozen))

    @property
    def last_layer(self) -> int:
        """The highest layer that a word names; -1: none."""
        words = map(_parsed, (*self.targets, *self.trained, *self.frozen))
        return max((one.first if one.last == _END else one.last for one in words), default=-1)

    def at(self, layer: int | None) -> PeftPlan:
        """As a layer of this number has it; None: embedding, head and what else is no numbered layer."""
        return _at(self, layer) if self.any and self.by_layer else self

    def rank_of(self, module: str) -> int:
        """Of a module's pair: that of the first word that names the module and has one, else the plan's."""
        ranks = (one.rank for one in map(_parsed, self.words) if one.rank and _is(f"{module}.weight", one.name))
        return next(ranks, self.rank)

    def tunes(self, names: Iterable[str]) -> bool:
        """Some of these parameters are trained, or have adapters beside them."""
        return any(
            self.trains(name) or self.adapts(name.removesuffix(".weight")) or (self.method == "prefix" and name in KEYS)
            for name in names
        )

    def trains(self, name: str) -> bool:
        """A parameter of the model is trained, by its name."""
        if self.adds:
            return _among(name, self.trained)
        return not _among(name, self.frozen)

    def adapts(self, module: str) -> bool:
        """A linear module (`attention.q`) has an adapter. Towers have none."""
        if module.startswith(_TOWERS):
            return False
        return (self.pairs or self.method == "ia3") and _among(f"{module}.weight", self.words)


@cache
def _at(peft: PeftPlan, layer: int | None) -> PeftPlan:
    def here(words: tuple[str, ...], path: str) -> Iterator[str]:
        for one in map(_parsed, words):
            if one.first < 0 or (layer is not None and one.first <= layer <= one.last):
                yield str(_Word(-1, -1, one.name or path, one.rank))

    return peft.model_copy(
        update={
            "targets": tuple(here(peft.words, "all")),
            "trained": tuple(here(peft.trained, "*")),
            "frozen": tuple(here(peft.frozen, "*")),
        }
    )


@cache
def _among(name: str, words: tuple[str, ...]) -> bool:
    return any(_is(name, _parsed(word).name) for word in words)


def _is(name: str, word: str) -> bool:
    """`attention.q.weight` is `attention.q`, `attention`, `q`, `qkv`, part of `all`, and matches `attention.*`."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    if name.startswith(_TOWERS) or word in _TOWERS:
        return name.partition(".")[0] == word
    if word == "all":
        return not module.startswith(_NOT_LINEAR) and "norm" not in module and "sinks" not in module
    if word == "norms":
        return "norm" in module
    first, last = module.partition(".")[0], module.rpartition(".")[2]
    named = (module, first, last, *_WIDER.get(last, ()))
    return word in named or last in _WIDER.get(word, ()) or fnmatchcase(name, word)


NO_PEFT: Final = PeftPlan()
