"""Towers for images: what is read of config.json files, parameters, FLOP, what is frozen, what they go with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import ModelError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.parallel.model_shard import body_names, shard_of, whole_body
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.families import preset_of
from simulator.spec.plan import Plan
from simulator.spec.plan.records import Offload
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan
from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.costs import StepCosts
from simulator.work.ops import build_blocks
from simulator.work.parameters import model_flop, trained_numel
from simulator.work.script import resident_tensors

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "configs" / "towers.json").read_text(encoding="utf-8")
)
TOWER = {
    "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "patch_size": 14, "max_positions": 256, "image_size": 224,
    "projector": [0, 0],
}  # fmt: skip
SMALL: dict[str, Any] = {
    "name": "small", "num_layers": 4, "d_model": 128, "num_heads": 4, "d_ff": 256, "vocab_size": 512, "tower": TOWER,
}  # fmt: skip
PLAN = Plan(dp_shard=2, seq_len=512)


def small(**tower: object) -> Model:
    return Model.parse({**SMALL, "tower": {**TOWER, **tower}}, "model.toml", ModelError)


@pytest.fixture
def one(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A case and its file."""
    (tmp_path / "config.json").write_text(json.dumps(request.param["config"]))
    return request.param, tmp_path / "config.json"


@pytest.mark.parametrize("one", CASES, ids=lambda case: case["model"], indirect=True)
def test_a_tower_has_the_parameters_of_transformers_own_model(one: tuple[dict[str, Any], Path]) -> None:
    """Counts are those of the models that transformers 5.18 makes of the same files."""
    case, file = one
    model = Model.load(file)
    assert model.num_parameters == case["parameters"]
    assert model.num_parameters - small_without(model).num_parameters == case["tower"]
    assert "not modelled" not in model.sources


def test_a_file_of_internvl_s_own_code_has_its_published_parameters(tmp_path: Path) -> None:
    """huggingface.co/OpenGVLab/InternVL2_5-8B: total 8,075,365,376; an image of one tile is 16 × 16 tokens."""
    text = {"model_type": "internlm2", "bias": False, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 92553, "tie_word_embeddings": False}  # fmt: skip
    vision = {"model_type": "intern_vit_6b", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 448,
              "num_attention_heads": 16, "norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": True, "patch_size": 14}  # fmt: skip
    config = {
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "llm_config": text,
        "vision_config": vision,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Model.load(tmp_path)
    assert model.num_parameters == 8_075_365_376
    assert model.tower is not None
    assert (model.tower.image_tokens, "not modelled" in model.sources) == (256, False)


def small_without(model: Model) -> Model:
    return model.model_copy(update={"tower": None})


@pytest.mark.parametrize("one", CASES, ids=lambda case: case["model"], indirect=True)
def test_transformers_counts_them_so(one: tuple[dict[str, Any], Path]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case, _ = one
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**case["config"])
        made = transformers.AutoModelForImageTextToText.from_config(config)
    assert sum(parameter.numel() for parameter in made.parameters()) == case["parameters"]


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "llava-1.5-7b", "llava-v1.6-mistral-7b"])
def test_a_preset_is_what_its_file_says(name: str, tmp_path: Path) -> None:
    case = next(one for one in CASES if one["parameters"] == Model.load(name).num_parameters)
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    assert Model.load(tmp_path / "config.json").tower == Model.load(name).tower
    assert preset_of("Qwen/Qwen2.5-VL-7B-Instruct") == "qwen2.5-vl-7b"
    assert preset_of("Qwen/Qwen2.5-7B-embedding") is None
    assert preset_of("llava-hf/llava-v1.6-mistral-7b-hf") == "llava-v1.6-mistral-7b"
    assert preset_of("llava-hf/llava-v1.6-vicuna-7b-hf") is preset_of("llava-hf/llava-1.5-13b-hf") is None


@pytest.mark.parametrize(("side", "tokens"), [(448, 16 * 16), (1024, 37 * 37), (40, 1), (28, 1)])
def test_an_image_is_resized_to_whole_squares_of_patches(side: int, tokens: int) -> None:
    """Qwen 2.5-VL: patches of 14 pixels, squares of 2 × 2 of them."""
    tower = Model.load("qwen2.5-vl-7b").tower
    assert tower is not None
    assert tower.model_copy(update={"side": side}).image_tokens == tokens


TILED: dict[str, dict[str, Any]] = {
    "llava_next": {"image_grid_pinpoints": [[48, 96], [96, 48], [96, 96], [144, 48], [48, 144]],
                   "vision_config": {"model_type": "clip_vision_model"}},
    "llava_onevision": {"image_grid_pinpoints": [[48 * a, 48 * b] for a in range(1, 7) for b in range(1, 7)],
                        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "idefics3": {"vision_config": {"size": {"longest_edge": 120}}},
}  # fmt: skip
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 48}
WORDS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512,
}  # fmt: skip


def tiled(kind: str, folder: Path, patch_size: int = 8, **keys: object) -> tuple[Model, dict[str, Any]]:
    """A small model whose images are cut into tiles of 48 pixels, and its file."""
    config = {"model_type": kind, **TILED[kind], "text_config": {"model_type": "llama", **WORDS}, **keys}
    config["vision_config"] = {**EYES, "patch_size": patch_size, **config["vision_config"]}
    (folder / "config.json").write_text(json.dumps(config))
    return Model.load(folder), config


def of_side(model: Model, side: int) -> Model:
    assert model.tower is not None
    return model.model_copy(update={"tower": model.tower.model_copy(update={"side": side})})


@pytest.mark.parametrize(("kind", "patch_size", "side", "inputs", "tokens"), [
    ("llava_next", 8, 48, 1 + 2, 36 + 6 * (6 + 1)),  # 1 × 2 tiles, half of which is padding
    ("llava_next", 16, 48, 1 + 2, 9 + 3 * (4 + 1)),  # of 3 columns of padding one stays
    ("llava_next", 8, 1000, 1 + 4, 36 + 12 * (12 + 1)),
    ("llava_onevision", 8, 20, 1 + 1, 36 + 6 * (6 + 1)),
    ("llava_onevision", 8, 144, 1 + 9, 36 + 18 * (18 + 1)),
    ("llava_onevision", 8, 288, 1 + 36, 36 + 18 * (18 + 1)),  # 36 × 36 features are made as many as nine tiles have
    ("idefics3", 8, 48, 1 + 9, 10 * 9),  # stretched to 120 pixels, cut into 3 × 3, four patches a token
])  # fmt: skip
def test_tokens_of_an_image_in_tiles(
    kind: str, patch_size: int, side: int, inputs: int, tokens: int, tmp_path: Path
) -> None:
    tower = of_side(tiled(kind, tmp_path, patch_size)[0], side).tower
    assert tower is not None
    assert (tower.inputs, tower.image_tokens) == (inputs, tokens)


@pytest.mark.parametrize(("model", "side", "tokens"), [
    ("llava-v1.6-mistral-7b", 672, 24 * 24 + 48 * 49), ("llava-v1.6-mistral-7b", 336, 24 * 24 + 24 * 25),
    ("llava-onevision-qwen2-7b", 384, 27 * 27 + 27 * 28), ("llava-onevision-qwen2-7b", 2304, 27 * 27 + 81 * 82),
    ("idefics3-8b-llama3", 448, 17 * 13 * 13), ("smolvlm-256m", 448, 17 * 64), ("paligemma2-3b-448", 0, 32 * 32),
])  # fmt: skip
def test_tokens_of_published_models_images(model: str, side: int, tokens: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(next(one["config"] for one in CASES if one["model"] == model)))
    tower = of_side(Model.load(tmp_path), side).tower
    assert tower is not None
    assert tower.image_tokens == tokens


@pytest.mark.parametrize("side", [20, 60, 144, 288])
@pytest.mark.parametrize("kind", TILED)
def test_transformers_has_as_many_tiles_tokens_and_flop(kind: str, side: int, tmp_path: Path) -> None:
    """All products of the library's own model, counted as they run, are those of the formula."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    seeing, config = tiled(kind, tmp_path)
    seeing, sizes = of_side(seeing, side), torch.tensor([[side, side]])
    made = transformers.AutoConfig.for_model(**config)
    made = transformers.AutoModelForImageTextToText.from_config(made, attn_implementation="eager").eval()
    assert seeing.num_parameters == sum(parameter.numel() for parameter in made.parameters())
    assert seeing.tower is not None
    if kind != "idefics3":
        counts = getattr(transformers.models, kind).modeling_llava_next if kind == "llava_next" else None
        counts = counts or transformers.models.llava_onevision.modeling_llava_onevision
        assert seeing.tower.inputs == counts.image_size_to_num_patches([side, side], config["image_grid_pinpoints"], 48)
    pixels = torch.ones(1, seeing.tower.inputs, 3, 48, 48)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        found = made.model.get_image_features(pixels, **({} if kind == "idefics3" else {"image_sizes": sizes}))
    features = found.pooler_output if isinstance(found.pooler_output, list | tuple) else [found.pooler_output]
    assert seeing.tower.image_tokens == sum(one.numel() // one.shape[-1] for one in features)
    assert seeing.tower_flop == counter.get_total_flops()


@pytest.mark.parametrize(("kind", "keys", "words"), [
    ("llava_next", {"image_grid_pinpoints": [[48, 50]]}, r"config.json: image_grid_pinpoints: \[48, 50\] is no \[height, width\] of whole tiles \(multiples of 48"),
    ("llava_next", {"image_grid_pinpoints": 7.5}, "image_grid_pinpoints: 7.5 is no"),
    ("llava_next", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy: features with the class token .*default"),
    ("llava_onevision", {"vision_feature_select_strategy": "default"}, "without the first patch, .*full"),
    ("llava_onevision", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio: 'pad' is not known .anyres_max_9"),
    ("llava_onevision", {"vision_config": {"model_type": "siglip_vision_model"}}, "vision_use_head: a head .*false"),
    ("llava_next", {"vision_config": {"model_type": "clip_vision_model", "image_size": 0}}, "image_grid_pinpoints: is not a value that can stand here"),
    ("idefics3", {"vision_config": {"image_size": 0, "size": {"longest_edge": 9}}}, "vision_config: size.longest_edge: is not"),
    ("idefics3", {"scale_factor": "two"}, "config.json: scale_factor: 'two' is not a positive integer"),
    ("idefics3", {"vision_config": {"size": {"longest_edge": "wide"}}}, "vision_config: size.longest_edge"),
    ("llava_next", {"vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 7}}, "config.json: vision_config: d_model .* is not a multiple of num_heads 7"),
])  # fmt: skip
def test_a_tower_in_tiles_that_is_none_of_these_is_refused(
    kind: str, keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words):
        tiled(kind, tmp_path, **keys)


def test_embeddings_of_llava_onevision_are_tied_where_either_section_says_so(tmp_path: Path) -> None:
    """configuration_llava_onevision.py; of LLaVA-NeXT the whole file says it."""
    for kind, tied in (("llava_onevision", True), ("llava_next", False)):
        words = {"model_type": "qwen2", **WORDS, "tie_word_embeddings": True}
        model, _ = tiled(kind, tmp_path, text_config=words, tie_word_embeddings=False)
        assert model.tied_embeddings == tied


@pytest.mark.parametrize("side", [224, 448, 1024])
def test_a_window_sees_itself(side: int) -> None:
    """In the mean over all tokens: counted patch by patch. Windows are 112 pixels, 4 × 4 squares of 2 × 2 patches."""
    tower = Model.load("qwen2.5-vl-7b").tower
    assert tower is not None
    tower = tower.model_copy(update={"side": side})
    squares = tower.grid // 2
    window = [(row // 4, column // 4) for row in range(squares) for column in range(squares)]
    seen = sum(4 * window.count(one) for one in window) / len(window)
    assert tower.attended == round(seen)


def forward_flop(model: Model, plan: Plan = PLAN) -> int:
    """Of a sequence's images: the products and attention of the tower's blocks, the text's and its look-up left out."""
    blocks = build_blocks(model, Stack.load("torch-2.11-eager"), plan)
    count = {kind: model.tower_kinds.count(kind) for kind in model.tower_kinds}
    own = [(1, blocks.embedding), *((count[one.name], one) for one in blocks.body if one.name in count)]  # type: ignore[index]
    return sum(times * block.forward_flop for times, block in own)


@pytest.mark.parametrize(
    "model", [small(), small(class_token=True, max_positions=257), small(merge=2, merging="product", projector_norm="rms"),
              small(images=3), small(tiles=[[1, 2], [2, 2]], newline=True), small(tiles=[[4, 4]], merge=2, images=2),
              Model.load("qwen2.5-vl-7b")], ids=lambda model: str(model.tower.merging)
)  # fmt: skip
def test_flop_of_the_blocks_are_those_of_the_formula(model: Model) -> None:
    """By hand for the first: 256 tokens of 64 channels, two layers of 4 D² + 2 D F and the whole square, patches, projector."""
    assert forward_flop(model) == model.tower_flop
    if model == small():
        layer, square = 2 * 256 * (4 * 64 * 64 + 2 * 64 * 128), 4 * 256 * 256 * 64
        ends = 2 * 256 * 64 * 3 * 14 * 14 + 2 * 256 * (64 * 128 + 128 * 128)
        assert model.tower_flop == 2 * (layer + square) + ends


def test_backward_of_a_trained_tower_is_twice_its_forward_but_for_gradients_of_pixels() -> None:
    model = small()
    blocks = build_blocks(model, Stack.load("torch-2.11-eager"), PLAN)
    kinds = {block.name: block for block in blocks.body}
    gemm = 2 * 256 * (4 * 64 * 64 + 2 * 64 * 128)
    assert kinds["tower"].backward_flop == 2 * gemm + 5 * 2 * 256 * 256 * 64  # tiled attention makes the scores again
    assert blocks.embedding.backward_flop == blocks.embedding.forward_flop
    held = {block.name: sum(op.parameter_numel for op in block.ops) for block in (*blocks.body, blocks.embedding)}
    assert held["tower"] == model.num_parameters_of("tower")
    assert held["embedding"] + held["joint"] == model.num_parameters_of("embedding")


def test_adapters_leave_the_tower_frozen_and_it_keeps_nothing() -> None:
    model, plan = small(), PLAN.copy_with(peft="lora", recompute="full")
    kinds = whole_body(model, plan)
    assert [kind.partition("@")[0] for kind in kinds[:3]] == ["tower", "tower", "joint"]
    blocks = build_blocks(model, Stack.load("torch-2.11-eager"), plan)
    for block in (blocks.embedding, *(one for one in blocks.body if one.name.startswith(("tower", "joint")))):
        assert not block.backward_flop
        assert not any(op.saved for op in block.ops)
    text = trained_numel(small_without(model), plan)
    assert trained_numel(model, plan) == text  # adapters of the language model alone
    assert (
        model_flop(model, plan) - model_flop(small_without(model), plan) == 2 * model.tower_flop
    )  # two ranks, forward


def test_a_projector_is_trained_without_its_tower() -> None:
    model, plan = small(), PLAN.copy_with(freeze_modules=("vision",))
    blocks = {
        block.name.partition("@")[0]: block for block in build_blocks(model, Stack.load("torch-2.11-eager"), plan).body
    }
    assert (
        blocks["joint"].backward_flop == blocks["joint"].forward_flop + 2 * 256 * 128 * 128
    )  # of the second product's input
    assert not blocks["tower"].backward_flop
    shapes = {name: shape for name, shape in model.parameter_shapes("embedding") if name.startswith("vision")}
    tower = sum(a * b for a, b in ((64, 588), (256, 64))) + 64
    assert tower == sum(map(_numel, shapes.values()))
    assert trained_numel(model, plan) == model.num_parameters - tower - 2 * model.num_parameters_of("tower")


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def test_a_tower_stands_in_the_first_stage_and_in_units_of_its_own() -> None:
    model, plan = small(), Plan(pp=2, dp_shard=2, seq_len=512, num_micro_batches=4)
    first, last = (body_names(shard_of(model, plan, stage)) for stage in (0, 1))
    assert first == ("tower0", "tower1", "joint", "layer0", "layer1")
    assert last == ("layer2", "layer3")


@pytest.mark.parametrize("how", [{}, {"data_parallel": "fsdp1"}, {"zero": 0}, {"data_parallel": "deepspeed"},
                                 {"data_parallel": "megatron", "zero": 1}, {"peft": "lora"}, {"pp": 2, "num_micro_batches": 2},
                                 {"num_micro_batches": 2}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("tiles", [{}, {"tiles": [[1, 1]], "newline": True, "merge": 2}], ids=["whole", "tiles"])
def test_a_tower_adds_its_memory_and_time_wherever_it_runs(how: dict[str, Any], tiles: dict[str, Any]) -> None:
    shards = "dp_replicate" if how.get("zero") == 0 else "dp_shard"
    plan = Plan(seq_len=512, **{shards: 4 if "pp" in how else 8}, **how)
    cluster, seeing = Cluster.load("hgx-h100-8", 1), small(num_layers=8, d_model=256, d_ff=1024, **tiles)
    seen, text = (predict(model, plan, cluster) for model in (seeing, small_without(seeing)))
    assert seen.step_s > text.step_s
    assert seen.memory.peak_allocated_bytes > text.memory.peak_allocated_bytes
    stored = [sum(resident_tensors(shard_of(one, plan), plan)["parameters"]) for one in (seeing, small_without(seeing))]
    tower = seeing.num_parameters - small_without(seeing).num_parameters
    assert stored[0] - stored[1] >= 2 * tower // 8  # 16 bits at least, over eight GPUs at most
    assert predict(
        seeing.model_copy(update={"tower": seeing.tower.model_copy(update={"images": 0})}), plan, cluster
    ) == replace(text)  # type: ignore[union-attr]


@pytest.mark.parametrize(("how", "words"), [
    ({"tp": 2}, "plan: tp: a tower for images with tensor parallelism is not modelled"),
    ({"cp": 2}, "plan: cp: a tower for images with context parallelism"),
    ({"recompute": "every_k", "recompute_every": 2}, "each k-th layer recomputed"),
    ({"offload": Offload(activations="host")}, "activations off the GPU"),
    ({"seq_len": 128}, "the images of a sequence take 256 tokens, and seq_len is 128"),
])  # fmt: skip
def test_what_a_tower_does_not_go_with_is_said(how: dict[str, Any], words: str) -> None:
    plan = PLAN.copy_with(**{"dp_shard": 4 if {"tp", "cp"} & set(how) else 8, **how})
    with pytest.raises(PlanError, match="--images") as caught:
        predict(small(), plan, Cluster.load("hgx-h100-8", 1))
    assert words in str(caught.value)


@pytest.mark.parametrize(("wrong", "words"), [
    ({"side": 448}, "the tower takes images of 224 pixels a side, not 448"),
    ({"image_size": 0, "side": 8}, "an image has 8 pixels a side; 14"),
    ({"num_heads": 5}, "d_model 64 is not a multiple of num_heads 5"),
    ({"class_token": True}, "257 tokens of an image have only 256 positions"),
    ({"tiles": [[2, 2]], "image_size": 0}, "tiles are as large as image_size, which is missing"),
    ({"newline": True}, "newline and dense_tiles are of features of tiles, and there are no tiles"),
])  # fmt: skip
def test_a_tower_that_contradicts_itself_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        small(**wrong)


def test_flags_say_how_many_images_and_of_what_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def flop(*flags: str) -> int:
        assert main(["predict", "--seq-len", "4096", "--json", *flags]) == ExitCode.OK
        found: int = json.loads(capsys.readouterr().out)["model_flop_per_step"]
        return found

    model = Model.load("qwen2.5-vl-7b")
    with_two = model.model_copy(update={"tower": model.tower.model_copy(update={"images": 2, "side": 672})})  # type: ignore[union-attr]
    seen, text = (
        flop("--model", model.name, "--images", "2", "--image-size", "672"),
        flop("--model", model.name, "--images", "0"),
    )
    assert seen - text == 3 * 8 * with_two.tower_flop
    assert main(["predict", "--model", "llama3-8b", "--images", "2"]) == ExitCode.BAD_INPUT
    assert "--images: llama3-8b has no tower for images that is read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**CASES[3]["config"], "vision_config": {"model_type": "dinov2"}}))
    assert main(["predict", "--model", str(tmp_path / "config.json")]) == ExitCode.BAD_INPUT
    assert (
        "vision_config.model_type: a tower of 'dinov2' is not read (one of clip_vision_model" in capsys.readouterr().err
    )


def test_other_commands_take_the_same_images(capsys: pytest.CaptureFixture[str]) -> None:
    """predict, compare, sensitivity and search give the same plan with the same images the same step."""
    model = ("--model", "qwen2.5-vl-7b", "--images", "2", "--image-size", "672")
    plan = ("plan.seq_len=4096", "plan.stack=torch-2.11-eager", "plan.reshard_after_forward=true")
    asked = (*model, *(word for one in plan for word in ("--set", one)))

    def answer(*words: str) -> Any:
        assert main([*words, "--json"]) == ExitCode.OK
        return json.loads(capsys.readouterr().out)

    alone = answer("predict", *asked)
    compared = answer("compare", *asked, "--what-if", "model.tower.images=0", "--no-ablations")["subjects"]
    assert compared[0]["step_s"] == alone["step_s"] > compared[1]["step_s"]
    speed = "cluster.inter.nic_bytes_per_s=200Gb/s..400Gb/s"  # of no use on one node
    sampled = answer("sensitivity", *asked, "--vary", speed, "--no-errors", "--samples", "8")
    assert sampled["now"][0] == pytest.approx(1e6 * alone["step_s"] / alone["tokens_per_step"])
    batch = ("--cluster", "hgx-h100-8", "--seq-len", "4096", "--global-batch", "8", "--stack", "torch-2.11-eager")
    same = ("--fix", "recompute=none", "--fix", "zero=3", "--fix", "dp_replicate=1", "--fix", "data_parallel=fsdp2")
    same = (*same, "--fix", "micro_batch_size=1", "--fix", "reshard_after_forward=true", "--jobs", "1")
    found = answer("search", *model, *batch, *same)
    assert found["plans"][0]["step_s"] == pytest.approx(alone["step_s"])
    assert main(["search", "--model", "llama3-8b", "--images", "2", *batch]) == ExitCode.BAD_INPUT
    assert "--images: llama3-8b has no tower for images that is read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "ways"),
    [
        ("llama3-8b", "recompute = selective or every_k with recompute_every = 2"),
        ("qwen2.5-vl-7b", "recompute = selective"),
    ],
)
def test_words_name_only_what_the_plan_can_take_and_change(
    capsys: pytest.CaptureFixture[str], model: str, ways: str
) -> None:
    """A tower refuses every_k, and every first layer recomputed is full recomputation."""
    flags = ("--model", model, "--cluster", "hgx-h200-8", "--seq-len", "4096", "--micro-batch-size", "4", "--json")
    assert main(["predict", *flags, "--recompute", "full"]) == ExitCode.OK
    full = json.loads(capsys.readouterr().out)
    assert full["suggestion"].startswith(f"memory is left over: recompute less ({ways}) to save about ")
    for way in ways.split(" or "):
        mode, _, every = way.removeprefix("recompute = ").partition(" with recompute_every = ")
        assert main(["predict", *flags, "--recompute", mode, "--recompute-every", every or "1"]) == ExitCode.OK
        less = json.loads(capsys.readouterr().out)
        assert less["step_s"] < full["step_s"]


def test_a_server_encodes_a_request_s_images_before_its_prompt() -> None:
    """The first piece of a prompt takes longer by its images, twice as many of them by about twice; weights are held besides."""
    model, cluster = Model.load("qwen2.5-vl-7b"), Cluster.load("hgx-h100-8", 1)
    costs = StepCosts(model, InferencePlan(), cluster, Stack.load("vllm-2025"), *_measured(cluster))

    def seconds(**chunk: bool) -> float:
        return costs.stages_s(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=1024, cached=0, **chunk),)))[0]

    least_s = model.tower_flop / cluster.device.peak("bf16")
    assert seconds() + least_s < seconds(first=True) < seconds() + 10 * least_s


def _measured(cluster: Cluster) -> tuple[Any, Any]:
    from simulator.spec.calibration import Calibration
    from simulator.spec.calibration.collective_curves import default_curves

    return Calibration.for_device(cluster.device), default_curves()


def test_a_server_has_the_tower_and_images_in_its_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    def served(*flags: str) -> dict[str, Any]:
        usual = ["serve", "--model", "qwen2.5-vl-7b", "--gpus", "1xh100", "--requests", "20", "--rate", "2", "--json"]
        assert main([*usual, *flags]) == ExitCode.OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    seen, text = served("--images", "2"), served("--images", "0")
    model = Model.load("qwen2.5-vl-7b")
    held = seen["memory"]["weight_bytes"] - text["memory"]["weight_bytes"]
    assert held == 2 * (model.num_parameters - small_without(model).num_parameters)
    assert seen["latencies"]["ttft"]["p50_s"] > text["latencies"]["ttft"]["p50_s"]
    per_s = seen["load"]["prompt_tokens_per_s"] / text["load"]["prompt_tokens_per_s"]
    assert per_s == pytest.approx((512 + 2 * 256) / 512, rel=0.2)
