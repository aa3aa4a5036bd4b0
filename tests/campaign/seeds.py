"""Valid inputs: a command line and the files that it reads, one for each reader. Each is predicted as it stands before it is mutated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

from tests.campaign import further, inputs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, PLANS = ROOT / "docs" / "examples", ROOT / "tests" / "data" / "plans"
TOPOLOGIES, SHARED = ROOT / "topologies", ROOT.parent / "shared" / "data"


SLOW = frozenset(
    {
        "plan bloom-like.sh", "plan gpt-175b.sh", "megatron plan", "plan llama3-8b.args", "serving table", "prices", "search", "learn", "sensitivity",
        "published runs", "compare", "rollout", "serve", "serving launch", "serve search", "spot offers", "captured", "searched again", "sensitivity again",
        "every output", "samples fit", "rehearsed", "burnt", "played", "program played", "measured",
    }
)  # fmt: skip
# Started as programs of their own, not in a process that plays many: they fork, listen or wait
ALONE = frozenset({"captured", "burnt", "rehearsed", "played", "program played", "measured", "asked"})


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A command line, run where its files lie; `mutable`: those of them that are mutated (all unless said).

    files: contents by name, which may name a folder. special: what stands in place of a file, by name (`mutate.SPECIAL`).
    nightly: not among the cases that the tests play. valid: to be refused is a fault.
    """

    name: str
    argv: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    mutable: tuple[str, ...] = ()
    special: dict[str, str] = field(default_factory=dict)
    nightly: bool = False
    valid: bool = True

    @property
    def slow(self) -> bool:
        return self.name in SLOW

    @property
    def alone(self) -> bool:
        return self.name in ALONE

    @property
    def targets(self) -> tuple[str, ...]:
        return self.mutable or tuple(self.files)


def _of(name: str, command: str, *examples: str, mutable: tuple[str, ...] = (), **files: bytes) -> Seed:
    found = {one: (EXAMPLES / one).read_bytes() for one in examples} | files
    return Seed(name=name, argv=tuple(command.split()), files=found, mutable=mutable)


def _cut(data: bytes, lines: int) -> bytes:
    return b"\n".join(data.splitlines()[:lines]) + b"\n"


def _plan(path: Path) -> Seed:
    """Megatron's scripts bring their model; other files do not. Files beside it that it names come along."""
    model = "" if path.suffix in (".sh", ".args") else "--model llama3.2-1b --seq-len 1024"
    cluster = "dgx-a100-80-8 --nodes 48" if path.suffix == ".sh" else "hgx-h100-8"
    command, data = f"predict --plan {path.name} --cluster {cluster} {model} --plain", path.read_bytes()
    named = {one.name: one.read_bytes() for one in PLANS.iterdir() if one.name.encode() in data}
    return _of(f"plan {path.name}", command, **{path.name: data, **named})


PREDICT: Final = "predict --plain --model llama3.2-1b --cluster hgx-h100-8"
_SEARCH: Final = "--cluster hgx-h100-8 --nodes 1 --global-batch 8 --fix tp=1 --fix pp=1 --fix zero=3 --fix recompute=none --fix cp=1 --jobs 1"
JOURNALED: Final = {
    "searched again": f"search --model gpt2 --seq-len 256 {_SEARCH}",
    "explored again": "explore --model gpt2 --cluster hgx-h100-8 --set plan.seq_len=256 --vary plan.tp=1,2 --jobs 1",
    "sensitivity again": "sensitivity --model gpt2 --cluster hgx-h100-8 --set plan.seq_len=256 --vary link.intra.bytes_per_s=200GB/s..450GB/s --samples 8 --no-errors --jobs 1",
    "serve search again": "serve --model gpt2 --cluster hgx-h100-8 --rate 4 --requests 10 --prompt 16 --output 4 --search --slo-ttft 1s --fix tp=1 --jobs 1",
}  # fmt: skip


def _described() -> Iterator[Seed]:
    """Studies, models, clusters, stacks and calibrations."""
    yield _of("study", "predict study.toml --json", **{"study.toml": inputs.STUDY})
    yield _of("example study", "predict study.toml --plain", "study.toml")
    yield _of("cluster file", "predict --model llama3.2-1b --cluster mine.toml --json", **{"mine.toml": inputs.CLUSTER})
    yield _of("config.json", "predict --model config.json --cluster hgx-h100-8 --plain", "config.json")
    yield _of("model file", "predict --model mine.toml --cluster hgx-h100-8 --json", **{"mine.toml": inputs.MODEL})
    for model, keys in inputs.configs().items():
        length = 4096 if b"vision_config" in keys else 512  # an image's tiles take thousands of places
        yield _of(f"config.json of {model}", f"predict --model config.json --cluster hgx-h100-8 --nodes 32 --zero 3 --seq-len {length} --json", **{"config.json": keys})  # fmt: skip
    for name in ("olmoe-1b-7b", "nemotron-h-8b", "deepseek-v2-lite"):
        shape = (TOPOLOGIES / "models" / f"{name}.toml").read_bytes()
        yield _of(f"model {name}", "predict --model mine.toml --gpus 16xh200 --zero 3 --seq-len 512 --json", **{"mine.toml": shape})  # fmt: skip
    yield _of("slice of a GPU", "predict --model gpt2 --gpus 1xh100:3g.40gb --seq-len 512 --json")
    yield _of("learned", f"{PREDICT} --calibration mine.learned.json", **{"mine.learned.json": inputs.LEARNED})
    stack = (TOPOLOGIES / "stacks" / "torch-2.6-eager.toml").read_bytes()
    yield _of("stack file", f"{PREDICT} --stack mine.toml", **{"mine.toml": stack})
    device = (TOPOLOGIES / "calibrations" / "a100-sxm.calibration.json").read_bytes()
    yield _of(
        "calibration file",
        "predict --plain --model gpt2 --cluster dgx-a100-80-8 --calibration mine.calibration.json",
        **{"mine.calibration.json": device},
    )
    yield _of("tables of a study", "predict asked.toml --telemetry --step-jitter 0.01 --json", **{"asked.toml": inputs.ASKED})  # fmt: skip
    yield _of("rank mapping", "predict placed.toml --json", "placed.toml", **{"ranks.tsv": inputs.RANKS})
    yield _of("lengths", f"{PREDICT} --lengths lengths.txt", **{"lengths.txt": b"120\n500\n2048\n70\n"})
    yield _of("rollout", "predict --model llama3.2-1b --gpus 8xh100 --rollout grpo.toml --plain", "grpo.toml")
    yield _of("fabric log", f"{PREDICT} --nodes 2 --fabric log.txt", **{"log.txt": inputs.NCCL_LOG})
    yield _of("predict", f"{PREDICT} --tp 2 --micro-batch-size 2 --recompute full --set plan.zero=1")
    outputs = (
        "--trace t.json.gz --memory m.svg --links l.svg --snapshot s.pickle --energy --largest-batch --html page.html"
    )
    yield _of("every output", f"predict --model gpt2 --cluster hgx-h100-8 --nodes 2 --seq-len 256 --json {outputs}")
    yield _of("init", "init mine.toml --model gpt2 --cluster hgx-h100-8 --nodes 2 --zero 2 --seq-len 512")


def _plans() -> Iterator[Seed]:
    """Plans in other programs' words, and what is written in them."""
    yield _of("adapter", "predict --recipe adapter_config.json --model llama3.2-1b --gpus 1xa100 --plain", "adapter_config.json")  # fmt: skip
    yield _of("deepspeed plan", "predict --plan zero3.json --model llama3.2-1b --cluster hgx-h100-8 --seq-len 1024 --plain", "zero3.json")  # fmt: skip
    yield _of("megatron plan", "predict --plan train.sh --cluster dgx-h100-8 --plain", "train.sh")
    yield from map(_plan, sorted(PLANS.iterdir()))
    yield _of(
        "megatron yaml", "predict --plan run.args --cluster hgx-h100-8 --json",
        **{"run.args": b"--yaml-cfg run.yaml --vocab-size 32000 --micro-batch-size 1\n", "run.yaml": inputs.MEGATRON_YAML},
    )  # fmt: skip
    yield _of("torchtitan plan", "predict --plan job.toml --model llama3.2-1b --cluster hgx-h100-8 --json", **{"job.toml": inputs.TITAN})  # fmt: skip
    yield _of("llama-factory recipe", "predict --plan llama3_lora_sft.yaml --model llama3.2-1b --gpus 1xa100 --plain", "llama3_lora_sft.yaml")  # fmt: skip
    yield _of("axolotl recipe", "predict --plan axolotl.yml --model llama3.2-1b --gpus 1xa100 --plain", "axolotl.yml")
    yield _of(
        "launch line",
        "predict --plan tune.sh --model llama3.2-1b --gpus 1xa100 --plain",
        "axolotl.yml",
        **{"tune.sh": inputs.TUNE},
    )
    bridge = "predict --plan bridge.yaml --define recipe=llama32_1b_peft_config --gpus 1xh100 --plain"
    yield _of("megatron-bridge recipe", bridge, **{"bridge.yaml": inputs.BRIDGE})
    found = "predict --plan plans.json --plan-format search --json"
    yield _of("a search's best plan", found, **{"plans.json": inputs.PLANS})
    own = {"megatron": "--zero 1 --data-parallel megatron", "deepspeed": "--zero 2 --data-parallel deepspeed --reduce-dtype bf16", "accelerate": "--reduce-dtype bf16"}  # fmt: skip
    for form in ("megatron", "deepspeed", "accelerate", "torchtitan", "toml"):
        yield _of(f"export to {form}", f"export --model llama3-8b --cluster hgx-h100-8 --to {form} {own.get(form, '')} --json")  # fmt: skip
    yield _of("export to chakra", "export study.toml --to chakra -o traces", "study.toml")
    yield _of("launch kit", "export study.toml --to launch-kit --hosts node[01-02] -o kit", "study.toml")
    kit = "export placed.toml --to launch-kit --placement ranks.tsv --hosts node[01-02] -o kit"
    yield _of("placed launch kit", kit, "placed.toml", **{"ranks.tsv": inputs.RANKS})


def _programs() -> Iterator[Seed]:
    """Captures, profilers' traces, memory snapshots."""
    capture = "predict --program step.capture.gz --cluster hgx-h100-8 --plain"
    yield _of("capture", capture, **{"step.capture.gz": inputs.capture()})
    both = {"step.capture.gz": inputs.capture(), "other.capture.gz": inputs.capture(4)}
    yield _of("captured at two sizes", f"{capture} --scale-with other.capture.gz", **both)
    measured = {"step.capture.gz": inputs.capture(), "this.capture.gz": inputs.capture()}
    yield _of("by a measured step", f"{capture} --of this.capture.gz --measured step.json.gz", "step.json.gz", **measured)  # fmt: skip
    yield _of("long run of a capture", "goodput --program step.capture.gz --cluster hgx-h100-8 --tokens-per-step 4096 --tokens 1M --json", **{"step.capture.gz": inputs.capture()})  # fmt: skip
    yield _of("captured", "capture step.py --cluster hgx-h100-8 -o step.capture.gz", **{"step.py": inputs.SCRIPT})
    yield _of("trace", "import step.json.gz --json", "step.json.gz")
    yield _of("trace beside a study", "import step.json.gz --study study.toml --snapshot snapshot.json.gz --json", "step.json.gz", "study.toml", "snapshot.json.gz")  # fmt: skip
    lined_up = "import step.json.gz --program step.capture.gz -o lined.json.gz"
    yield _of(
        "trace beside a program", lined_up, **{"step.json.gz": inputs.shaped(), "step.capture.gz": inputs.capture()}
    )
    yield _of("recorded", "predict --program step.json.gz --plain", "step.json.gz")
    ranks = {f"traces/rank{n}.json.gz": (EXAMPLES / "traces" / "ddp" / f"rank{n}.json.gz").read_bytes() for n in (0, 1)}
    yield _of("recorded ranks", "predict --program traces --faster gemm=2 --dp-ranks 4 --json", **ranks)
    yield _of("chakra", "predict --program a.0.et --plain", **{"a.0.et": inputs.CHAKRA})
    yield _of("nsight", "predict --program a.sqlite --plain", **{"a.sqlite": inputs.nsight()})
    yield _of("snapshot", "replay snapshot.json.gz --plain", "snapshot.json.gz")
    policies = "replay snapshot.json.gz --compare-policies --expandable-segments --json"
    yield _of("snapshot under policies", policies, "snapshot.json.gz")
    yield _of("pickled snapshot", "replay step.pickle --json", **{"step.pickle": inputs.pickled()})


def _questions() -> Iterator[Seed]:
    """Studies of many predictions."""
    yield _of("compare", "compare fsdp.toml megatron.toml --plain", "fsdp.toml", "megatron.toml")
    yield _of("what if", "compare --model gpt2 --cluster hgx-h100-8 --set plan.seq_len=256 --what-if plan.zero=2 --no-ablations --json")  # fmt: skip
    yield _of("spot offers", "goodput ndr.toml --spot offers.csv --replicas 20 --plain", "ndr.toml", "offers.csv")
    yield _of("prices", "goodput long-run.toml --prices prices.toml --plain", "long-run.toml", "prices.toml")
    yield _of(
        "failures",
        "goodput run.toml --failures llama3 --spare-hosts 1 --seed 3 --json",
        **{"run.toml": inputs.SPOT_STUDY},
    )
    yield _of("one failure", "sensitivity --failures study.toml --json", **{"study.toml": inputs.STUDY})
    yield _of("sensitivity", "sensitivity ndr.toml --what-if link.inter.bytes_per_s=200Gb/s --plain", "ndr.toml")
    yield _of("explored", "explore study.toml --vary plan.tp=1,2 --jobs 1 --json", **{"study.toml": inputs.STUDY})
    yield _of("plans of a search", "explore plans.json --json --html what-if.html", **{"plans.json": inputs.PLANS})
    yield _of("search", f"search --model llama3.2-1b --seq-len 1024 --plain {_SEARCH}")
    place = "place study.toml --topology node.xml --plain"
    yield _of("placement", place, "study.toml", "node.xml", mutable=("node.xml",))
    yield _of("compared placement", "place placed.toml --placement ranks.tsv --json -o best.tsv", "placed.toml", **{"ranks.tsv": inputs.RANKS})  # fmt: skip
    tensors = "place --tensors t.csv --cluster hgx-h100-8 --room 8GB --plain"
    yield _of("tensors", tensors, **{"t.csv": inputs.TENSORS})
    yield _of("asked", "ui study.toml --port 0", **{"study.toml": inputs.STUDY})


def _journals() -> Iterator[Seed]:
    """Commands that go on from a journal, which takes a run of each."""
    for name, command in JOURNALED.items():
        files = {"found.journal": inputs.journal(command)}
        yield _of(name, f"{command} --journal found.journal --json", **files)


def _servers() -> Iterator[Seed]:
    serve = "serve --model llama3.2-1b --cluster hgx-h100-8"
    yield _of("serve", f"{serve} --tp 2 --rate 4 --requests 50 --plain")
    yield _of("serving study", "serve study.toml --json", **{"study.toml": inputs.SERVING})
    yield _of("arrivals", f"{serve} --trace arrivals.csv --plain", **{"arrivals.csv": inputs.ARRIVALS})
    yield _of("draft model", f"{serve} --speculative draft --draft-model config.json --acceptance 0.7 --rate 2 --requests 5 --json", "config.json")  # fmt: skip
    yield _of("serving launch", f"{serve} --tp 2 --rate 4 --requests 20 --export launch --plain")
    yield _of(
        "serve search",
        f"{serve} --search --rate 2 --requests 5 --prompt 16 --output 4 --slo-ttft 1s --fix tp=1 --fix weights=bf16 --max-gpus 1 --jobs 1 --prices prices.toml --json",
        "prices.toml",
    )


def _measured() -> Iterator[Seed]:
    """Tables of measurements, calibrations, machines."""
    yield _of("runs table", "backtest runs.csv --json", "runs.csv")
    yield _of("learn", "calibrate learn measured.csv -o mine", "measured.csv")
    yield _of("results", "validate compare runs.jsonl --json", "runs.jsonl")
    fit = "--cluster hgx-h100-8 -o mine.calibration.json"
    yield _of("nccl fit", f"calibrate fit all_reduce.txt {fit}", **{"all_reduce.txt": inputs.NCCL_LOG})
    yield _of("nccl json fit", f"calibrate fit all_reduce.json {fit}", **{"all_reduce.json": inputs.NCCL_JSON})
    yield _of(
        "samples fit",
        "calibrate fit samples.jsonl.gz --noisy -o mine.calibration.json",
        **{"samples.jsonl.gz": (inputs.MEASURED / "samples-1.jsonl.gz").read_bytes()},
    )
    two = {"old.jsonl": inputs.samples(), "new.jsonl": inputs.samples(1.3)}
    yield _of("samples check", "calibrate check new.jsonl --baseline old.jsonl --plot x.svg --junit x.xml --prometheus x.prom --json", **two)  # fmt: skip
    yield _of("samples diff", "calibrate diff old.jsonl new.jsonl --json", **two)
    fleet = {f"history/{host}.jsonl": inputs.samples(1.0, host) for host in ("a", "b", "c")}
    yield _of("fleet", "calibrate fleet history --json", **fleet)
    old = (TOPOLOGIES / "calibrations" / "gb200.calibration.json").read_bytes()
    calibrations = {"old.calibration.json": old, "new.calibration.json": old.replace(b"0.9", b"0.8")}
    yield _of(
        "calibrations diff", "calibrate diff old.calibration.json new.calibration.json --study study.toml --json",
        **calibrations, **{"study.toml": inputs.STUDY},
    )  # fmt: skip
    yield _of("measured", "calibrate run --tiny --minutes 0.02 --device cpu --out mine.jsonl")
    yield _of("burnt", "calibrate burn-in --tiny --minutes 0.01 --device cpu --json")
    rehearsal = _of("rehearsed", "validate rehearse --quick --only none")  # eight processes for minutes: named nothing
    yield replace(rehearsal, valid=False)
    program = "validate run --program step.py --capture step.capture.gz --device cpu --steps 1 --json"
    yield _of("program played", program, **{"step.py": inputs.SCRIPT, "step.capture.gz": inputs.capture(ranks=1)})
    yield _of("played", "validate run study.toml --mode fake --steps 1 --json", **{"study.toml": inputs.PLAYED})
    for name, table in (
        ("serving table", "serving.csv"), ("memory table", "memory.csv"), ("collectives table", "collectives.csv"), ("published runs", "runs.csv"),
    ):  # fmt: skip
        if (path := SHARED / table).is_file():
            yield _of(name, f"backtest {table} --json", **{table: _cut(path.read_bytes(), 4)})


def _further() -> Iterator[Seed]:
    """Fine-tuning frameworks' files, tables of our own, options that read a file."""
    for name, (command, files) in {**further.recipes(), **further.tables()}.items():
        yield replace(_of(name, command, **files), nightly=True)


def _studies() -> Iterator[Seed]:
    for name, argv, files in further.studies():
        yield Seed(name=name, argv=tuple(argv), files=files, nightly=True, valid=False)


def _machines() -> Iterator[Seed]:
    """Topologies, collectives, this installation."""
    yield _of("matrix", "topo matrix.txt --device a100 --plain", "matrix.txt")
    yield _of("host saved", "topo matrix.txt --device a100 --save mine.toml --json", "matrix.txt")
    yield _of("topology xml", "topo node.xml --plain", "node.xml")
    yield _of("slurm", "topo topology.conf --plain", "topology.conf")
    tree = "topo topology.conf --node hgx-h100-8 --hosts node[01-04] --save mine.toml --json"
    yield _of("slurm's nodes", tree, "topology.conf")
    yield _of(
        "cluster drawn",
        "topo mine.toml --draw x.svg --html page.html --json",
        **{"mine.toml": inputs.CLUSTER.split(b"[[exceptions]]")[0]},
    )
    collective = "collective all_reduce --nodes 2"
    yield _of("collective", f"{collective} --size 1MB:64MB --nccl 2.21 --plain")
    yield _of("tuner", f"{collective} --size 1MB:4MB --tuner tuner.csv --env NCCL_ALGO=Ring --json", **{"tuner.csv": inputs.TUNER})  # fmt: skip
    measured = {"log.txt": inputs.NCCL_LOG, "log.json": inputs.NCCL_JSON}
    yield _of(
        "collective beside a log",
        "collective all_reduce --compare log.txt --compare log.json --plot x.svg --json",
        **measured,
    )
    yield _of("doctor", "doctor --json")
    yield _of("completions", "completions bash")
    yield _of("manual", "manual -o man")


@cache
def seeds(*, journals: bool = True) -> tuple[Seed, ...]:
    """Every reader and command at least once. What lies in ../shared takes part where it is there.

    journals: also those that take a run to make, and the golden studies, which have tests of their own.
    """
    parts = [
        _described,
        _plans,
        _programs,
        _questions,
        _servers,
        _measured,
        _machines,
        _further,
        *([_journals, _studies] if journals else []),
    ]
    return tuple(one for part in parts for one in part())
