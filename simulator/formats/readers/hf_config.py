"""Hugging Face `config.json` -> Model: of a file, or of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from simulator.spec.model.hf_config import config_fields, file_fields


def read_hf_config(path: str | Path) -> Model:
    """The model of a config.json. Raises ModelError with every fault; nested `text_config` is followed."""
    fields, place = file_fields(path)
    return Model.parse(fields, place, ModelError)


def model_from_config(config: Mapping[str, Any], place: str, name: str) -> Model:
    """A model from the configuration's keys. Raises ModelError with every fault, each with `place` and its key."""
    return Model.parse(config_fields(config, place, name), place, ModelError)
