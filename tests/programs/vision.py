"""Three steps of a small image model under DDP: timm's ViT, or a DiT or UNet of diffusers."""

import sys

import torch
import with_torchvision  # noqa: F401  isort: split
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel


def vit() -> nn.Module:
    import timm

    return timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10)


def dit() -> nn.Module:
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )


def unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def loss_of(name: str, model: nn.Module, device: torch.device) -> Tensor:
    """Of one batch of two."""
    if name == "vit":
        images = torch.randn(2, 3, 32, 32, device=device)
        return functional.cross_entropy(model(images), torch.randint(0, 10, (2,), device=device))
    noise, times = torch.randn(2, 4, 8, 8, device=device), torch.randint(0, 1000, (2,), device=device)
    if name == "dit":
        labels = torch.randint(0, 1000, (2,), device=device)
        found = model(noise, timestep=times, class_labels=labels, return_dict=False)[0]
        return functional.mse_loss(found, noise)
    text = torch.randn(2, 6, 32, device=device)
    return functional.mse_loss(model(noise, times, text, return_dict=False)[0], noise)


def main(name: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with device:
        model = {"vit": vit, "dit": dit, "unet": unet}[name]()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        with sdpa_kernel(SDPBackend.MATH):  # a CPU has none of CUDA's other kernels
            loss_of(name, model, device).backward()
        optimizer.step()
        optimizer.zero_grad()


main(sys.argv[1])
