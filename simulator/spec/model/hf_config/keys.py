"""Typed access to a configuration's keys, and the names that most families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from simulator.base.errors import Fault

_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu", "gelu_pytorch_tanh": "geglu"}
Fields = dict[str, Any]


class Keys:
    """Typed access to a configuration that collects faults instead of stopping at the first."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self._config, self._place = config, place
        self.faults: list[Fault] = []

    def fault(self, key: str, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(place=f"{self._place}: {key}", problem=problem, remedy=remedy))

    def value(self, key: str) -> object:
        """What stands there, whatever it is."""
        return self._config.get(key)

    def has(self, key: str) -> bool:
        """The key is present and not null."""
        return self._config.get(key) is not None

    def section(self, key: str) -> Keys:
        """A nested object, empty if missing; its faults are collected here."""
        inner = self._config.get(key)
        if inner is not None and not isinstance(inner, dict):
            self.fault(key, "is not an object")
        nested = Keys(inner if isinstance(inner, dict) else {}, f"{self._place}: {key}")
        nested.faults = self.faults
        return nested

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of `names` that is present and not null."""
        key, value = self._first(names)
        if value is None:
            if default is None:
                self.fault(names[0], "is missing", "a positive integer")
            return default or 1
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fault(key, f"{short(value)} is not a positive integer")
            return 1
        return value

    def amount(self, *names: str, default: int = 0) -> int:
        """A number from 0 on."""
        key, value = self._first(names)
        if value is None or value == 0:
            return default if value is None else 0
        return self.count(key)

    def flag(self, *names: str, default: bool) -> bool:
        key, value = self._first(names)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.fault(key, f"{short(value)} is neither true nor false")
        return default

    def positive(self, *names: str, default: float) -> float:
        """A number above 0."""
        key, value = self._first(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.fault(key, f"{short(value)} is not a number above 0")
            return default
        return float(value)

    def share(self, *names: str, default: float) -> float:
        """A number in (0, 1]."""
        key, value = self._first(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            self.fault(key, f"{short(value)} is not in (0, 1]")
            return default
        return float(value)

    def word(self, name: str, legal: tuple[str, ...], default: str) -> str:
        value = self._config.get(name)
        if value is None or value in legal:
            return default if value is None else str(value)
        self.fault(name, f"{short(value)} is not known", f"one of {', '.join(legal)}")
        return default

    def activation(self, *names: str, default: str, gated: bool) -> str:
        table = _GATED if gated else _PLAIN
        key, value = self._first(names)
        value = default if value is None else value
        if isinstance(value, str) and value in table:
            return table[value]
        self.fault(key, f"activation {short(value)} is not known", f"one of {', '.join(table)}")
        return table[default]

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(((n, self._config[n]) for n in names if self._config.get(n) is not None), (names[0], None))


def short(value: object) -> str:
    """The value as a message shows it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."


def common_shape(keys: Keys, **defaults: int) -> Fields:
    """The names that most families share. `defaults`: what the family's class fills in."""
    heads = keys.count("num_attention_heads", default=defaults.get("num_heads"))
    width = keys.count("hidden_size")
    fields = {
        "num_layers": keys.count("num_hidden_layers"),
        "d_model": width,
        "num_heads": heads,
        "num_kv_heads": keys.count("num_key_value_heads", default=defaults.get("num_kv_heads", heads)),
        "d_ff": keys.count("intermediate_size"),
        "vocab_size": keys.count("vocab_size", default=defaults.get("vocab_size")),
        "max_positions": keys.count("max_position_embeddings", default=defaults.get("max_positions", 2048)),
    }
    fallback = defaults.get("head_dim", width // heads if width % heads == 0 else 0)
    if keys.has("head_dim") or fallback:
        fields["head_dim"] = keys.count("head_dim", default=fallback)
    return fields
