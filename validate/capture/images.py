"""Inputs of a vision-language model of Hugging Face transformers: tokens with places for images, and the images.

How many tokens an image takes is asked of the model's own tower, on tensors without values.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from validate.capture.ranks import RefusedError

SIDE: Final = 448  # pixels, of towers that take images of any size
# Towers that take a grid of patches in one row each, images of any size (modeling_qwen2_vl.py and those made after it)
_GRIDS: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Towers that take square images of one size
_SQUARES: Final = ("llava", "internvl", "gemma3", "paligemma", "mistral3")
# Towers that take an image beside its tiles, which its shape says; in rows with a trained one behind each
_TILES: Final = ("llava_next", "llava_onevision")
_CROSSES: Final = ("mllama",)  # layers of the decoder attend to the image, which takes one token


def has_tower(config: Any) -> bool:
    """The model reads images."""
    return getattr(config, "vision_config", None) is not None


class Images:
    """Of each sequence `count`, of `side` pixels (0: as the tower has it, or `SIDE`). num_tokens: of one among the text's."""

    def __init__(self, model: Any, count: int, side: int) -> None:
        config = model.config
        self.kind, self.count, vision = config.model_type, count, config.vision_config
        if self.kind not in (*_GRIDS, *_SQUARES, *_TILES, *_CROSSES):
            known = ", ".join((*_GRIDS, *_SQUARES, *_TILES, *_CROSSES))
            raise RefusedError(f"images of {self.kind} are not known, but of {known}: --images 0 trains it on text")
        own = getattr(vision, "image_size", None)
        own = own[0] if isinstance(own, list | tuple) else own
        if own and side not in (0, own) and self.kind not in (*_GRIDS, *_TILES):
            raise RefusedError(f"its tower takes images of {own} pixels a side, not {side}")
        self.side, self.patch = (side or SIDE) if self.kind in _GRIDS else own, vision.patch_size
        self.merge = getattr(vision, "spatial_merge_size", 1)
        self.token = next(
            getattr(config, name) for name in ("image_token_id", "image_token_index") if hasattr(config, name)
        )
        if self.kind in _GRIDS:
            self.grid = max(1, round(self.side / self.patch / self.merge)) * self.merge
            self.row = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * self.patch**2
            self.num_tokens = self.grid**2 // self.merge**2
        elif self.kind in _CROSSES:
            self.tiles, self.num_tokens = vision.max_num_tiles, 1
        elif self.kind == "mistral3":
            self.num_tokens = (self.side // self.patch // config.spatial_merge_size) ** 2
        else:
            self.grids, self.whole = getattr(config, "image_grid_pinpoints", ()), side or SIDE
            self.num_tokens = self._asked(model)

    def _asked(self, model: Any) -> int:
        """Tokens that the tower makes of one image."""
        with torch.no_grad():
            found = model.get_image_features(**self._pictures(1, next(model.parameters()).device))
        features = found.last_hidden_state if found.pooler_output is None else found.pooler_output
        each = features if isinstance(features, list | tuple) else [features]
        return sum(one.numel() // one.shape[-1] for one in each)

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model takes for a batch of tokens, whose first are made places of images."""
        sequences, length = tokens.shape
        taken = self.count * self.num_tokens
        if taken > length:
            raise RefusedError(f"{self.count} images of {self.num_tokens} tokens each are more than --seq-len {length}")
        # built on the host, so that what a program asks of its tokens has an answer
        places = [self.token] * taken + [0 if self.token else 1] * (length - taken)
        ids = torch.tensor([places] * sequences, device=tokens.device)
        return {"input_ids": ids, "labels": tokens, **self._pixels(sequences, length, ids)}

    def _pixels(self, sequences: int, length: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        images, device = sequences * self.count, ids.device
        if self.kind in _GRIDS:
            grid = torch.tensor([[1, self.grid, self.grid]] * images, device=device)
            positions = torch.arange(length, device=device).expand(3, sequences, length)
            pixels = torch.randn(images * self.grid**2, self.row, device=device)
            return {"pixel_values": pixels, "image_grid_thw": grid, "position_ids": positions}
        if self.kind in _CROSSES:
            tiles, ones = (sequences, self.count, self.tiles), {"dtype": torch.long, "device": device}
            return {
                "pixel_values": torch.randn(*tiles, 3, self.side, self.side, device=device),
                "aspect_ratio_ids": torch.ones(tiles[:2], **ones),
                "aspect_ratio_mask": torch.ones(tiles, **ones),
                "cross_attention_mask": torch.ones(sequences, length, self.count, self.tiles, **ones),
            }
        if self.kind in _TILES:
            return self._pictures(images, device)
        pixels = self._pictures(images, device)["pixel_values"]
        if self.kind == "mistral3":
            return {
                "pixel_values": pixels,
                "image_sizes": torch.tensor([[self.side, self.side]] * images, device=device),
            }
        typed = self.kind in ("gemma3", "paligemma")
        return {"pixel_values": pixels, **({"token_type_ids": (ids == self.token).long()} if typed else {})}

    def _pictures(self, images: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Of so many images, their pixels; of their tiles, and how large the images are, where they are cut."""
        if self.kind not in _TILES:
            return {"pixel_values": torch.randn(images, 3, self.side, self.side, device=device)}
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        sizes = torch.tensor([[self.whole, self.whole]] * images)  # on the host, where the model asks for them
        inputs = image_size_to_num_patches([self.whole, self.whole], self.grids, self.side)
        pixels = torch.randn(images, inputs, 3, self.side, self.side, device=device)
        return {"pixel_values": pixels, "image_sizes": sizes}
