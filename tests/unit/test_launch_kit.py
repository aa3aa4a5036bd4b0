"""Launch kits: every rank has a GPU of its own, and the scripts start what the files say."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from simulator.base.errors import PlanError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.exchange import Job
from simulator.formats.writers.launch_kit import Kit, launch_kit, make_kit
from simulator.formats.writers.launch_kit.scripts import environment
from simulator.formats.writers.plans.megatron import megatron_script
from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.host import Gpu, Host
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

PLANS = Path(__file__).resolve().parents[1] / "data" / "plans"
PLAN = Plan(tp=4, dp_shard=4, zero=3, sequence_parallel=True, seq_len=1024)


def job(plan: Plan = PLAN) -> Job:
    return Job(plan=plan, model=Model.load("llama3-8b"), stack=Stack.load(plan.stack), gpus_per_node=8)


def cluster(nodes: int = 2) -> Cluster:
    return Cluster.load("hgx-h100-8", nodes)


def table(text: str) -> list[dict[str, str]]:
    head, *rows = (line.split("\t") for line in text.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def files(kit: Kit) -> dict[str, str]:
    return launch_kit(kit, {}, {})


@pytest.mark.parametrize(
    ("degrees", "queues"),
    [({"tp": 1}, None), ({"tp": 4, "cp": 1}, "1"), ({"tp": 1, "expert_overlap": True}, "32"), ({"tp": 4, "expert_overlap": True}, "32")],
)  # fmt: skip
def test_overlapping_exchanges_get_more_than_one_hardware_queue(degrees: dict[str, object], queues: str | None) -> None:
    """In one queue nothing runs beside an exchange (github.com/NVIDIA/Megatron-LM pull request 6311), so the option would do nothing."""
    plan = Plan(
        data_parallel="megatron", dp_replicate=8, ep=8, etp=1, pp=2, virtual_stages=2, num_micro_batches=4, **degrees
    )
    experts = Job(plan=plan, model=Model.load("mixtral-8x7b"), stack=Stack.load("megatron-core-2025"), gpus_per_node=8)
    assert environment(make_kit(experts, cluster(plan.num_devices // 8))).get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
    line = f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}"
    assert (line in megatron_script(experts).splitlines()) == (queues is not None)


def test_ranks_stand_where_the_mesh_says() -> None:
    rows = table(files(make_kit(job(), cluster()))["ranks.tsv"])
    mesh = Mesh(PLAN, cluster())
    assert [int(row["rank"]) for row in rows] == list(range(16))
    assert len({(row["host"], row["cuda"]) for row in rows}) == 16
    for row in rows:
        assert {axis: int(row[axis]) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")} == mesh.coordinates(
            int(row["rank"])
        )


def test_gpus_are_numbered_by_bus_id() -> None:
    ids = [f"0000:{number:02x}:00.0" for number in (0x9B, 0x1A, 0x40, 0x53, 0x66, 0xCA, 0xDB, 0xBB)]
    gpus = tuple(
        Gpu(name=f"GPU{i}", pci=pci, numa=str(i // 4), cpus=f"{i * 4}-{i * 4 + 3}") for i, pci in enumerate(ids)
    )
    host = Host(source="made", format="xml", gpus=gpus)
    kit = make_kit(job(), cluster(), host=host, hosts=("a1", "a2"))
    made = files(kit)
    # GPU 0 has the fifth of the bus ids in their order, and so on
    assert "export CUDA_VISIBLE_DEVICES=4,0,1,2,3,6,7,5" in made["launch.sh"]
    assert made["rankfile"].splitlines()[9] == "rank 9=a2 slot=4-7"
    assert table(made["ranks.tsv"])[8]["pci_bus_id"] == "0000:9b:00.0"
    assert made["hostfile"] == "a1 slots=8\na2 slots=8\n"


def played(folder: Path, made: dict[str, str], **variables: str) -> list[str]:
    """What launch.sh starts on one node: a line for each process, from doubles of torchrun and python."""
    for name, text in made.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    doubles = folder / "bin"
    doubles.mkdir()
    for name in ("torchrun", "python"):
        double = doubles / name
        double.write_text(f'#!/bin/bash\necho "{name} $RANK $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $*" >> "$LOG"\n')
        double.chmod(0o755)
    log = folder / "log"
    environment = {"PATH": f"{doubles}:{os.environ['PATH']}", "LOG": str(log), "TRAIN": "train.py", **variables}
    subprocess.run(["bash", str(folder / "launch.sh"), "--lr", "1e-4"], env=environment, check=True, timeout=60)  # noqa: S607
    return sorted(log.read_text().splitlines())


def test_launch_starts_torchrun(tmp_path: Path) -> None:
    (line,) = played(tmp_path, files(make_kit(job(), cluster())), NODE_RANK="1", MASTER_ADDR="h")
    assert line == (
        "torchrun  0,1,2,3,4,5,6,7 PCI_BUS_ID --nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr h "
        "--master_port 29500 train.py --lr 1e-4"
    )


def test_a_host_finds_its_place_in_the_hostfile(tmp_path: Path) -> None:
    made = files(make_kit(job(), cluster(), hosts=("x1-a", "x1")))
    (line,) = played(tmp_path, made, SLURMD_NODENAME="x1")
    assert "--node_rank 1 --master_addr x1-a" in line


def test_orders_of_gpus_by_node(tmp_path: Path) -> None:
    swapped = cluster().with_rank_mapping([*range(8), *(8 + gpu for gpu in (1, 0, 3, 2, 5, 4, 7, 6))])
    (line,) = played(tmp_path, files(make_kit(job(), swapped)), NODE_RANK="1", MASTER_ADDR="h")
    assert line.startswith("torchrun  1,0,3,2,5,4,7,6 ")


def test_ranks_in_no_blocks_start_one_by_one(tmp_path: Path) -> None:
    kit = make_kit(job(), cluster().with_rank_mapping([8 * (rank % 2) + rank // 2 for rank in range(16)]))
    assert not kit.in_blocks
    lines = played(tmp_path, files(kit), NODE_RANK="1", MASTER_ADDR="h")
    started = sorted((int(words[1]), int(words[2])) for words in (line.split() for line in lines))
    assert started == [(2 * gpu + 1, gpu) for gpu in range(8)]


def test_the_job_s_files_are_whole() -> None:
    made = files(make_kit(job(), cluster(), hosts=("a", "b")))
    for script in ("launch.sh", "env.sh", "job.slurm"):
        subprocess.run(["bash", "-n"], input=made[script], text=True, check=True)  # noqa: S607
    assert "#SBATCH --nodes=2" in made["job.slurm"]
    assert "#SBATCH --nodelist=a,b" in made["job.slurm"]
    service, indexed = yaml.safe_load_all(made["kubernetes.yaml"])
    assert service["kind"] == "Service"
    assert indexed["spec"]["completions"] == 2
    (container,) = indexed["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (("a",), "1 host for 2 nodes"),
        (("a", "a"), "a appears twice"),
        (("a", "b;rm"), "is not a host's name"),
    ],
)
def test_faults(hosts: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_kit(job(), cluster(), hosts=hosts)


def test_a_kit_s_own_table_is_a_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", str(PLANS / "llama3-70b.toml"), "--nodes", "2", "--to", "launch-kit"]
    assert main(["export", *flags, "-o", str(tmp_path / "a")]) == ExitCode.OK
    table_file = tmp_path / "ranks.tsv"
    rows = (tmp_path / "a" / "ranks.tsv").read_text().splitlines()
    swapped = [
        rows[0],
        *(row.replace("\t0\tnode0", "\t9\tnode0").replace("\t1\tnode1", "\t0\tnode1") for row in rows[1:]),
    ]
    table_file.write_text("\n".join(row.replace("\t9\tnode0", "\t1\tnode0") for row in swapped))
    assert main(["export", *flags, "--placement", str(table_file), "-o", str(tmp_path / "b")]) == ExitCode.OK
    placed = table((tmp_path / "b" / "ranks.tsv").read_text())
    assert [row["host"] for row in placed] == ["node1"] * 8 + ["node0"] * 8
    table_file.write_text("rank\tnode\tgpu\n0\t0\tx\n1\t0\t0\n1\t0\t1\n")
    capsys.readouterr()
    assert main(["export", *flags, "--placement", str(table_file), "-o", str(tmp_path / "c")]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    for words in (":2: gpu: 'x' is not a whole number", ":4: rank 1 appears twice", "rank 2, 3, 4"):
        assert words in err


def test_the_best_plan_of_a_search_is_launched(tmp_path: Path) -> None:
    report = {
        "inputs": {"model": "llama3-8b", "cluster": "dgx-a100-80-8", "seq_len": 4096},
        "counts": {},
        "plans": [
            {"rank": 1, "num_devices": 16, "plan": {"dp_shard": 16, "zero": 3, "micro_batch_size": 2}},
            {"rank": 2, "num_devices": 8, "plan": {"dp_shard": 4, "tp": 2, "zero": 3, "micro_batch_size": 2}},
        ],
    }
    file = tmp_path / "best.json"
    file.write_text(json.dumps(report))
    out = tmp_path / "kit"
    assert main(["export", "--plan", str(file), "--to", "launch-kit", "-o", str(out)]) == ExitCode.OK
    assert len((out / "hostfile").read_text().splitlines()) == 2
    assert 'cluster = "dgx-a100-80-8"' in (out / "plan" / "study.toml").read_text()
    second = tmp_path / "second.toml"
    assert main(["export", "--plan", str(file), "--define", "rank=2", "--to", "toml", "-o", str(second)]) == ExitCode.OK
    assert "tp = 2" in second.read_text()
    assert "seq_len = 4096" in second.read_text()
    assert main(["export", "--plan", str(file), "--define", "rank=3", "--to", "toml"]) == ExitCode.BAD_INPUT


def test_the_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kit"
    flags = ["--plan", str(PLANS / "llama3-70b.toml"), "--nodes", "2", "--to", "launch-kit", "-o", str(folder)]
    assert main(["export", *flags, "--hosts", "n[1-2]"]) == ExitCode.OK
    written = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert {"launch.sh", "hostfile", "ranks.tsv", "transfers.tsv", "plan/torchtitan.toml", "plan/study.toml"} <= written
    assert (folder / "hostfile").read_text() == "n1 slots=8\nn2 slots=8\n"
    assert "torchtitan.train --job.config_file plan/torchtitan.toml" in (folder / "launch.sh").read_text()
    assert "not expressible for deepspeed" in (folder / "README.md").read_text()
    assert "all-gather" in (folder / "transfers.tsv").read_text()
    capsys.readouterr()
    assert main(["export", *flags]) == ExitCode.BAD_INPUT
    assert "is not empty (a new folder)" in capsys.readouterr().err
    assert main(["export", "--to", "launch-kit"]) == ExitCode.USAGE
    assert main(["export", "--to", "toml", "--hosts", "a"]) == ExitCode.USAGE
    other = ["--to", "launch-kit", "-o", str(tmp_path / "b"), "--topology", "hgx-h100-8"]
    assert main(["export", *other]) == ExitCode.BAD_INPUT
    assert "describes no single host" in capsys.readouterr().err
