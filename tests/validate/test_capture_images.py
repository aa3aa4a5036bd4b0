"""Models with a tower for images, captured from their config.json: what the step moves is the library's own parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.capture import read_capture
from simulator.work.captured.script import captured_script
from simulator.work.script.instructions import Communicate

pytestmark = pytest.mark.usefixtures("warm_captures")

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
QWEN: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
                      "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]},
    "image_token_id": 511, "video_token_id": 510, "vision_start_token_id": 509, "vision_end_token_id": 508,
}  # fmt: skip
MLLAMA: dict[str, Any] = {
    "model_type": "mllama",
    "text_config": {"model_type": "mllama_text_model", **TEXT, "cross_attention_layers": [1], "pad_token_id": 0},
    "vision_config": {"model_type": "mllama_vision_model", **TOWER, "num_global_layers": 1, "attention_heads": 2,
                      "vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 4},
    "image_token_index": 511,
}  # fmt: skip

NEXT: dict[str, Any] = {
    "model_type": "llava_next", "image_grid_pinpoints": [[32, 64], [64, 64]], "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 2, **TOWER}, "image_token_index": 511,
    "vision_feature_layer": -1,
}  # fmt: skip


def reduced_numel(folder: Path, config: dict[str, Any], *flags: str) -> int:
    """Gradients in fp32 that two ranks reduce in a step, in elements."""
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "step.capture.gz"
    how = ["--recipe", "fsdp2", "--ranks", "2", "--seq-len", "64", "-o", str(out), *flags]
    assert main(["capture", str(folder / "config.json"), *how]) == ExitCode.OK
    step = captured_script(read_capture(out)).step
    return sum(one.size_bytes for one in step if isinstance(one, Communicate) and one.kind == "reduce_scatter") // 4


def counted(config: dict[str, Any], of: Callable[[str], bool] = bool) -> int:
    """Parameters of the library's own model, by name; odd numbers of rows are padded to two ranks' equal parts."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**config))
    shapes = [one.shape for name, one in model.named_parameters() if of(name)]
    return sum(one.numel() + (one.numel() // one[0] if len(one) and one[0] % 2 else 0) for one in shapes)


@pytest.mark.parametrize("config", [QWEN, MLLAMA, NEXT], ids=["qwen2.5-vl", "llama-3.2-vision", "llava-next"])
def test_all_parameters_of_a_tower_and_its_projector_are_trained(config: dict[str, Any], tmp_path: Path) -> None:
    whole = counted(config, lambda name: "post_layernorm" not in name)  # CLIP's, of features that nobody reads
    assert reduced_numel(tmp_path, config, "--image-size", "32") == whole


def test_a_frozen_tower_runs_and_has_no_gradients(tmp_path: Path) -> None:
    text = counted(QWEN, lambda name: "visual" not in name)
    assert reduced_numel(tmp_path, QWEN, "--image-size", "32", "--freeze", "*visual*") == text


def test_more_images_than_a_sequence_holds_and_other_recipes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    how = ["--recipe", "fsdp2", "--seq-len", "64", "--images", "2", "-o", str(tmp_path / "x.capture.gz")]
    assert main(["capture", str(tmp_path / "config.json"), *how]) == ExitCode.BAD_INPUT
    assert "2 images of 784 tokens each are more than --seq-len 64" in capsys.readouterr().err
    pytest.importorskip("deepspeed")
    assert main(["capture", str(tmp_path / "config.json"), *how, "--recipe", "zero3"]) == ExitCode.BAD_INPUT
    assert "zero3 of qwen2_5_vl, which has a tower for images, is not captured" in capsys.readouterr().err


def test_flags_that_would_change_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    own, config, last = "a program says itself what it trains", ["--recipe", "fsdp2"], "rank 0 is the last one"
    for target, flags, problem in (
        ("train.py", ["--freeze", "*"], own),
        ("train.py", ["--adapter", "adapter_config.json"], own),
        ("train.py", ["--seq-len", "4096"], own),  # as it is without the flag, too
        ("train.py", ["--images", "0", "--image-size", "8", "--micro-batch-size", "2"], own),
        ("config.json", [*config, "--images", "0", "--image-size", "8"], "there are no images"),
        ("train.py", ["--check", "--ranks", "1"], last),
        ("train.py", ["--ranks", "8", "--nodes", "4"], "--nodes gives the job 32 GPUs"),
    ):
        out = ["-o", str(tmp_path / "x.gz")]
        assert main(["capture", str(tmp_path / target), *flags, *out]) == ExitCode.BAD_INPUT
        assert problem in capsys.readouterr().err
    assert main(["capture", str(tmp_path / "train.py"), "--warmup", "3", *out]) == ExitCode.USAGE
    assert "the program's own stand behind --. Did you mean --warm-up?" in capsys.readouterr().err


def test_flags_of_what_a_model_lacks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TEXT}))
    how = ["--recipe", "fsdp2", "--seq-len", "64", "-o", str(tmp_path / "x.capture.gz")]
    for flags, problem in (
        (["--images", "2"], "llama has no tower for images"),
        (["--freeze", "*visual*"], "--freeze *visual* names no parameter that is trained, as model.embed_tokens"),
    ):
        assert main(["capture", str(tmp_path / "config.json"), *how, *flags]) == ExitCode.BAD_INPUT
        assert problem in capsys.readouterr().err
