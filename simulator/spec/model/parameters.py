"""Every parameter of a model with its shape, in registration order, and what they sum to.

Legend: D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary, L layers, s sequence length, E experts.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod

from simulator.spec.model.experts import Experts, Latent
from simulator.spec.model.fields import ModelFields
from simulator.spec.model.hybrid import KINDS, HybridKind
from simulator.spec.model.hybrid import parameter_shapes as mamba_shapes
from simulator.spec.model.layer_kinds import TOWER_KINDS, BodyKind, LayerKind, ModelPart, Parameter, plain
from simulator.spec.model.tower import VISION, Tower

# Where a family registers its norms among a layer's parameters: buckets are filled in registration order.
_NORMS_BETWEEN = ("gpt2", "gpt3", "mpt")  # ln_1, attention, ln_2, mlp
_NORMS_FIRST = ("gpt_neox", "falcon")  # all norms, attention, mlp; every other family: attention, mlp, norms


@lru_cache(maxsize=4096)
def _mixed(experts: Experts, layer_numbers: tuple[int, ...]) -> tuple[LayerKind, ...]:
    """Kinds of these layers of a mixture; a search asks for the same a hundred thousand times."""
    kinds: dict[bool, LayerKind] = {True: "layer", False: "dense_layer"}
    return tuple(kinds[experts.in_layer(number)] for number in layer_numbers)


class ModelParameters(ModelFields, defer_build=True):
    """A model's layers, and the parameters of each."""

    def parameter_shapes(self, unit: ModelPart) -> tuple[Parameter, ...]:
        """(name, shape) of every parameter of one `unit`, in registration order. Weights are (out, in) as in torch."""
        match plain(unit):
            case "embedding":
                return self._embedding()
            case "head":
                return self._head()
            case "mtp":
                return self._mtp()
            case "layer" | "dense_layer" as layer:
                return self._layer(dense=layer == "dense_layer")
            case "tower" | "tower_window" | "joint" as part:  # a joint runs what the root holds
                return _tower_layer(self.tower) if self.tower and part != "joint" else ()
            case "mamba" | "attention" | "both" | "mlp" | "moe" as branch:
                return (*self._norm_of("norm", self.d_model), *self._branch(branch))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        if self.pattern is not None:
            return tuple(KINDS[self.pattern[number]] for number in self.layer_numbers)
        if self.experts is None:
            plain_kind: LayerKind = "layer"
            return (plain_kind,) * self.num_layers
        return _mixed(self.experts, self.layer_numbers)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in the whole model."""
        return tuple(range(self.num_layers))

    @property
    def body(self) -> tuple[BodyKind, ...]:
        """The units between embedding and head, in order: a tower, layers, then multi-token-prediction modules."""
        module: BodyKind = "mtp"
        return (*self.tower_kinds, *self.layer_kinds, *[module for _ in range(self.mtp_layers)])

    @property
    def sees(self) -> Tower | None:
        """The tower, where a sequence has images for it."""
        return self.tower if self.tower is not None and self.tower.images else None

    @property
    def image_tokens(self) -> int:
        """Places of a sequence that its images take."""
        return self.sees.taken if self.sees else 0

    @property
    def tower_kinds(self) -> tuple[BodyKind, ...]:
        """The units of its tower."""
        return self.sees.body if self.sees else ()

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts, the modules of multi-token prediction among them."""
        if self.experts is None:
            return 0
        return self.layer_kinds.count("layer" if self.pattern is None else "moe") + self.mtp_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention; modules of multi-token prediction are not among them."""
        kinds = self.layer_kinds
        return self.num_layers if self.pattern is None else kinds.count("attention") + kinds.count("both")

    @property
    def num_mixers(self) -> int:
        """Layers with a mixer."""
        return self.layer_kinds.count("mamba") + self.layer_kinds.count("both")

    def num_parameters_of(self, unit: ModelPart) -> int:
        """Parameters of one embedding, one layer, or the head (a tied head has only its norm)."""
        return sum(prod(shape) for _, shape in self.parameter_shapes(unit))

    @property
    def num_parameters(self) -> int:
        """Trained parameters, exactly; a tied matrix counts once."""
        ends = self.num_parameters_of("embedding") + self.num_parameters_of("head")
        layers = sum(count * self.num_parameters_of(kind) for kind, count in Counter(self.body).items())
        return ends + layers

    @property
    def num_active_parameters(self) -> int:
        """Parameters used by one token: of the routed experts, those it is sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.top_k
        return self.num_parameters - self.num_expert_layers * idle * self.num_parameters_of_expert

    @property
    def num_parameters_of_expert(self) -> int:
        """Parameters of one routed expert."""
        return 0 if self.experts is None else sum(prod(shape[1:]) for _, shape in self._routed(self.experts))

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply a token's activations: the layers' matrices and the LM head (tied or not), no biases.

        A convolution's taps are left out, as in Megatron-LM's count. Of the routed experts, those it is sent to. A module of multi-token prediction has the LM head once more.
        What a sequence meets once is `numel_per_sequence`'s.
        """
        heads = 0 if self.num_classes else (1 + self.mtp_layers * self.mtp_passes) * self._head_matrices
        passes = {"mtp": self.mtp_passes}
        return heads + sum(
            count * passes.get(kind, 1) * self._matmul_parameters_of(kind)
            for kind, count in Counter(self.body).items()
            if kind not in TOWER_KINDS  # no token of the text passes them
        )

    @property
    def _head_matrices(self) -> int:
        """Elements of the head's matrices."""
        transform = self.d_model**2 if self.head_transform != "none" else 0
        return (self.num_classes or self.vocab_size) * self.d_model + transform

    @property
    def numel_per_sequence(self) -> int:
        """Elements of matrices that a sequence meets once, each counted as often: of classes' head, of every patch of its image."""
        head = self._head_matrices if self.num_classes else 0
        return head + (self.max_positions - 1) * self.patch_numel * self.d_model

    @property
    def tower_flop(self) -> int:
        """FLOP of the forward of a sequence's images."""
        tower = self.sees
        return (
            0 if tower is None else tower.images * tower.forward_flop(self.d_model, self._matmul_parameters_of("tower"))
        )

    def _matmul_parameters_of(self, unit: ModelPart) -> int:
        matrices = ((name, shape) for name, shape in self.parameter_shapes(unit) if name.endswith(".weight"))
        top_k = 0 if self.experts is None else self.experts.top_k
        return sum(
            top_k * prod(shape[1:]) if name.startswith("experts.") else prod(shape)
            for name, shape in matrices
            if len(shape) > 1 and name != "mamba.conv.weight"
        )

    def _embedding(self) -> tuple[Parameter, ...]:
        d = self.d_model
        tokens: tuple[Parameter, ...] = (("embedding.weight", (self.vocab_size, d)),)
        if self.patch_numel:
            tokens = (("embedding.class_token", (d,)), *_linear("embedding.patch", d, self.patch_numel, bias=True))
        kinds: tuple[Parameter, ...] = (("embedding.kinds.weight", (self.token_kinds, d)),) if self.token_kinds else ()
        positions: Parameter = ("positions.weight", (self.max_positions, d))
        norm = self._norm_of("embedding_norm", self.d_model) if self.embedding_norm else ()
        ends = self.sees.end_parameters(self.d_model) if self.sees else ()
        return (*ends, *tokens, *([positions] if self.positions == "learned" else []), *kinds, *norm)

    def _head(self) -> tuple[Parameter, ...]:
        d, rows = self.d_model, self.num_classes or self.vocab_size
        parameters = [*self._norm_of("norm", d)] if self.final_norm else []
        if self.head_transform != "none":
            parameters += _linear("lm_head.transform", d, d, bias=self.out_bias)
        if self.head_transform == "normed":
            parameters += self._norm_of("lm_head.norm", d)
        if not self.tied_embeddings:
            parameters.append(("lm_head.weight", (rows, d)))
        if self.lm_head_bias:
            parameters.append(("lm_head.bias", (rows,)))
        return tuple(parameters)

    def _mtp(self) -> tuple[Parameter, ...]:
        d = self.d_model
        norms = [p for name in ("embedding_norm", "stream_norm") for p in self._norm_of(f"mtp.{name}", d)]
        joined = _linear("mtp.join", d, 2 * d, bias=False)
        return (*norms, *joined, *self._layer(dense=False), *self._norm_of("mtp.norm", d))

    def _layer(self, *, dense: bool) -> tuple[Parameter, ...]:
        norms = [self._norm_of(f"norm_{i + 1}", self.d_model) for i in range(self.num_norms)]
        attention = self._attended()
        mlp = self._mlp() if self.experts is None or dense else self._experts(self.experts)
        if self.family in _NORMS_BETWEEN:
            return (*norms[0], *attention, *(p for norm in norms[1:] for p in norm), *mlp)
        flat = tuple(p for norm in norms for p in norm)
        return (*flat, *attention, *mlp) if self.family in _NORMS_FIRST else (*attention, *mlp, *flat)

    def _branch(self, kind: HybridKind) -> tuple[Parameter, ...]:
        """The one branch of a hybrid's layer."""
        if kind == "mamba" and self.mamba is not None:
            return mamba_shapes(self.mamba, self.d_model)
        if kind == "moe" and self.experts is not None:
            return self._experts(self.experts)
        if kind == "both":
            return (*self._branch("mamba"), *self._attended())
        return self._attended() if kind == "attention" else self._mlp()

    def _attended(self) -> tuple[Parameter, ...]:
        return self._attention() if self.latent is None else self._latent_attention(self.latent)

    def _attention(self) -> tuple[Parameter, ...]:
        out, kv, d = self.q_width, self.kv_columns, self.d_model
        q = self.q_columns
        widths = {"qkv": q + 2 * kv} if self.fused_qkv else {"q": q, "k": kv, "v": kv}
        parameters = [p for name, n in widths.items() for p in _linear(f"attention.{name}", n, d, bias=self.qkv_bias)]
        parameters += _linear("attention.out", d, out, bias=self.out_bias)
        if self.qk_norm and self.norm_weight:
            q_norm, k_norm = (out, self.kv_width) if self.qk_norm_wide else (self.head_dim, self.head_dim)
            parameters += [("attention.q_norm.weight", (q_norm,)), ("attention.k_norm.weight", (k_norm,))]
        if self.attention_sinks:
            parameters.append(("attention.sinks", (self.num_heads,)))
        return tuple(parameters)

    def _latent_attention(self, latent: Latent) -> tuple[Parameter, ...]:
        d, q_rank, kv_rank = self.d_model, latent.q_lora_rank, latent.kv_lora_rank
        kv_width = self.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        queries = [*_linear("attention.q", self.q_width, d, bias=False)]
        if q_rank:
            norm = self._norm_of("attention.q_norm", q_rank)
            down = _linear("attention.q_down", q_rank, d, bias=False)
            queries = [*down, *norm, *_linear("attention.q_up", self.q_width, q_rank, bias=False)]
        low = latent.o_groups * latent.o_lora_rank
        return (
            *queries,
            *_linear("attention.kv_down", kv_rank + latent.qk_rope_head_dim, d, bias=False),
            *self._norm_of("attention.kv_norm", kv_rank),
            *([] if latent.shared_kv else _linear("attention.kv_up", kv_width, kv_rank, bias=False)),
            *(_linear("attention.out_down", low, self.o_width // latent.o_groups, bias=False) if low else []),
            *_linear("attention.out", d, low or self.o_width, bias=False),
            *(self._indexer(latent) if latent.index_heads else []),
        )

    def _indexer(self, latent: Latent) -> tuple[Parameter, ...]:
        """Queries, one key for all heads with its norm, weights of the heads (DeepSeek-V3.2-Exp, inference/model.py)."""
        d, width = self.d_model, latent.index_head_dim
        norm = ("attention.index_norm.weight", (width,)), ("attention.index_norm.bias", (width,))
        return (
            *_linear("attention.index_q", latent.index_heads * width, latent.q_lora_rank, bias=False),
            *_linear("attention.index_k", width, d, bias=False),
            *norm,
            *_linear("attention.index_weights", latent.index_heads, d, bias=False),
        )

    def _mlp(self) -> tuple[Parameter, ...]:
        return self._dense("mlp", self.d_ff, bias=self.mlp_bias)

    def _dense(self, name: str, width: int, *, bias: bool, of: int = 0) -> tuple[Parameter, ...]:
        """of: channels that it reads and writes, if not the stream's."""
        d = of or self.d_model
        into = ("gate", "up") if self.gated else ("up",)
        parameters = [p for part in into for p in _linear(f"{name}.{part}", width, d, bias=bias)]
        return (*parameters, *_linear(f"{name}.down", d, width, bias=bias))

    def _experts(self, experts: Experts) -> tuple[Parameter, ...]:
        """Router, routed experts (all in one parameter, by expert), shared experts."""
        d = self.d_model
        router = _linear("router", experts.num_experts, d, bias=experts.router_bias)
        shared = self._dense("shared", experts.shared_d_ff, bias=experts.bias) if experts.shared_d_ff else ()
        gate = _linear("shared_gate", 1, d, bias=False) if experts.shared_gate else ()
        latent = experts.latent_dim
        low = (
            (*_linear("latent_down", latent, d, bias=False), *_linear("latent_up", d, latent, bias=False))
            if latent
            else ()
        )
        return (*router, *low, *self._routed(experts), *shared, *gate)

    def _routed(self, experts: Experts) -> tuple[Parameter, ...]:
        one = self._dense("experts", experts.d_ff, bias=experts.bias, of=experts.latent_dim)
        return tuple((name, (experts.num_local, *shape)) for name, shape in one)

    def _norm_of(self, name: str, width: int) -> tuple[Parameter, ...]:
        weight: Parameter = (f"{name}.weight", (width,))
        if not self.norm_weight:
            return ()
        return (weight, (f"{name}.bias", (width,))) if self.norm_bias else (weight,)


@lru_cache(maxsize=64)
def _tower_layer(tower: Tower) -> tuple[Parameter, ...]:
    layer = ModelParameters.model_construct(**tower.layer_fields).parameter_shapes("layer")
    scales: tuple[Parameter, ...] = (("scale_1", (tower.d_model,)), ("scale_2", (tower.d_model,)))
    return tuple((f"{VISION}.{name}", shape) for name, shape in (*layer, *(scales if tower.layer_scale else ())))


def _linear(name: str, width_out: int, width_in: int, *, bias: bool) -> list[Parameter]:
    weight: Parameter = (f"{name}.weight", (width_out, width_in))
    return [weight, (f"{name}.bias", (width_out,))] if bias else [weight]
