"""Model: a transformer's shape, its exact parameter count, and the FLOP a token costs.

A `Model` is data: a preset in `topologies/models`, a Hugging Face `config.json`, or a TOML file of the same fields.
Every parameter is listed with its shape, since sharding pads each one and buckets follow their order.
"""

from simulator.spec.model.layer_kinds import (
    FORWARD_SUFFIX,
    LOWEST_SUFFIX,
    BodyKind,
    LayerKind,
    ModelPart,
    Parameter,
    marked,
    number_of,
)
from simulator.spec.model.model import Model, preset_with_shape

__all__ = [
    "FORWARD_SUFFIX", "LOWEST_SUFFIX", "BodyKind", "LayerKind", "Model", "ModelPart", "Parameter", "marked",
    "number_of", "preset_with_shape",
]  # fmt: skip
