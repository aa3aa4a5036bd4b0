"""Registries: values that lower rooms ask for by name and upper rooms define."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final


class Registry:
    """Values by name, in the order of their registration, loaded on first use."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._load: Callable[[], object] | None = None

    def loads_by(self, load: Callable[[], object]) -> None:
        """Set the function that registers the values; called once, on first use."""
        self._load = load

    def register(self, name: str, value: object) -> None:
        """Raises ValueError where another value has the name."""
        if self._values.setdefault(name, value) is not value:
            raise ValueError(f"{name!r} is registered already")

    def names(self) -> tuple[str, ...]:
        self._loaded()
        return tuple(self._values)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  what was registered
        self._loaded()
        return self._values[name]

    def _loaded(self) -> None:
        if self._load is not None:
            load, self._load = self._load, None
            load()


VIEWS: Final = Registry()  # of a prediction: `simulator.formats.writers.views`
IMPLEMENTATIONS: Final = Registry()  # of data parallelism: `simulator.work.script`
