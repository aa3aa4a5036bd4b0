"""Models of Hugging Face configurations that a test writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from simulator.spec.model.hf_config import config_fields


def configured(config: Mapping[str, Any], place: str, name: str) -> Model:
    """The model of a configuration's keys. Raises ModelError with every fault, each with `place` and its key."""
    return Model.parse(config_fields(config, place, name), place, ModelError)
