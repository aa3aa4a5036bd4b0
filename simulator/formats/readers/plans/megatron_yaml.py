"""Megatron-LM's --yaml-cfg: the arguments in a YAML file (megatron/training/yaml_arguments.py), read as options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.base.files import ordinary
from simulator.formats.readers.plans.reading import MAX_SETTINGS, Entry
from simulator.formats.readers.yaml_document import MAX_BYTES, read_yaml

# Fields of TransformerConfig that the command line says the other way round, or in other words
_INVERTED: Final = {
    "add_bias_linear": "--disable-bias-linear",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "async_tensor_model_parallel_allreduce": "--no-async-tensor-model-parallel-allreduce",
}
_RENAMED: Final = {"layernorm_epsilon": "norm-epsilon", "activation_func": ""}


def with_yaml(entries: dict[str, Entry], file: str) -> dict[str, Entry]:
    """The options with those of the file that --yaml-cfg names, if it lies beside the script; the script's come first."""
    option = entries.get("--yaml-cfg")
    if option is None or not isinstance(option.value, str):
        return entries
    path = Path(file).parent / Path(option.value).name
    try:
        text = ordinary(path, MAX_BYTES).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        problem = f"{option.value} is not beside the script, or cannot be read: {type(exc).__name__}"
        raise PlanError.at(option.place, problem, "put it there") from None
    found = {entry.name: entry for entry in _options(read_yaml(text, str(path)), str(path))}
    return {**found, **{name: entry for name, entry in entries.items() if name != "--yaml-cfg"}}


def _options(data: Mapping[str, Any], file: str, depth: int = 0) -> Iterator[Entry]:
    """The entries of a table and of the tables in it. What is null or false is not given."""
    for count, (key, value) in enumerate(data.items()):
        name = f"--{_RENAMED.get(key, key).replace('_', '-')}"
        if isinstance(value, Mapping) and depth < 3 and count < MAX_SETTINGS:
            yield from _options(value, file, depth + 1)
        elif key in _INVERTED:
            if value is False:
                yield Entry(name=_INVERTED[key], value=True, place=f"{file}: {key}")
        elif value is not None and value is not False and name != "--":
            plain = value if value is True else [*map(str, value)] if isinstance(value, list) else str(value)
            yield Entry(name=name, value=plain, place=f"{file}: {key}")
        if value in ("swiglu", "squared_relu"):
            yield Entry(name=f"--{str(value).replace('_', '-')}", value=True, place=f"{file}: {key}")
