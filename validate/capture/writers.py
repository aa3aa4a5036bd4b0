"""Weights that other packages write: nothing is written, as by `torch.save`. Tensors without values have no bytes, nor addresses of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# where a function or a class' method stands in safetensors 0.8, transformers 5.23, peft 0.21 and diffusers 0.42
_WRITE = {
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained",),
}


def install() -> None:
    """For what the program imports from now on."""
    sys.meta_path.insert(0, _Watched())


class _Watched(MetaPathFinder):
    """Finds a module as the other finders do, and changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WRITE:
            return None
        others = (one for one in sys.meta_path if one is not self)
        found = next((spec for one in others if (spec := one.find_spec(fullname, path, target))), None)
        if found is not None and found.loader is not None:
            found.loader = _Loaded(found.loader)
        return found


class _Loaded(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for written in _WRITE[module.__name__]:
            owner, _, name = written.rpartition(".")
            setattr(getattr(module, owner) if owner else module, name, lambda *_, **__: None)
