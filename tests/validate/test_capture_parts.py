"""Captures of parts of torch that some programs use: lazy modules, inverse spectrograms, nn.Transformer without gradients, TorchScript."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.work.captured.capture import Kind, Phase
from tests.validate.test_capture_scripts import captured, operators

pytestmark = pytest.mark.usefixtures("warm_captures")

PARTS = """
import torch
from torch import nn

lazy = nn.Sequential(nn.LazyConv1d(5, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(32), nn.LazyLinear(32, device="cuda"))
lazy.cuda()
scripted = torch.jit.script(nn.Linear(32, 32)).cuda()
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).cuda().eval()
window = torch.hann_window(16, device="cuda")
lazy(torch.randn(4, 3, 8, device="cuda"))
optimizer = torch.optim.SGD([*lazy.parameters(), *scripted.parameters()], 0.1)
rollouts = 0
while True:
    hidden = scripted(lazy(torch.randn(4, 3, 8, device="cuda")))
    rollouts += 1
    for _ in range(8 if rollouts % 2 else 0):
        with torch.no_grad():
            padding = torch.zeros(4, 6, dtype=torch.bool, device="cuda")
            encoder(torch.randn(4, 6, 32, device="cuda"), src_key_padding_mask=padding)
    spectrum = torch.stft(hidden.reshape(1, 128), 16, 4, window=window, return_complex=True)
    sound = torch.istft(spectrum, 16, 4, window=window)
    far = torch.pdist(hidden).sum() + torch.cdist(hidden, sound.reshape(4, -1), p=1).sum()
    far.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_of_torch_that_some_programs_use(tmp_path: Path) -> None:
    """Parameters get their shape where they were moved; kernels of a layer, a mask and a module of TorchScript run one by one.

    Gradients of distances take a share of each coordinate of each pair: 4 × 4 pairs of 32, and 4 × 3 of one set, 4 bytes each.
    """
    capture = captured(tmp_path, PARTS)
    assert sum(size == 4 * 32 * 32 for size in capture.resident().values()) >= 2  # lazy weights among them
    forward = operators(capture, Phase.FORWARD)
    assert not any("nested" in name or "encoder" in name or "multi_head" in name for name in forward)
    assert forward["aten._scaled_dot_product_efficient_attention.default"] == 8  # in fp32, with a mask
    assert any(one.startswith("the fast path of nn.Transformer") for one in capture.answers)
    assert any(one.startswith("torch.jit.script") for one in capture.answers)
    assert any(one.startswith("steps differ") for one in capture.answers)
    begun = [one[2] for one in capture.events[capture.steady :] if one[0] == Kind.ALLOCATE]
    assert {4 * 16 * 32, 4 * 12 * 32} <= set(begun)
