"""Model: a decoder-only transformer's shape, its exact parameter count, and the FLOP a token costs.

A `Model` is data: a preset in `topologies/models`, a Hugging Face `config.json`, or a TOML file of the same fields.
Every parameter is listed with its shape, since sharding pads each one and buckets follow their order.
"""

from simulator.spec.model.fields import Mlp
from simulator.spec.model.layer_kinds import Bf16Kind, BodyKind, LayerKind, ModelPart, Parameter, Shape, plain, wide
from simulator.spec.model.model import Model

__all__ = [
    "Bf16Kind",
    "BodyKind",
    "LayerKind",
    "Mlp",
    "Model",
    "ModelPart",
    "Parameter",
    "Shape",
    "plain",
    "wide",
]
