"""Plans in other frameworks' words: what published recipes' structures become, and what is wrong with bad ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.formats.exchange import Job, export_plan
from simulator.formats.readers.plans import Draft, detect, plan_fields, read_plan
from simulator.formats.readers.plans.options import megatron_arguments, options_of
from simulator.formats.readers.plans.shell import Shell
from simulator.parallel.legality import check
from simulator.parallel.pipeline import stage_layers
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

FILES = Path(__file__).resolve().parents[1] / "data" / "plans"


def plan_of(draft: Draft, num_devices: int, model: Model | None = None, **given: Any) -> Plan:
    model = draft.model if isinstance(draft.model, Model) else model
    fields = plan_fields(draft, num_devices, given, model)
    plan = Plan.model_validate(fields)
    check(plan)
    return plan


def written(folder: Path, text: str | Mapping[str, Any], name: str = "plan") -> Path:
    file = folder / name
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def faults(draft: Draft, num_devices: int = 8, **given: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan_fields(draft, num_devices, given, Model.load("llama2-7b"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gpt-175b.sh", "megatron"),
        ("llama3-8b.args", "megatron"),
        ("bloom-like.sh", "megatron"),
        ("llama3-70b.toml", "torchtitan"),
        ("zero3-offload.json", "deepspeed"),
        ("fsdp1.yaml", "accelerate"),
        ("fsdp2.yaml", "accelerate"),
        ("zero2.yaml", "accelerate"),
    ],
)
def test_a_format_is_told_by_its_content(name: str, form: str) -> None:
    assert detect((FILES / name).read_text(), name) == form
    assert read_plan(FILES / name).format == form


def test_a_file_in_no_format_is_told_all_formats(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="in no format that holds a plan"):
        read_plan(written(tmp_path, "hello world"))


class TestMegatron:
    def test_a_script_of_175b(self) -> None:
        draft = read_plan(FILES / "gpt-175b.sh")
        assert draft.num_devices == 1024
        plan = plan_of(draft, 1024)
        assert (plan.tp, plan.pp, plan.dp_shard, plan.dp_replicate, plan.zero) == (8, 16, 8, 1, 1)
        assert (plan.micro_batch_size, plan.num_micro_batches, plan.global_batch_size) == (1, 192, 1536)
        assert (plan.pipeline.virtual_stages, plan.sequence_parallel, plan.recompute.mode) == (3, True, "selective")
        assert (plan.precision.compute, plan.precision.reduce, plan.implementation) == ("bf16", "fp32", "megatron")
        assert isinstance(draft.model, Model)
        published = Model.load("gpt3-175b")
        # the vocabulary is padded to a multiple of 128 × tp, and nothing else differs
        assert draft.model.vocab_size == 51_200
        padding = (51_200 - published.vocab_size) * published.d_model
        assert draft.model.num_parameters == published.num_parameters + padding
        assert not draft.named("unknown", "not modelled")

    def test_torch_s_fsdp_inside_megatron(self, tmp_path: Path) -> None:
        text = "t.py --micro-batch-size 1 --seq-length 2048 --bf16 --use-torch-fsdp2 --use-distributed-optimizer"
        told = faults(read_plan(written(tmp_path, text)))
        assert "contradicts --use-torch-fsdp2" in told
        assert "needs --untie-embeddings-and-output-weights" in told
        text = text.replace("--use-distributed-optimizer", "--untie-embeddings-and-output-weights")
        plan = plan_of(read_plan(written(tmp_path, text + " --no-gradient-accumulation-fusion")), 8)
        assert (plan.implementation, plan.zero, plan.dp_shard) == ("fsdp2", 3, 8)

    def test_fusions_that_are_off_are_the_stack_s(self, tmp_path: Path) -> None:
        text = "t.py --micro-batch-size 1 --seq-length 2048 --bf16 --swiglu --no-bias-swiglu-fusion --no-rope-fusion"
        draft = read_plan(written(tmp_path, text))
        changes = {name: value for name, (value, _) in draft.stack_changes.items()}
        assert (changes["gated_activation"], changes["rope"]) == ("operators", "unfused")
        assert not {"--no-bias-swiglu-fusion", "--no-rope-fusion"} & {one.name for one in draft.named("not modelled")}

    @pytest.mark.parametrize(
        ("options", "changed"),
        [
            ("--log-params-norm", {"parameter_calls": 1}),
            ("--log-params-norm --log-num-zeros-in-grad --log-interval 10", {"parameter_calls": 5}),
            ("--log-interval 1 --tensorboard-dir logs", {"step_calls": 270}),
            ("--clip-grad 0", {"clips": ""}),
            ("--clip-grad 1.0", {}),
            ("--deterministic-mode", {"fills_outputs": True}),
            ("--deterministic-mode --transformer-impl local --use-mcore-models", {"attention.kernel": "math"}),
            ("--use-distributed-optimizer --overlap-grad-reduce", {"late_parameters": True}),
            ("--tensor-model-parallel-size 2", {"late_gradients": True, "tp_overlap": "backward"}),
            ("--deepspeed --zero-stage 1", {}),
        ],
    )
    def test_what_a_step_does_beside_its_layers(self, options: str, changed: dict[str, Any], tmp_path: Path) -> None:
        """Each option changes its own fields of the stack; the others stand as they are without it."""
        base = "t.py --micro-batch-size 1 --seq-length 2048 --bf16 --cross-entropy-loss-fusion --hidden-dropout 0 --attention-dropout 0"
        draft = read_plan(written(tmp_path, f"{base} {options}"))
        found = {name: value for name, (value, _) in draft.stack_changes.items()}
        logs = {
            "clips",
            "parameter_calls",
            "step_calls",
            "fills_outputs",
            "late_gradients",
            "late_parameters",
            "attention.kernel",
        }
        without = (
            {"late_gradients": True} if not {"--overlap-grad-reduce", "--deepspeed"} & set(options.split()) else {}
        )
        expected = {name: value for name, value in {**without, **changed}.items() if name in logs}
        assert {name: value for name, value in found.items() if name in logs} == expected

    def test_a_script_of_megatron_deepspeed(self) -> None:
        draft = read_plan(FILES / "bloom-like.sh")
        assert (draft.num_devices, draft.stack) == (384, "megatron-deepspeed-2022")
        plan = plan_of(draft, 384)
        assert (plan.implementation, plan.zero, plan.tp, plan.pp, plan.dp_shard) == ("deepspeed", 1, 4, 12, 8)
        assert (plan.recompute.mode, plan.num_micro_batches) == ("full", 128)
        # embedding and head count as a layer each: 72 over 12 stages
        held = stage_layers(70, 12, split=plan.split)
        assert [len(chunk) for stage in held for chunk in stage] == [5, *[6] * 10, 5]
        assert not draft.named("unknown")

    def test_a_plain_list_of_arguments(self) -> None:
        draft = read_plan(FILES / "llama3-8b.args")
        assert draft.num_devices is None
        plan = plan_of(draft, 64)
        assert (plan.tp, plan.cp, plan.dp_shard, plan.num_micro_batches) == (2, 2, 16, 8)
        assert isinstance(draft.model, Model)
        assert draft.model.num_parameters == Model.load("llama3-8b").num_parameters
        assert draft.stack_changes["tp_overlap"][0] == "userbuffers"

    def test_a_setting_of_the_caller_moves_what_follows_from_it(self) -> None:
        plan = plan_of(read_plan(FILES / "llama3-8b.args"), 64, tp=4)
        assert (plan.tp, plan.dp_shard, plan.num_micro_batches, plan.global_batch_size) == (4, 8, 16, 128)

    def test_contradictions_are_told_together_with_their_lines(self, tmp_path: Path) -> None:
        text = """torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
            --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
            --seq-length 4096 --max-position-embeddings 2048 --vocab-size 32000 \\
            --micro-batch-size 3 --global-batch-size 32 --bf16 --fp16 \\
            --sequence-parallel --num-layers-per-virtual-pipeline-stage 2 \\
            --overlap-param-gather --recompute-granularity full"""
        draft = read_plan(written(tmp_path, text))
        (overruled,) = draft.named("overruled")  # no fault of Megatron's: it says so and goes on
        assert overruled.place.endswith(":5")
        assert "there is one: Megatron-LM switches it off" in overruled.note
        told = faults(draft, 16)
        for line, words in (
            (4, "contradicts --bf16"),
            (5, "makes virtual stages, and the pipeline has one stage"),
            (6, "gathers nothing (--use-distributed-optimizer)"),
            (6, "needs --overlap-grad-reduce"),
            (6, "full needs --recompute-method"),
            (3, "is 2048, and --seq-length 4096"),
            (4, "32 sequences a step are not a multiple of micro-batch 3 × ranks 16 = 48 (48)"),
        ):
            assert any(f":{line}: " in row and words in row for row in told.splitlines()), (line, words, told)

    def test_degrees_that_do_not_divide_the_world(self, tmp_path: Path) -> None:
        text = "--micro-batch-size 1 --seq-length 2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 3"
        told = faults(read_plan(written(tmp_path, text)), 64)
        assert "tp 8 × cp 1 × pp 3 = 24 does not divide 64 GPUs" in told
        assert "48 or 72 GPUs" in told

    def test_what_only_a_run_knows_is_asked_for(self, tmp_path: Path) -> None:
        text = "MBS=$1\ntorchrun --nnodes $SLURM_NNODES t.py --micro-batch-size $MBS --seq-length 2048 --lr $LR $MORE"
        file = written(tmp_path, text)
        draft = read_plan(file)
        assert draft.devices_fault is not None
        assert "--nnodes hangs on $SLURM_NNODES" in str(draft.devices_fault)
        assert "hangs on $1, which this file does not settle (--micro-batch-size VALUE" in faults(draft)
        assert [s.name for s in draft.named("unknown")] == ["$MORE"]
        known = read_plan(file, define={"1": "4", "SLURM_NNODES": "2", "MORE": "--bf16 --swiglu"})
        assert plan_of(known, 16).micro_batch_size == 4
        assert not known.named("unknown")

    def test_options_in_a_condition_are_asked_for(self, tmp_path: Path) -> None:
        text = """EXTRA=""
        if [ "$FAST" = 1 ]; then
            EXTRA="--recompute-activations"
        fi
        python t.py --micro-batch-size 1 --seq-length 2048 $EXTRA"""
        told = faults(read_plan(written(tmp_path, text)))
        assert "$EXTRA depends on what begins at line 2 (--define EXTRA='…'" in told
        draft = read_plan(written(tmp_path, text), define={"EXTRA": "--recompute-activations"})
        assert plan_of(draft, 8).recompute.mode == "selective"

    def test_conditions_that_the_script_settles(self, tmp_path: Path) -> None:
        text = """DEBUG=0; SIZE=70
        if [[ $DEBUG -eq 1 ]]; then
            MBS=1
            python t.py --micro-batch-size 9 --seq-length 1
        elif [ "$SIZE" = 70 ]; then
            MBS=2; if [ ! -z "$SIZE" ]; then EXTRA=--bf16; fi
        else
            MBS=3
        fi
        python t.py --micro-batch-size $MBS --seq-length 2048 $EXTRA"""
        plan = plan_of(read_plan(written(tmp_path, text)), 8)
        assert (plan.micro_batch_size, plan.precision.compute, plan.seq_len) == (2, "bf16", 2048)

    @pytest.mark.parametrize(
        ("condition", "micro_batch"),
        [
            ('[[ "$A" == MOCK ]] || [[ "$B" == MOCK ]] || [[ -z "$A" ]]', 1),
            ('[[ "$A" == x && "$B" == MOCK ]]', 2),
            ('[[ "$A" == x || "$B" == MOCK ]]', 1),
            ('[ "$A" = MOCK ] && [ "$B" = y ]', 2),
            ('[ "$A" = MOCK ] && [ "$B" = MOCK ] && test -n "$A"', 1),
        ],
    )
    def test_tests_joined_by_and_and_or(self, tmp_path: Path, condition: str, micro_batch: int) -> None:
        text = f"""A=${{1:-MOCK}}; B=MOCK
        if {condition}; then MBS=1; else MBS=2; fi
        python t.py --micro-batch-size $MBS --seq-length 2048"""
        assert plan_of(read_plan(written(tmp_path, text)), 8).micro_batch_size == micro_batch

    def test_and_binds_closer_than_or_inside_brackets(self, tmp_path: Path) -> None:
        text = """A=x; if [[ $A == x || $A == y && $A == z ]]; then MBS=1; else MBS=2; fi
        python t.py --micro-batch-size $MBS --seq-length 2048"""
        assert plan_of(read_plan(written(tmp_path, text)), 8).micro_batch_size == 1

    def test_a_condition_on_logging_is_harmless(self, tmp_path: Path) -> None:
        text = """LOG=( --log-interval 1 )
        if [ "$KEY" != none ]; then
            LOG+=( --wandb-project x --wandb-exp-name "a b" )
        fi
        python t.py --micro-batch-size 1 --seq-length 2048 "${LOG[@]}" --bf16"""
        draft = read_plan(written(tmp_path, text))
        assert plan_of(draft, 8).precision.compute == "bf16"
        assert [s.note for s in draft.settings if s.name == "$LOG"] == [
            "--wandb-exp-name, --wandb-project, or none of them"
        ]

    def test_an_arm_behind_an_unknown_one_is_unknown(self, tmp_path: Path) -> None:
        text = """if [ "$A" = 1 ]; then MBS=1; elif [ 1 = 1 ]; then MBS=2; else MBS=3; fi
        python t.py --micro-batch-size $MBS --seq-length 2048"""
        assert "$MBS depends on what begins at line 1" in faults(read_plan(written(tmp_path, text)))

    def test_a_model_of_the_caller_s_needs_no_vocabulary(self, tmp_path: Path) -> None:
        text = (
            "--micro-batch-size 1 --seq-length 2048 --num-layers 2 --hidden-size 64 --num-attention-heads 4"
            " --tokenizer-type HuggingFaceTokenizer"
        )
        assert "the size of the vocabulary is only in the tokenizer's files" in faults(
            read_plan(written(tmp_path, text))
        )
        draft = read_plan(written(tmp_path, text), given={"model"})
        assert draft.model is None
        assert plan_of(draft, 8).seq_len == 2048

    def test_nothing_is_dropped(self, tmp_path: Path) -> None:
        text = "--micro-batch-size 1 --seq-length 2048 --bf16 --fp32-residual-connection --lr 1 --sequence-paralell"
        draft = read_plan(written(tmp_path, text))
        assert {s.name for s in draft.settings if "default" not in s.place} == {
            word for word in text.split() if word.startswith("--")
        }
        assert [s.name for s in draft.named("not modelled") if "default" not in s.place] == [
            "--fp32-residual-connection"
        ]
        (unknown,) = draft.named("unknown")
        assert "--sequence-parallel" in unknown.note

    def test_layers_in_a_layout(self, tmp_path: Path) -> None:
        text = (
            "--micro-batch-size 1 --seq-length 2048 --num-layers 10 --hidden-size 64 --num-attention-heads 4 --vocab-size 99"
            " --pipeline-model-parallel-size 2 --global-batch-size 8"
            ' --pipeline-model-parallel-layout "Et*2|(ttt|)*2ttL"'
        )
        plan = plan_of(read_plan(written(tmp_path, text)), 2)
        assert (plan.pipeline.stage_layers, plan.pipeline.virtual_stages) == ((2, 3, 3, 2), 2)

    def test_embedding_and_loss_count_as_layers(self, tmp_path: Path) -> None:
        text = (
            "--micro-batch-size 1 --seq-length 2048 --num-layers 30 --hidden-size 64 --num-attention-heads 4 --vocab-size 99"
            " --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
            " --account-for-loss-in-pipeline-split"
        )
        plan = plan_of(read_plan(written(tmp_path, text)), 4)
        assert (plan.pipeline.embedding_as_layer, plan.pipeline.head_as_layer) == (True, True)
        held = stage_layers(30, 4, split=plan.split)
        assert [len(chunk) for stage in held for chunk in stage] == [7, 8, 8, 7]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("echo hello --world", "no command here has Megatron's arguments"),
            ("a --hidden-size 1\nb --hidden-size 2", "2 commands train, at lines 1, 2"),
            ("a --hidden-size 'x", "a quote is not closed"),
            ("A=(1 2\nb --hidden-size 1", "an array's parenthesis is not closed"),
        ],
    )
    def test_scripts_that_cannot_be_read(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match=words):
            read_plan(written(tmp_path, text), "megatron")

    def test_expansion_without_end_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("simulator.formats.readers.plans.shell_expansion._MAX_CHARACTERS", 2**14)
        text = "A=xxxxxxxxxxxxxxxx\n" + "".join("A=$A$A\n" for _ in range(40)) + "t --hidden-size $A"
        with pytest.raises(PlanError, match="beyond all proportion"):
            Shell(text, "x").read()


def test_a_shell_s_words() -> None:
    """What bash would pass, but for what only a run knows."""
    text = """#!/bin/sh
A="one two"; B='$A'; export C=$((2 + 3 * 4))
ARR=(x "y z" ${MISSING:-w})
ARR+=(v)
cat <<EOF > f
not a command --hidden-size
EOF
t $A "$A" $B "${ARR[@]}" pre${C}post \\
  a\\ b "q\\"r" # comment
"""
    *_, words = Shell(text, "x").read()
    found = [word.text for word in words]
    assert found == ["t", "one", "two", "one two", "$A", "x", "y z", "w", "v", "pre14post", "a b", 'q"r']
    assert [word.line for word in words][:3] == [8, 2, 2]


class TestTorchtitan:
    def test_70b(self) -> None:
        draft = read_plan(FILES / "llama3-70b.toml")
        assert (draft.model, draft.stack) == ("llama3-70b", "torchtitan-2025-compiled")
        plan = plan_of(draft, 64)
        assert (plan.tp, plan.dp_shard, plan.zero, plan.sequence_parallel) == (8, 8, 3, True)
        assert (plan.micro_batch_size, plan.num_micro_batches, plan.recompute.mode) == (8, 1, "full")
        assert not draft.named("unknown", "not modelled")

    def test_a_saved_configuration_is_json(self, tmp_path: Path) -> None:
        data = {
            "model": {"name": "llama3", "flavor": "8B", "converters": []},
            "training": {"local_batch_size": 4, "global_batch_size": 64, "seq_len": 4096},
            "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        }
        draft = read_plan(written(tmp_path, data))
        assert (draft.format, draft.stated_devices({})) == ("torchtitan", 8)
        plan = plan_of(draft, 8)
        assert (plan.dp_replicate, plan.dp_shard, plan.num_micro_batches, plan.recompute.mode) == (2, 4, 2, "selective")

    @pytest.mark.parametrize(
        ("stated", "stack"),
        [
            ([], "torchtitan-2025-eager"),
            (["loss"], "torchtitan-2025-eager"),
            (["model", "loss"], "torchtitan-2025-compiled"),
        ],
    )
    def test_what_is_compiled_are_words(self, stated: object, stack: str, tmp_path: Path) -> None:
        data = {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, "seq_len": 512}}
        compiled = {"compile": {"enable": True, "components": stated}}
        assert read_plan(written(tmp_path, {**data, **compiled})).stack == stack
        compiled["compile"]["components"] = 3
        assert [fault.problem for fault in read_plan(written(tmp_path, {**data, **compiled})).faults] == [
            "3 is not a list of words"
        ]

    def test_stages_hold_what_torchtitan_gives_them(self, tmp_path: Path) -> None:
        text = """[parallelism]
        pipeline_parallel_degree = 4
        pipeline_parallel_schedule = "Interleaved1F1B"
        [training]
        local_batch_size = 8
        [activation_checkpoint]
        mode = "none"
        """
        plan = plan_of(read_plan(written(tmp_path, text)), 8, Model.load("llama3-8b"))
        # 32 layers, embedding and head as one each: 34 over 8 parts are 5, 5, 4, …, the ends' one taken off
        assert plan.pipeline.stage_layers == (4, 5, 4, 4, 4, 4, 4, 3)
        assert (plan.pipeline.virtual_stages, plan.num_micro_batches, plan.fsdp.reshard_after_forward) == (2, 8, False)

    def test_experts(self, tmp_path: Path) -> None:
        text = """[parallelism]
        expert_parallel_degree = 4
        expert_parallel_comm_backend = "deepep"
        """
        plan = plan_of(read_plan(written(tmp_path, text)), 8)
        assert (plan.ep, plan.experts.etp, plan.experts.dispatcher) == (4, 1, "deep_ep")

    def test_without_shards_there_is_ddp(self, tmp_path: Path) -> None:
        text = """[parallelism]
        data_parallel_replicate_degree = 8
        data_parallel_shard_degree = 1
        [training]
        seq_len = 1024
        """
        plan = plan_of(read_plan(written(tmp_path, text)), 8)
        assert (plan.implementation, plan.zero, plan.recompute.mode, plan.recompute.every) == ("ddp", 0, "every_k", 2)

    def test_faults(self, tmp_path: Path) -> None:
        text = """[parallelism]
        pipeline_parallel_degree = 2
        pipeline_parallel_schedule = "ZBVZeroBubble"
        pipeline_parallel_microbatch_size = 3
        enable_async_tensor_parallel = true
        data_parallel_shard_degree = 0
        [training]
        local_batch_size = 8
        [activation_checkpoint]
        mode = "memory_budget"
        """
        told = faults(read_plan(written(tmp_path, text)))
        for words in ("ZBVZeroBubble is not simulated", "3 does not divide the local batch of 8", "compiled blocks only",
                      "0 is not a degree", "the compiler's own choice"):  # fmt: skip
            assert words in told
        given = {"schedule": "1f1b", "recompute": "none"}
        assert "simulated" not in faults(read_plan(written(tmp_path, text), given=given), **given)


class TestDeepSpeed:
    def test_zero_3_with_offload(self) -> None:
        draft = read_plan(FILES / "zero3-offload.json")
        assert draft.stated_devices({}) == 8  # 64 = 2 × 4 × 8
        model = Model.load("llama2-7b")
        plan = plan_of(draft, 8, model, seq_len=4096, recompute="full")
        assert (plan.zero, plan.dp_shard, plan.implementation) == (3, 8, "deepspeed")
        assert (plan.offload.optimizer, plan.offload.parameters, plan.offload.pinned) == ("host", "host", True)
        assert (plan.deepspeed.reduce_bucket_numel, plan.deepspeed.param_persistence_numel) == (4096**2, 40_960)
        assert plan.deepspeed.prefetch_bucket_numel == int(0.9 * 4096**2)
        assert not draft.named("unknown", "not modelled")

    def test_what_the_file_does_not_keep_is_assumed_by_name(self) -> None:
        draft = read_plan(FILES / "zero3-offload.json")
        assert list(draft.assumed) == ["seq_len", "recompute"]
        assert not draft.settled({"seq_len", "recompute"}, None).assumed

    def test_auto_is_right_for_what_the_caller_gives(self, tmp_path: Path) -> None:
        data = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": 2}
        file = written(tmp_path, data)
        draft = read_plan(file)
        assert set(draft.assumed) == {"micro_batch_size", "precision", "seq_len", "recompute"}
        assert [s.note for s in draft.settings if s.name == "bf16.enabled"] == [
            "auto: the training script's; --precision gives it"
        ]
        given = {"micro_batch_size": 3, "precision": "bf16", "seq_len": 1024, "recompute": "none"}
        plan = plan_of(read_plan(file, given=given), 8, **given)
        assert (plan.micro_batch_size, plan.num_micro_batches, plan.precision.compute) == (3, 2, "bf16")

    @pytest.mark.parametrize(
        ("old", "today"),
        [
            ({"stage": 3, "cpu_offload": True}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
            ({"stage": 3, "cpu_offload_param": True}, {"stage": 3, "offload_param": {"device": "cpu"}}),
            ({"stage": 3, "cpu_offload_params": True}, {"stage": 3, "offload_param": {"device": "cpu"}}),
            ({"stage": 2, "cpu_offload": False}, {"stage": 2}),
            (True, {"stage": 1}),
            (False, {"stage": 0}),
        ],
    )
    def test_an_older_spelling_is_the_same_plan(self, tmp_path: Path, old: Any, today: Any) -> None:
        """zero/config.py: older keys make the table without further words, so memory is not pinned."""
        common = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
        drafts = [read_plan(written(tmp_path, {**common, "zero_optimization": zero})) for zero in (old, today)]
        one, other = (plan_of(draft, 8, seq_len=1024, recompute="none") for draft in drafts)
        assert one == other
        assert not drafts[0].named("unknown")

    @pytest.mark.parametrize(
        ("stage", "entry", "told"),
        [
            (1, {}, ["overlap_comm"]),
            (2, {}, ["overlap_comm"]),
            (3, {}, []),
            (0, {}, []),
            (2, {"overlap_comm": True}, []),
            (3, {"overlap_comm": False}, ["overlap_comm"]),
            (2, {"overlap_comm": True, "reduce_scatter": False}, ["reduce_scatter"]),
            (2, {"overlap_comm": True, "reduce_scatter": True, "contiguous_gradients": True}, []),
            (1, {"overlap_comm": True, "contiguous_gradients": False}, ["contiguous_gradients"]),
            (3, {"stage3_max_live_parameters": 1e9, "max_reuse_distance": 10**9}, []),
            (3, {"stage3_max_live_parameters": 0, "max_reuse_distance": 0}, ["stage3_max_live_parameters", "max_reuse_distance"]),
        ],
    )  # fmt: skip
    def test_what_changes_a_step_and_is_not_predicted_is_told(
        self, tmp_path: Path, stage: int, entry: dict[str, Any], told: list[str]
    ) -> None:
        draft = read_plan(written(tmp_path, {"zero_optimization": {"stage": stage, **entry}}))
        names = [s.name.removeprefix("zero_optimization.") for s in draft.named("unknown", "not modelled")]
        assert sorted(names) == sorted(told)

    @pytest.mark.parametrize(("kind", "optimizer"), [("Adam", "adam"), ("AdamW", "adamw")])
    def test_adamw_decays_apart_whatever_its_mode_says(self, tmp_path: Path, kind: str, optimizer: str) -> None:
        """engine.py: effective_adam_w_mode."""
        data = {"optimizer": {"type": kind, "params": {"adam_w_mode": False}}}
        assert (
            read_plan(written(tmp_path, {"zero_optimization": {"stage": 1}, **data})).fields["optimizer"] == optimizer
        )

    def test_a_batch_that_does_not_add_up(self) -> None:
        told = faults(read_plan(FILES / "zero3-offload.json"), 16, seq_len=1024, recompute="none")
        assert "64 sequences a step" in told

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "contradicts bf16.enabled"),
            ({"zero_optimization": {"stage": 4}}, "there is no stage 4"),
            ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 2 keeps its parameters"),
            (
                {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
                "ZeRO stage 0 cannot offload anything",
            ),
            ({"optimizer": {"type": "Adagrad"}}, "Adagrad is not modelled"),
            ({"zero_optimization": {"stage": "three"}}, "three is not a whole number"),
        ],
    )
    def test_faults(self, data: dict[str, Any], words: str, tmp_path: Path) -> None:
        assert words in faults(read_plan(written(tmp_path, {"train_micro_batch_size_per_gpu": 1, **data}), "deepspeed"))

    def test_bf16_s_own_optimizer_shards(self, tmp_path: Path) -> None:
        data = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        given = {"seq_len": 1024, "recompute": "none"}
        plan = plan_of(read_plan(written(tmp_path, data), given=given), 8, **given)
        assert (plan.zero, plan.dp_shard, plan.dp_replicate) == (1, 8, 1)

    def test_what_changes_the_answer_is_named(self, tmp_path: Path) -> None:
        data = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": True,
                "zero_hpz_partition_size": 8,
                "zero_quantized_weights": True,
            },
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
            "zero_optimisation": {"stage": 2},
        }
        draft = read_plan(written(tmp_path, data))
        assert [s.name.rpartition(".")[2] for s in draft.named("not modelled")] == [
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "partition_activations",
        ]
        assert [s.name for s in draft.named("unknown")] == ["zero_optimisation.stage"]

    def test_one_bit_optimizers(self, tmp_path: Path) -> None:
        params = {"var_freeze_step": 500, "local_step_clipper": 8, "lr": 1e-4}
        data = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "ZeroOneAdam", "params": params}}
        draft = read_plan(written(tmp_path, data))
        assert draft.fields["one_bit"] == {"kind": "zero_one", "freeze_step": 500, "local_step_clipper": 8}
        assert (draft.fields["optimizer"], draft.named("not modelled")) == ("adamw", ())

    def test_zero_plus_plus_and_mics(self, tmp_path: Path) -> None:
        zero = {"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}
        zero |= {"zero_quantized_gradients": True, "zero_quantized_nontrainable_weights": True}
        draft = read_plan(written(tmp_path, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
        expected = {"quantized_weights": True, "secondary_ranks": 8, "quantized_gradients": True}
        assert draft.fields["zeropp"] == expected
        assert not draft.named("not modelled")
        groups = {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True}
        draft = read_plan(written(tmp_path, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": groups}))
        assert (draft.fields["dp_shard"], draft.leftover) == (8, "dp_replicate")
        assert draft.fields["hierarchical_gather"] is True
        early = {"stage": 2, "mics_shard_size": 8}
        told = read_plan(written(tmp_path, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": early}))
        assert "MiCS is of stage 3" in faults(told)

    @pytest.mark.parametrize(
        "text", ['{"a": 1,', '{"train_batch_size": 1, "train_batch_size": 2}', '{"a": NaN}', "[1]"]
    )
    def test_files_that_are_no_configuration(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(PlanError):
            read_plan(written(tmp_path, text), "deepspeed")


class TestAccelerate:
    def test_fsdp1_shards_a_machine(self) -> None:
        draft = read_plan(FILES / "fsdp1.yaml")
        assert draft.num_devices == 32
        given = {"seq_len": 2048, "micro_batch_size": 2, "num_micro_batches": 4}
        plan = plan_of(draft, 32, Model.load("llama2-7b"), **given)
        assert (plan.dp_shard, plan.dp_replicate, plan.implementation, plan.zero) == (8, 4, "fsdp1", 3)
        assert (plan.precision.reduce, plan.recompute.mode, plan.fsdp.backward_prefetch) == ("bf16", "full", 1)
        assert not plan.syncs_every_micro_batch
        assert not draft.named("unknown", "not modelled")

    def test_fsdp2_with_a_mesh(self) -> None:
        given = {"seq_len": 2048, "micro_batch_size": 1, "num_micro_batches": 1}
        plan = plan_of(read_plan(FILES / "fsdp2.yaml"), 16, Model.load("llama2-7b"), **given)
        assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.implementation) == (2, 4, 2, "fsdp2")
        assert plan.fsdp.reshard_after_forward is None

    @pytest.mark.parametrize("flag", ["dp_shard", "dp_replicate"])
    def test_a_degree_that_is_no_number_is_left_for_the_plan_to_refuse(self, flag: str) -> None:
        draft = read_plan(FILES / "fsdp2.yaml")
        assert draft.stated_devices({flag: {}})
        given = {"seq_len": 2048, "micro_batch_size": 1, "num_micro_batches": 1, flag: {}}
        assert plan_fields(draft, 16, given, Model.load("llama2-7b"))[flag] == {}

    def test_deepspeed_s_own_keys(self) -> None:
        given = {"seq_len": 2048, "micro_batch_size": 1, "recompute": "none"}
        plan = plan_of(read_plan(FILES / "zero2.yaml"), 8, **given)
        assert (plan.zero, plan.dp_shard, plan.num_micro_batches, plan.precision.compute) == (2, 8, 4, "fp16")

    def test_deepspeed_s_file(self, tmp_path: Path) -> None:
        written(tmp_path, (FILES / "zero3-offload.json").read_text(), "ds.json")
        text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        text += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
        plan = plan_of(read_plan(written(tmp_path, text)), 8, Model.load("llama2-7b"), seq_len=2048, recompute="none")
        assert (plan.zero, plan.micro_batch_size, plan.num_micro_batches) == (3, 2, 4)
        told = faults(read_plan(written(tmp_path, text + "  zero_stage: 2\n")))
        assert "contradicts deepspeed_config_file" in told
        told = faults(read_plan(written(tmp_path, text.replace("bf16", "fp16"))))
        assert "fp16 contradicts" in told

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("distributed_type: FSDP\ndeepspeed_config:\n  zero_stage: 3", "FSDP beside a deepspeed_config"),
            ("distributed_type: DEEPSPEED\nfsdp_config:\n  fsdp_version: 2", "DEEPSPEED beside an fsdp_config"),
            ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3", "there is no FSDP 3"),
            (
                "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: FULL_SHARD}",
                "is FSDP1's",
            ),
            ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: true}", "true and false are FSDP2's"),
            ("distributed_type: TPU", "TPU is unknown"),
        ],
    )
    def test_faults(self, text: str, words: str, tmp_path: Path) -> None:
        assert words in faults(read_plan(written(tmp_path, text + "\n")))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("distributed_type: &a FSDP\nx: *a", "anchors and aliases"),
            ("distributed_type: FSDP\ndistributed_type: NO", "appears twice"),
            ("distributed_type: !!python/object/apply:os.system [ls]", "not YAML"),
            ("distributed_type: [", "not YAML"),
            ("distributed_type: " + "[" * 40 + "]" * 40, "nested deeper"),
            ("- distributed_type", "holds no table"),
        ],
    )
    def test_hostile_yaml(self, text: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match=words):
            read_plan(written(tmp_path, text), "accelerate")

    def test_a_huge_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match="larger than"):
            read_plan(written(tmp_path, "distributed_type: FSDP\n" + "#" * 2**20))


@pytest.mark.parametrize("form", [None, "megatron", "deepspeed"])
def test_a_device_without_end_is_refused(form: str | None) -> None:
    with pytest.raises(PlanError, match="larger than"):
        read_plan(Path("/dev/zero"), form)


def test_our_own_plan_is_a_format_too(tmp_path: Path) -> None:
    draft = read_plan(written(tmp_path, 'model = "llama2-7b"\n[plan]\ntp = 2\nzero = 3\nseq_len = 1024\n'))
    assert (draft.format, draft.model) == ("toml", "llama2-7b")
    assert plan_of(draft, 8).dp_shard == 4


def test_the_reference_names_every_setting_that_is_read() -> None:
    text = (FILES.parents[2] / "docs" / "reference" / "plan-formats.md").read_text()
    missing = [name for name in megatron_arguments().known if f"`{name}`" not in text and f"`{name} " not in text]
    forms = (
        "deepspeed",
        "accelerate",
        "torchtitan",
        "transformers",
        "axolotl",
        "llama-factory",
        "torchtune",
        "litgpt",
        "unsloth",
        "xtuner",
    )
    others = [name for form in forms for name in options_of(form).known]
    missing += [name for name in others if name.rpartition(".")[2] not in text]
    assert not missing


def test_flags_that_count_layers_need_their_number(tmp_path: Path) -> None:
    text = (
        "pretrain_gpt.py --micro-batch-size 1 --seq-length 2048 --pipeline-model-parallel-size 4"
        " --num-layers-per-virtual-pipeline-stage 2 --account-for-loss-in-pipeline-split"
    )
    (fault,) = read_plan(written(tmp_path, text), given={"model": "llama3-8b"}).faults
    assert fault.place.endswith("--num-layers-per-virtual-pipeline-stage")
    assert "add --num-layers" in fault.remedy


def test_ends_that_count_and_stages_that_are_given_contradict_each_other(tmp_path: Path) -> None:
    text = (
        "pretrain_gpt.py --micro-batch-size 1 --seq-length 2048 --num-layers 30 --hidden-size 64 --num-attention-heads 4"
        " --vocab-size 99 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 14"
        " --account-for-loss-in-pipeline-split"
    )
    plan = plan_of(read_plan(written(tmp_path, text)), 2)
    assert (plan.pipeline.first_stage_layers, plan.pipeline.head_as_layer) == (14, True)
    with pytest.raises(PlanError, match="embedding and head cannot count as layers too"):
        stage_layers(30, 2, split=plan.split)


def test_parts_of_the_tensor_parallel_overlap_are_switched_off_one_by_one(tmp_path: Path) -> None:
    text = (
        "pretrain_gpt.py --micro-batch-size 1 --seq-length 2048 --tensor-model-parallel-size 2 --sequence-parallel"
        " --tp-comm-overlap --disable-tp-comm-overlap-rs"
    )
    draft = read_plan(written(tmp_path, text), given={"model": "llama3-8b"})
    assert draft.stack_changes["tp_overlap"][0] == "userbuffers"
    assert draft.stack_changes["tp_whole"][0] == ["reduce_scatter"]
    assert not draft.named("not modelled") or all("tp-comm" not in str(one) for one in draft.named("not modelled"))


def test_windows_sinks_and_clamps_are_megatrons_words_for_gpt_oss(tmp_path: Path) -> None:
    text = """python t.py --num-layers 24 --hidden-size 2880 --num-attention-heads 64 --kv-channels 64 --vocab-size 200064
    --micro-batch-size 1 --seq-length 4096 --swiglu --window-size 127,0 --window-attn-skip-freq 2
    --softmax-type learnable --activation-func-clamp-value 7.0""".replace("\n", " ")
    model = read_plan(written(tmp_path, text)).model
    assert isinstance(model, Model)
    preset = Model.load("gpt-oss-20b")
    for name in ("sliding_window", "global_every", "attention_sinks", "gate_clamp", "mlp"):
        assert getattr(model, name) == getattr(preset, name), name
    wrong = text.replace("127,0", "wide")
    assert "not a window of past keys" in faults(read_plan(written(tmp_path, wrong)))


def test_a_pattern_of_layers_that_hangs_on_the_environment_is_told(tmp_path: Path) -> None:
    text = """python t.py --hidden-size 512 --num-attention-heads 8 --num-layers 4 --hybrid-layer-pattern $PATTERN
    --micro-batch-size 1 --seq-length 1024 --vocab-size 1024""".replace("\n", " ")
    assert "PATTERN" in faults(read_plan(written(tmp_path, text)))


def test_a_fault_names_its_setting_and_each_place_once(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 5}, "train_batch_size": 64}')
    told = str(read_plan(tmp_path / "ds.json").faults[0])
    assert told == f"{tmp_path}/ds.json: zero_optimization.stage: there is no stage 5 (0, 1, 2 or 3)"
    script = tmp_path / "t.sh"
    script.write_text(
        "torchrun p.py --micro-batch-size 1 --tensor-model-parallel-size 3 --pipeline-model-parallel-size 5\n"
    )
    draft = read_plan(script)
    with pytest.raises(PlanError) as caught:
        plan_fields(draft, 16, {"pp": 7})
    assert f"tp 3 × cp 1 × pp 7 = 21 does not divide 16 GPUs ({script}:1)" in str(caught.value)


def test_a_precision_that_is_unknown_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf17\n")
    draft = read_plan(tmp_path / "a.yaml")
    assert "bf17 is unknown" in str(draft.faults[0])
    assert "precision" not in draft.assumed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_megatron_under_accelerate_is_megatron(tmp_path: Path, precision: str, distributed: bool) -> None:  # noqa: FBT001
    """The plugin's job and Megatron's own arguments for it: the same plan, and the same software."""
    plugin = {
        "tp_degree": 2,
        "pp_degree": 2,
        "num_micro_batches": 4,
        "sequence_parallelism": True,
        "use_distributed_optimizer": distributed,
        "gradient_clipping": 0,
    }
    table = "".join(f"  megatron_lm_{name}: {str(value).lower()}\n" for name, value in plugin.items())
    text = (
        f"distributed_type: MEGATRON_LM\nmixed_precision: {precision}\nnum_processes: 8\nmegatron_lm_config:\n{table}"
    )
    arguments = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --max-position-embeddings 2048 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --attention-dropout 0 "
        f"--hidden-dropout 0 --clip-grad 0 --{precision} --micro-batch-size 8 --global-batch-size 64 --seq-length 2048"
        + (" --use-distributed-optimizer" if distributed else "")
    )
    one, other = (read_plan(written(tmp_path, each, "plan")) for each in (text, f"pretrain_gpt.py {arguments}"))
    assert plan_of(one, 8, Model.load("llama2-7b")) == plan_of(other, 8)
    changes = [{name: value for name, (value, _) in draft.stack_changes.items()} for draft in (one, other)]
    assert (one.stack, changes[0]) == (other.stack, changes[1])


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("[float8]\nenable_float8_linear = true", '[model]\nconverters = ["float8"]'),
        ("[training]\nenable_float8_linear = true", '[model]\nconverters = ["float8"]'),
        ("[float8]\nenable_float8_linear = false", "[model]\nconverters = []"),
        ("[optimizer]\nfused = false", '[optimizer]\nimplementation = "foreach"'),
        ("[optimizer]\nfused = true", '[optimizer]\nimplementation = "fused"'),
    ],
)
def test_older_torchtitan_s_words_are_the_same_plan(tmp_path: Path, old: str, today: str) -> None:
    text = "[parallelism]\ndata_parallel_shard_degree = -1\n"
    one, other = (read_plan(written(tmp_path, f"{text}{table}\n", "job.toml")) for table in (old, today))
    assert plan_of(one, 8, Model.load("llama3-8b")) == plan_of(other, 8, Model.load("llama3-8b"))
    assert not one.named("unknown")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('filter_fqns = ["output"]', []),
        ('filter_fqns = ["output", "router.gate"]', []),
        ('filter_fqns = ["output", "attention.wk"]', ["quantize.linear.float8.filter_fqns"]),
        ("filter_fqns = []", ["quantize.linear.float8.filter_fqns"]),
        ("", ["quantize.linear.float8.filter_fqns"]),
    ],
)
def test_layers_that_float8_leaves_out_are_told(tmp_path: Path, table: str, told: list[str]) -> None:
    text = f'[parallelism]\n[model]\nconverters = ["float8"]\n[quantize.linear.float8]\n{table}\n'
    assert [s.name for s in read_plan(written(tmp_path, text, "job.toml")).named("not modelled", "unknown")] == told
    plain = text.replace('["float8"]', "[]")
    assert not read_plan(written(tmp_path, plain, "job.toml")).named("not modelled", "unknown")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_written_torchtitan_job_leaves_its_head_in_bf16(tmp_path: Path, recipe: str) -> None:
    """As the plan that it is of: a converter without filters takes the head too."""
    plan = Plan(dp_shard=8, zero=3, precision="fp8", fp8_recipe=recipe, optimizer_impl="fused")
    model, stack = Model.load("llama3-8b"), Stack.load("torchtitan-2025-compiled")
    text = export_plan(Job(plan=plan, model=model, stack=stack, gpus_per_node=8), "torchtitan").text
    assert not read_plan(written(tmp_path, text, "job.toml")).named("not modelled", "unknown")
