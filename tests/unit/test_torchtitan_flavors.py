"""torchtitan's flavors: every one is a model, with the parameters that its arguments say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.exchange import _flavor
from simulator.formats.readers.plans.options import table_of
from simulator.formats.readers.plans.torchtitan import read_torchtitan
from simulator.spec.model import Model

TABLE: Mapping[str, Any] = table_of("torchtitan")
FLAVORS = [
    (name, flavor) for table in ("flavors", "other_flavors") for name in TABLE[table] for flavor in TABLE[table][name]
]


def model_of(name: str, flavor: str) -> Model:
    job = {"model": {"name": name, "flavor": flavor}, "hf_transformers": {"model": "Qwen/Qwen3-4B-Instruct-2507"}}
    found = read_torchtitan(job, "job.toml").model
    assert found is not None
    return found if isinstance(found, Model) else Model.load(found)


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_every_flavor_is_a_model(name: str, flavor: str) -> None:
    assert model_of(name, flavor).num_layers > 1


def hidden(dim: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Llama's width of an MLP (torchtitan/models/llama3/model/model.py, FeedForward)."""
    wide = int(multiplier * int(2 * 4 * dim / 3))
    return -(-wide // multiple_of) * multiple_of


def llama(vocab: int, dim: int, layers: int, kv_share: float, wide: int) -> int:
    """Parameters of Llama: two ends and a norm; attention, an MLP and two norms in each layer."""
    each = 2 * dim * dim + 2 * dim * int(dim * kv_share) + 3 * dim * wide + 2 * dim
    return 2 * vocab * dim + dim + layers * each


def qwen3_debug(mlp: int, *, tied: bool) -> int:
    """dim 256, 8 layers, 16 heads and 8 key-value heads of 128 (torchtitan/models/qwen3/__init__.py, 0.2.2)."""
    attention = 256 * 128 * (2 * 16 + 2 * 8) + 2 * 128
    return (1 if tied else 2) * 2048 * 256 + 256 + 8 * (attention + mlp + 2 * 256)


def deepseek_debug() -> int:
    """dim 256, 6 layers of which one is dense, 16 heads, latent keys and values (torchtitan/models/deepseek_v3, 0.2.2)."""
    attention = 256 * 16 * 192 + 256 * (512 + 64) + 512 + 512 * 16 * 256 + 16 * 128 * 256
    experts = 8 * 256 + 3 * 256 * 256 * (8 + 2)
    return 2 * 2048 * 256 + 256 + 6 * (attention + 2 * 256) + 3 * 256 * 1024 + 5 * experts


def gpt_oss_debug() -> int:
    """dim 256, 4 layers, 64 heads of 64, 8 experts as wide as gpt-oss' own (torchtitan/models/gpt_oss, 0.2.2)."""
    attention = 2 * 256 * 4096 + 2 * 256 * 512 + 4096 + 2 * 512 + 256 + 64
    experts = 8 * (256 + 1) + 8 * (256 * 5760 + 5760 + 2880 * 256 + 256)
    return 2 * 201088 * 256 + 256 + 4 * (attention + experts + 2 * 256)


def llama4_debug() -> int:
    """dim 256, 6 layers, every second one with 8 experts and a shared one of 512 (torchtitan/models/llama4, 0.2.2)."""
    dense = llama(2048, 256, 6, 1, 768)
    return dense + 3 * (8 * 256 + 9 * 3 * 256 * 512 - 3 * 256 * 768)


BY_HAND = {
    ("llama3", "debugmodel"): llama(2048, 256, 6, 1, hidden(256)),
    ("llama3", "8B"): llama(128256, 4096, 32, 1 / 4, hidden(4096, 1024, 1.3)),
    ("llama3", "70B"): llama(128256, 8192, 80, 1 / 8, hidden(8192, 4096, 1.3)),
    ("llama3", "405B"): llama(128256, 16384, 126, 1 / 16, hidden(16384, 4096, 1.2)),
    ("simple_fsdp.llama3", "8B"): llama(128256, 4096, 32, 1 / 4, hidden(4096, 1024, 1.3)),
    ("llama2", "271M"): llama(32000, 1024, 16, 1, hidden(1024)),
    ("llama2", "1B"): llama(32000, 2048, 18, 1, hidden(2048)),
    ("llama2", "13B"): llama(32000, 5120, 40, 1, hidden(5120)),
    ("llama2", "26B"): llama(32000, 5120, 80, 1, hidden(5120)),
    ("llama2", "70B"): llama(32000, 8192, 80, 1 / 8, hidden(8192, 4096, 1.3)),
    ("llama4", "debugmodel"): llama4_debug(),
    ("qwen3", "debugmodel"): qwen3_debug(3 * 256 * 3072, tied=True),
    ("qwen3", "debugmodel_moe"): qwen3_debug(64 * 256 + 64 * 3 * 256 * 768, tied=False),
    ("deepseek_v3", "debugmodel"): deepseek_debug(),
    ("deepseek_v3", "671B"): 671_026_404_352,  # DeepSeek-V3 without its module of multi-token prediction
    ("gpt_oss", "debugmodel"): gpt_oss_debug(),
}


@pytest.mark.parametrize(("name", "flavor"), BY_HAND)
def test_a_flavor_has_the_parameters_of_its_arguments(name: str, flavor: str) -> None:
    assert model_of(name, flavor).num_parameters == BY_HAND[name, flavor]


def test_flavors_of_other_releases_are_read_but_never_written() -> None:
    assert _flavor(Model.load("llama3-8b")) == ("llama3", "8B")
    assert _flavor(model_of("deepseek_v3", "671B")) == ("deepseek_v3", "671B")
    with pytest.raises(Exception, match="llama2-7b is not one of torchtitan's flavors"):
        _flavor(Model.load("llama2-7b"))


def test_a_model_that_is_no_decoder_names_a_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "flux.toml"
    job.write_text('[model]\nname = "flux"\nflavor = "flux-debug"\n[training]\nlocal_batch_size = 1\nseq_len = 512\n')
    assert main(["predict", "--plan", str(job)]) == ExitCode.BAD_INPUT
    assert "--model llama3-8b, or any other decoder" in capsys.readouterr().err
    assert main(["predict", "--plan", str(job), "--model", "llama3-8b"]) == ExitCode.OK
