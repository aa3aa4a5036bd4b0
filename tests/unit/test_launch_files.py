"""Launch files as people keep them: shell scripts with control flow, templates, "auto", and commands that mend a refusal."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError, PlanError
from simulator.cli import main
from simulator.formats.readers.plans import Draft, read_plan
from simulator.formats.readers.plans.shell import Shell
from simulator.formats.study import PlanFile, Study, read_study
from simulator.predict import remedy_search
from simulator.spec.model import Model

REAL = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "real_inputs"
NINE = "$(echo 1 2 3) 4 5 6 7 8 9"
ARGUMENTS = (
    "--micro-batch-size 1 --seq-length 2048 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 99"
)


def written(folder: Path, text: str | Mapping[str, Any], name: str = "train.sh") -> Path:
    file = folder / name
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return file


def study_of(file: Path, *define: str, **flags: str) -> Study:
    return read_study(None, {"cluster": "dgx-h100-8", **flags}, {}, (), PlanFile(path=file, define=define))


def told(file: Path, *define: str, **flags: str) -> InputError:
    with pytest.raises(InputError) as caught:
        study_of(file, *define, **flags)
    return caught.value


def last_command(text: str, **define: str) -> list[str]:
    """The words of a script's last command; what only a run knows as "?"."""
    words = Shell(text, "x", define).read()[-1]
    return ["?" if word.unknown else word.text for word in words]


class TestShell:
    """What bash would pass to `t`, the last command, where the file alone settles it."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('case "$1x" in a) A=1;; x|y) A=2;; *) A=3;; esac\nt $A', "t ?"),  # $1 is not known
            ("S=7B; case $S in 1B|2B) A=1 ;; 7?) A=2;; *) A=3; esac\nt $A", "t 2"),
            ("S=7B\ncase $S in\n  (1B)\n    A=1\n    ;;\n  (*)\n    A=3\n    ;;\nesac\nt $A", "t 3"),
            ('N=$(case "$S" in "") echo 8;; *) echo 4;; esac)\nS=1\nt $N', "t ?"),
            ('S=a; N=$(case "$S" in a) echo 8;; *) echo 4;; esac)\nt $N', "t 8"),
            ("f() { local x=$1; A=$((x * 2)); }\nf 4\nt $A", "t 8"),
            ("function f {\n  if [ -z $1 ]; then A=none; else A=$1; fi\n}\nf; B=$A; f q; t $B $A", "t none q"),
            ("f() { return; A=2; }\nA=1; f; t $A", "t 1"),
            ('for x in a b "c d"; do A+="-$x"; done\nt "$A"', "t -a-b-c d"),
            ("for x in 1 2 3; do if [ $x = 2 ]; then continue; fi; A+=$x; done; t $A", "t 13"),
            ("for x in 1 2 3; do if [ $x = 2 ]; then break; fi; A+=$x; done; t $A", "t 1"),
            ("N=3; while [ $N -gt 0 ]; do A+=$N; N=$((N-1)); done; t $A", "t 321"),
            ("for x in a b; do cat <<EOF\nt no $x\nEOF\nA+=$x; done\nt $A", "t ab"),
            ("while [[ $# -gt 0 ]]; do case $1 in --n) N=$2; shift 2;; esac; done\nt ${N:-8}", "t 8"),
            ('A=1; [ -z "$B" ] && A=2; t $A', "t 2"),
            ('B=x; A=1; [ "$B" = x ] || A=2; t $A', "t 1"),
            ("cd /x && A=1 || A=2; t $A", "t 1"),
            ("if [ $X = bad ]; then echo no; exit 1; fi; t a", "t a"),
            ("[ -d data ] || exit 1\nt a", "t a"),
            ("if (( 3 > 2 )); then A=1; else A=2; fi; t $A", "t 1"),
            ("T=2; A=$(( ($T > 1) ? 4 : 0 )); t $A", "t 4"),
            ('A=$(echo "2 * 3" | bc); B=$(expr 2 + 5); C=$(basename /a/b.sh .sh); t $A $B $C', "t 6 7 b"),
            ("P=a/b/c.tar.gz; t ${P##*/} ${P%%.*} ${P%.gz} ${P#*/} ${P^^}", "t c.tar.gz a/b/c a/b/c.tar b/c.tar.gz A/B/C.TAR.GZ"),
            ("E=; t ${E:-d} ${E-d}x ${E:+y} ${U:=5} $U", "t d x 5 5"),
            ("A=(x y z); t ${A[1]} ${A[@]} --a $E", "t y x y z --a ?"),
            ("E=; t a $E b", "t a b"),
            ('t a "" b', "t a  b"),
            ("t --data <PATH TO DATA> --out <OUT>", "t --data <PATH TO DATA> --out <OUT>"),
            ("t a <in.txt >out.txt", "t a"),
            ("set -- a b c; shift; t $1 $# $@", "t b 2 b c"),
            ("A=(1 2; 3 | 4 & <x> 5 < 6)\nt ${A[@]}", "t 1 2 ; 3 | 4 & <x> 5 < 6"),
            ("{ A=1; }; ( B=2 ); t $A", "t 1"),
            ("f() { t deep; }", "t deep"),
        ],
    )  # fmt: skip
    def test_what_a_command_gets(self, text: str, expected: str) -> None:
        shell = Shell(text, "x")
        commands = shell.read()
        if not any(words[0].text == "t" for words in commands):
            commands = shell.read_uncalled()
        assert " ".join("?" if word.unknown else word.text for word in commands[-1]) == expected

    def test_a_script_s_arguments(self) -> None:
        text = 'S=$1; shift; N=1; while [ $# -gt 0 ]; do case $1 in --n) N=$2; shift;; esac; shift; done; t $S $N "$@"'
        assert last_command(text, **{"@": "7B --x --n 4"}) == ["t", "7B", "4"]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("while true; do A=1; done", "a loop does not end"),
            ("f() { f; }; f", "nested too deeply"),
            ("A=x; for i in 1 2 3 4 5 6 7 8 9 10; do for j in 1 2 3 4 5 6 7 8 9 10; do A=$A$A; done; done", "proportion"),
            ("; ".join(f"f{n}() {{ for i in {NINE}; do f{n + 1}; done; }}" for n in range(5)) + "; f0", "does not end|too often"),
        ],
    )  # fmt: skip
    def test_what_does_not_end_is_refused(self, text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("simulator.formats.readers.plans.shell_expansion._MAX_CHARACTERS", 2**14)
        with pytest.raises(PlanError, match=words):
            Shell(text, "x").read()

    def test_files_that_take_each_other_in_are_refused(self) -> None:
        with pytest.raises(PlanError, match="nested too deeply"):
            Shell(". a.sh", "x", source=lambda _: ". a.sh").read()

    @pytest.mark.parametrize("text", ["case", "case x in", "case x in (", "for", "for x in", "do", "done", "f() {", "}", "esac",
                                      "for ((", "((", "[[ a &&", "if", "then then", "fi fi", "f() { }", "case in in in",
                                      "<<", "A=(", "$(case", "while", "while do done", ";;", "function", "{ { {", "${A%", "${A:"])  # fmt: skip
    def test_fragments_are_read_or_refused(self, text: str) -> None:
        for whole in (text, f"{text}\n", f"A=1; {text} x\n", f'X="{text}"; eval $X'):
            with contextlib.suppress(PlanError):
                Shell(whole, "x").read()


class TestScripts:
    def test_a_command_that_is_printed_and_run_counts_once(self, tmp_path: Path) -> None:
        text = (
            f"CMD=\"torchrun --nproc_per_node 8 t.py {ARGUMENTS} --moe-layer-freq '([1]*2)'\"\necho $CMD\neval $CMD\n"
        )
        draft = read_plan(written(tmp_path, text))
        assert draft.num_devices == 8
        assert not draft.faults

    def test_several_commands_are_chosen_from(self, tmp_path: Path) -> None:
        file = written(tmp_path, f"python t.py {ARGUMENTS}\npython t.py {ARGUMENTS} --bf16\n")
        error = told(file)
        assert "2 commands train, at lines 1, 2" in str(error)
        assert "--define=command=1" in error.ready
        assert read_plan(file, define={"command": "2"}).fields["precision"] == "bf16"

    def test_a_sourced_file_is_read(self, tmp_path: Path) -> None:
        written(tmp_path, 'MBS=4\nadd() { EXTRA="--bf16"; }\n', "common.sh")
        text = (
            'source "$(dirname "$0")/common.sh"\n. gone.sh\nadd\npython t.py '
            + ARGUMENTS.replace("size 1 ", "size $MBS ")
            + " $EXTRA"
        )
        draft = read_plan(written(tmp_path, text))
        assert (draft.fields["micro_batch_size"], draft.fields["precision"]) == (4, "bf16")
        assert [(s.value, s.place.endswith(":2")) for s in draft.named("unknown")] == [("gone.sh", True)]

    def test_a_file_of_settings(self, tmp_path: Path) -> None:
        draft = read_plan(
            written(tmp_path, f'TP=2\nOPTIONS="\\\n  {ARGUMENTS} \\\n  --tensor-model-parallel-size $TP "\n')
        )
        assert draft.fields["tp"] == 2
        assert any("no command here trains" in str(s) for s in draft.named("not modelled"))

    def test_sbatch_lines_hold_several_options(self, tmp_path: Path) -> None:
        text = f"#!/bin/bash\n#SBATCH <OPTIONS> --nodes=4 --exclusive --ntasks-per-node=8 --job-name=x # c\nsrun python t.py {ARGUMENTS}\n"
        draft = read_plan(written(tmp_path, text))
        assert (draft.num_devices, draft.num_nodes) == (32, 4)

    def test_numbers_of_nodes_are_asked_for_and_gpus_of_a_node_taken(self, tmp_path: Path) -> None:
        gpus = "GPUS=$(nvidia-smi -L | wc -l)\n"
        file = written(tmp_path, f"{gpus}torchrun --nproc_per_node $GPUS --nnodes $NNODES t.py {ARGUMENTS}\n")
        error = told(file)
        assert "--nnodes hangs on $NNODES" in str(error)
        assert "--define NNODES=N, or --nodes N" in str(error)
        assert error.ready.endswith("--nodes 1")
        assert study_of(file, "NNODES=4").cluster.num_devices == 32

    def test_arguments_of_a_script_by_name_by_number_and_together(self, tmp_path: Path) -> None:
        text = f"""SIZE=$1; MBS=$2; PR=$3
        if [ $SIZE = 1B ]; then LAYERS=2; elif [ $SIZE = 7B ]; then LAYERS=4; else echo "no such size"; exit 1; fi
        if [ $PR = fp16 ]; then P="--fp16"; elif [ $PR = bf16 ]; then P="--bf16"; fi
        python t.py {ARGUMENTS.replace("layers 2", "layers $LAYERS").replace("size 1 ", "size $MBS ")} $P"""
        file = written(tmp_path, text)
        error = told(file)
        assert "--define SIZE=VALUE, one of 1B, 7B" in str(error)
        assert all(one in error.ready for one in ("--define=SIZE=1B", "--define=MBS=1", "--define=PR=bf16"))
        for define in (("@=7B 2 bf16",), ("1=7B", "2=2", "3=bf16"), ("SIZE=7B", "MBS=2", "PR=bf16")):
            study = study_of(file, *define)
            assert (study.model.num_layers, study.plan.micro_batch_size) == (4, 2)

    def test_an_option_is_set_and_removed(self, tmp_path: Path) -> None:
        file = written(tmp_path, f"python t.py {ARGUMENTS} --fp16 --lr 1\n")
        study = study_of(file, "--fp16=", "--bf16=true", "--seq-length=1024")
        assert (study.plan.precision.compute, study.plan.seq_len) == ("bf16", 1024)

    def test_what_a_condition_adds_is_asked_for_and_the_rest_stands(self, tmp_path: Path) -> None:
        text = f"""A=" {ARGUMENTS} --bf16"; B=(--swiglu)
        if [ "$X" = 1 ]; then A="${{A}} --recompute-activations"; B=("${{B[@]}}" --qk-layernorm); fi
        python t.py $A "${{B[@]}}"
        """
        file = written(tmp_path, text)
        draft = read_plan(file)
        assert len(draft.faults) == 1
        assert draft.faults[0].flags == (("--define", "X=1"),)
        assert (draft.fields["precision"], draft.fields["seq_len"]) == ("bf16", 2048)
        assert study_of(file, "X=1").plan.recompute.mode == "selective"

    @pytest.mark.parametrize(
        "kind", ['cat <<EOT > $CONFIG\n{{\n  "zero_optimization": {{ "stage": $STAGE }}\n}}\nEOT\n', ""]
    )
    def test_the_stage_in_deepspeed_s_file(self, tmp_path: Path, kind: str) -> None:
        if not kind:
            written(tmp_path, {"zero_optimization": {"stage": 1}}, "ds.json")
        text = f"STAGE=1; CONFIG=conf/ds.json\n{kind.format()}deepspeed t.py {ARGUMENTS} --deepspeed --deepspeed_config=$CONFIG --fp16\n"
        study = study_of(written(tmp_path, text))
        assert (study.plan.implementation, study.plan.zero) == ("deepspeed", 1)

    def test_a_script_that_builds_its_command_in_steps(self, tmp_path: Path) -> None:
        text = f"""#SBATCH --nodes=4   # Number of nodes
for ARGUMENT in "$@"
do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
   VALUE="${{ARGUMENT:$((${{#KEY}}+1))}}"
   export "$KEY"="$VALUE"
done
TP="${{TP:-2}}"; FSDP="${{FSDP:-0}}"; NNODES="${{NNODES:-$SLURM_NNODES}}"
TOKENIZER="${{TOKENIZER:-"$DIR/tokenizer"}}"
if ! [ -d "$TOKENIZER" ]; then
  wget -O $TOKENIZER https://example.org/tokenizer
fi
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
EXTRA="
    --overlap-grad-reduce \\
"
if [ "$FSDP" -eq 1 ]; then EXTRA="$EXTRA --use-torch-fsdp2"; else EXTRA="$EXTRA --use-distributed-optimizer"; fi
run_cmd="
    torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES t.py {ARGUMENTS} \\
        --tensor-model-parallel-size ${{TP}} \\
        $EXTRA --tokenizer-model $TOKENIZER
"
run_cmd="$run_cmd |& tee $LOG"
run_cmd=$(echo "${{run_cmd}}" | sed -e 's/  */ /g')
echo "${{run_cmd}}"
if [ "${{NO_TRAINING:-0}}" -eq 0 ]; then
    eval $run_cmd
fi
echo "import x
print(1)" > mean.py
"""
        study = study_of(written(tmp_path, text))
        assert (study.cluster.num_devices, study.plan.tp, study.plan.zero) == (32, 2, 1)

    def test_a_misspelt_option_is_an_error_and_a_foreign_one_is_not(self, tmp_path: Path) -> None:
        file = written(tmp_path, f"python t.py {ARGUMENTS} --langrl-env-config x --tensor-model-paralel-size 2\n")
        error = told(file)
        (fault,) = error.faults
        assert fault.place.endswith("--tensor-model-paralel-size")
        assert "--tensor-model-parallel-size?" in str(fault)
        assert run(error.ready) in (0, 4)

    def test_older_names(self, tmp_path: Path) -> None:
        text = f"python t.py {ARGUMENTS} --num-key-value-heads 2 --activations-checkpoint-method uniform --position-embedding-type alibi"
        draft = read_plan(written(tmp_path, text))
        assert isinstance(draft.model, Model)
        assert (draft.model.num_kv_heads, draft.model.positions, draft.fields["recompute"]) == (2, "none", "full")

    def test_settings_in_a_yaml_file(self, tmp_path: Path) -> None:
        written(tmp_path, "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n  add_bias_linear: false\n"
                "  activation_func: swiglu\nmodel_parallel:\n  tensor_model_parallel_size: 2\nbf16: true\nfp16: false\n"
                "micro_batch_size: 2\nseq_length: 1024\nvocab_size: 99\nglobal_batch_size: null\n", "cfg.yaml")  # fmt: skip
        draft = read_plan(written(tmp_path, "torchrun t.py --yaml-cfg conf/cfg.yaml --micro-batch-size 1\n"))
        assert isinstance(draft.model, Model)
        assert (draft.model.num_layers, draft.model.mlp, draft.model.mlp_bias) == (4, "swiglu", False)
        assert {draft.fields[name] for name in ("tp", "micro_batch_size")} == {2, 1}
        assert draft.fields["precision"] == "bf16"
        with pytest.raises(PlanError, match="not beside the script"):
            read_plan(written(tmp_path, "t.py --yaml-cfg none.yaml --micro-batch-size 1\n"))

    def test_an_encoder_beside_a_decoder_is_refused(self, tmp_path: Path) -> None:
        error = told(
            written(
                tmp_path,
                f"python t.py {ARGUMENTS.replace('num-layers', 'encoder-num-layers')} --decoder-num-layers 2\n",
            )
        )
        assert "an encoder and a decoder" in str(error)
        assert run(error.ready) in (0, 4)

    @pytest.mark.parametrize(
        "more",
        [
            "--bf16 --fp16", "--overlap-param-gather", "--recompute-granularity full", "--tensor-model-parallel-size 3",
            "--global-batch-size 13", "--pipeline-model-parallel-size 16", "--tokenizer-type X --vocab-size $V", "$MORE",
        ],
    )  # fmt: skip
    def test_refusals_end_with_a_command_that_runs(self, tmp_path: Path, more: str) -> None:
        file = written(tmp_path, f"torchrun --nproc_per_node 8 t.py {ARGUMENTS} {more}\n")
        error = refusal(file)
        assert (error is None) == (more == "$MORE")
        assert error is None or run(error.ready) in (0, 4)


def run(command: str) -> int:
    """The exit code of a command line that a message shows."""
    program, *words = shlex.split(command)
    assert program == "shardwise"
    return main(words)


def deepspeed(folder: Path, text: str | Mapping[str, Any], **flags: str) -> Study:
    return study_of(written(folder, text, "ds.json"), model="llama3.2-1b", **flags)


class TestDeepSpeed:
    def test_auto_is_what_transformers_fills_in(self, tmp_path: Path) -> None:
        sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        batch = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        data = {
            **dict.fromkeys(batch, "auto"), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")},
        }  # fmt: skip
        study = deepspeed(tmp_path, data)
        width, plan = study.model.d_model, study.plan
        buckets = plan.deepspeed
        assert buckets.reduce_bucket_numel == width**2
        assert buckets.prefetch_bucket_numel == int(0.9 * width**2)
        assert buckets.param_persistence_numel == 10 * width
        assert (plan.micro_batch_size, plan.num_micro_batches, plan.precision.compute) == (8, 1, "bf16")
        (note,) = study.notes
        assert note.startswith("assumed, because ")
        assert "--micro-batch-size 8 --num-micro-batches 1 --precision bf16 --seq-len 2048 --recompute none" in note
        assert run(note.rpartition("to give your own: ")[2]) in (0, 4)
        assumed = {source.what for source in study.sources if source.kind == "assumed"}
        assert assumed >= {"plan.micro_batch_size", "plan.precision", "plan.seq_len", "plan.recompute"}

    @pytest.mark.parametrize(
        ("dtypes", "precision"),
        [
            ({"fp16": {"enabled": "auto"}}, "fp16"), ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, "bf16"),
            ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, "fp16"), ({}, "fp32"), ({"bf16": {"enabled": False}}, "fp32"),
        ],
    )  # fmt: skip
    def test_precisions(self, tmp_path: Path, dtypes: dict[str, Any], precision: str) -> None:
        assert deepspeed(tmp_path, {"train_micro_batch_size_per_gpu": 1, **dtypes}).plan.precision.compute == precision

    @pytest.mark.parametrize(
        ("batch", "micro", "count"),
        [
            ({"train_batch_size": 64}, 8, 1), ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, 4),
            ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
            ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}, 4, 2),
            ({"train_batch_size": "auto", "gradient_accumulation_steps": 2}, 8, 2), ({}, 8, 1),
        ],
    )  # fmt: skip
    def test_batches(self, tmp_path: Path, batch: dict[str, Any], micro: int, count: int) -> None:
        plan = deepspeed(tmp_path, {"zero_optimization": {"stage": 2}, **batch}).plan
        assert (plan.micro_batch_size, plan.num_micro_batches) == (micro, count)

    def test_a_batch_smaller_than_the_node_runs_on_a_part_of_it(self, tmp_path: Path) -> None:
        data = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
        study = deepspeed(tmp_path, data)
        assert (study.cluster.num_devices, study.plan.micro_batch_size) == (2, 1)
        both = deepspeed(tmp_path, {**data, "train_batch_size": 6, "train_micro_batch_size_per_gpu": 2})
        assert (both.cluster.num_devices, both.plan.num_micro_batches) == (3, 1)
        error = told(written(tmp_path, data, "ds.json"), model="llama3.2-1b", nodes="1")
        assert "--set cluster.gpus_per_node=2" in error.ready
        assert run(error.ready) in (0, 4)

    @pytest.mark.parametrize(("size", "expected"), [(0, 10**9), (1e14, 2**40), ("1e9", 10**9), (5, 5)])
    def test_sub_groups(self, tmp_path: Path, size: object, expected: int) -> None:
        zero = {"stage": 3, "sub_group_size": size, "offload_optimizer": {"device": "nvme", "pin_memory": True}}
        study = deepspeed(tmp_path, {"bf16": {"enabled": True}, "zero_optimization": zero})
        assert study.plan.offload.sub_group_numel == expected
        assert study.draft is not None
        assert bool([s for s in study.draft.named("not modelled") if s.name.endswith("sub_group_size")]) == (size == 0)

    def test_comments_commas_and_placeholders(self, tmp_path: Path) -> None:
        text = """// a template
        {
          "train_batch_size": CONFIG_BATCH, # filled in by the script
          "train_micro_batch_size_per_gpu": ${MBS}, /* "x": 1, */
          "zero_optimization": {"stage": ZERO_STAGE,},
          "note": "a // b, } # c",
        }"""
        file = written(tmp_path, text, "ds.json")
        study = study_of(file, "CONFIG_BATCH=64", "MBS=2", "ZERO_STAGE=2", model="llama3.2-1b")
        assert (study.plan.zero, study.plan.micro_batch_size, study.plan.num_micro_batches) == (2, 2, 4)
        draft = read_plan(file, define={"ZERO_STAGE": "2"})
        assert "CONFIG_BATCH, MBS" in draft.notes[0]
        assert draft.assumed["micro_batch_size"][0] == 8

    def test_an_optimizer_that_is_not_modelled_has_a_command(self, tmp_path: Path) -> None:
        data = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adagrad"}}
        error = told(written(tmp_path, data, "ds.json"), model="llama3.2-1b")
        assert "Adagrad is not modelled" in str(error)
        assert run(error.ready) in (0, 4)

    def test_learned_positions_bound_the_assumed_length(self, tmp_path: Path) -> None:
        data = {"train_micro_batch_size_per_gpu": 1}
        assert deepspeed(tmp_path, data).plan.seq_len == 2048
        file = written(tmp_path, data, "ds.json")
        assert study_of(file, model="gpt2").plan.seq_len == Model.load("gpt2").max_positions == 1024

    def test_for_a_model_that_is_named_no_other_is_proposed(self, tmp_path: Path) -> None:
        data = {"base_model": "Qwen/Qwen2-VL-7B-Instruct", "adapter": "lora", "lora_r": 8, "micro_batch_size": 1}
        error = told(written(tmp_path, data, "axolotl.yml"))
        assert "Qwen2-VL-7B-Instruct is not a preset; --model NAME, or its config.json" in str(error)
        assert "llama3-8b" not in str(error)

    def test_a_missing_model_gets_a_command_with_all_that_is_assumed(self, tmp_path: Path) -> None:
        error = told(written(tmp_path, {"zero_optimization": {"stage": 2}}, "ds.json"))
        assert "does not state the model" in str(error)
        assert "--model llama3-8b" in error.ready
        assert "--seq-len 2048" in error.ready
        assert str(error).endswith(error.ready)


def accelerate(folder: Path, text: str, **flags: str) -> Study:
    return study_of(written(folder, text, "a.yaml"), model="llama3.2-1b", **flags)


class TestAccelerate:
    @pytest.mark.parametrize(
        ("text", "devices", "nodes"),
        [
            ("distributed_type: 'NO'\nmixed_precision: bf16\n", 1, 1),
            ("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 1\n", 2, 1),
            ("distributed_type: FSDP\nnum_processes: 6\nnum_machines: 2\n", 6, 2),
            ("distributed_type: FSDP\nnum_processes: 32\nnum_machines: 4\n", 32, 4),
            ("distributed_type: MULTI_GPU\nnum_machines: 2\n", 16, 2),
            ("distributed_type: MULTI_NPU\nnum_processes: 8\n", 8, 1),
        ],
    )
    def test_gpus(self, tmp_path: Path, text: str, devices: int, nodes: int) -> None:
        cluster = accelerate(tmp_path, text).cluster
        assert (cluster.num_devices, cluster.num_nodes) == (devices, nodes)

    def test_megatron_s_plugin(self, tmp_path: Path) -> None:
        text = """distributed_type: MEGATRON_LM
mixed_precision: bf16
num_processes: 8
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 4
  megatron_lm_pp_degree: 2
  megatron_lm_tp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
"""
        study = accelerate(tmp_path, text)
        plan = study.plan
        assert (plan.implementation, plan.tp, plan.pp, plan.dp_shard, plan.zero) == ("megatron", 2, 2, 2, 1)
        assert (plan.num_micro_batches, plan.sequence_parallel, plan.recompute.mode) == (4, True, "selective")
        assert plan.stack == "megatron-core-2025"
        assert study.draft is not None
        assert not study.draft.named("unknown")

    def test_a_deepspeed_configuration_inside(self, tmp_path: Path) -> None:
        text = """distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  train_micro_batch_size_per_gpu: 2
  zero_optimization: {stage: 3, reduce_bucket_size: auto}
"""
        plan = accelerate(tmp_path, text).plan
        assert (plan.zero, plan.micro_batch_size, plan.precision.compute) == (3, 2, "bf16")

    def test_keys_of_older_releases(self, tmp_path: Path) -> None:
        text = """distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  sharding_strategy: 2
  offload_params: false
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  min_num_params: 2000
dynamo_backend: 'NO'
"""
        study = accelerate(tmp_path, text)
        assert (study.plan.zero, study.plan.fsdp.backward_prefetch) == (2, 1)
        assert study.draft is not None
        assert not study.draft.named("unknown")

    def test_fsdp1_s_settings_are_overruled_by_fsdp2(self, tmp_path: Path) -> None:
        text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD, fsdp_use_orig_params: true}\n"
        study = accelerate(tmp_path, text)
        assert study.plan.implementation == "fsdp2"
        assert study.draft is not None
        assert len(study.draft.named("overruled")) == 2

    def test_a_parallelism_config_without_prefixes(self, tmp_path: Path) -> None:
        text = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {tp_size: 2, dp_shard_size: 4, cp_size: 1}\n"
        plan = accelerate(tmp_path, text).plan
        assert (plan.tp, plan.dp_shard, plan.cp) == (2, 4, 1)


FILES = sorted(file for kind in ("megatron", "ds", "accel") for file in (REAL / kind).glob("*"))


def refusal(file: Path, **flags: str) -> InputError | None:
    """Why a file is no whole study with a cluster and these flags; None: it is one."""
    try:
        study_of(file, **flags)
    except InputError as exc:
        return exc
    return None


def is_read_with_two_flags(file: Path) -> bool:
    """With a cluster, and perhaps a model or the number of nodes that the error's command names."""
    error = refusal(file)
    nodes = re.search(r" --nodes (\d+)", error.ready) if error else None
    return not (error and refusal(file, model="llama3-8b") and (nodes is None or refusal(file, nodes=nodes[1])))


@pytest.mark.skipif(not FILES, reason="../shared/data/real_inputs is absent")
def test_nine_in_ten_published_files_need_two_flags() -> None:
    refused = [file.name for file in FILES if not is_read_with_two_flags(file)]
    assert len(refused) <= len(FILES) / 10, refused


@pytest.mark.parametrize("file", FILES or [None], ids=lambda file: file.name if file else "")
def test_a_published_file_or_the_command_in_its_refusal_is_predicted(
    file: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what would make it fit, which costs more than the prediction: tests/unit/test_remedy_search.py."""
    if file is None:
        pytest.skip("../shared/data/real_inputs is absent")
    monkeypatch.setattr(remedy_search, "remedies", lambda *_: ())
    error = refusal(file)
    command = (
        error.ready if error else shlex.join(["shardwise", "predict", "--plan", str(file), "--cluster", "dgx-h100-8"])
    )
    assert run(command) in (0, 4)


def test_a_draft_says_what_is_assumed(tmp_path: Path) -> None:
    draft = read_plan(written(tmp_path, {"train_micro_batch_size_per_gpu": 1}, "ds.json"))
    assert isinstance(draft, Draft)
    assert draft.report()["assumed"] == {"seq_len": 2048, "recompute": "none"}
