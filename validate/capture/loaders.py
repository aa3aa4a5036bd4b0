"""Data loaders of a captured program: they work in its process, since children would be other programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from inspect import signature
from typing import Any

from torch.utils.data import DataLoader

from validate.capture.log import Log

_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")


def install(log: Log) -> list[str]:
    """In this process. The list tells which loaders were asked for batches and have none."""
    original, iterated, empty = DataLoader.__init__, DataLoader.__iter__, list[str]()

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature(original).bind(*args, **kwargs)
        if given.arguments.get("num_workers"):
            log.answer(f"DataLoader(num_workers={given.arguments['num_workers']}): 0")
        for name in _OF_WORKERS:
            given.arguments.pop(name, None)
        loader = given.arguments.pop("self")
        original(loader, **given.arguments)

    @wraps(iterated)
    def iterate(self: Any) -> Iterator[Any]:
        if hasattr(self.dataset, "__len__") and not len(self.dataset):
            empty.append(type(self.dataset).__name__)
        found: Iterator[Any] = iterated(self)
        return found

    DataLoader.__init__, DataLoader.__iter__ = init, iterate
    return empty
