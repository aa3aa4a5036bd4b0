"""What the driver says of GPUs, told by a stand-in for nvidia-smi: whose they are, who works on them, how they were clocked."""

from __future__ import annotations

from pathlib import Path

import pytest

from validate import gpus
from validate.gpus import Gpu, busy, facts_of, own_gpus, summary
from validate.machine import allocator_settings, nics, running_jobs, settings

FOUR = "".join(f"{index}, GPU-{index}aa\n" for index in range(4))
IDLE = "".join(f"GPU-{index}aa, 3, Disabled\n" for index in range(4))


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, *, apps: str = "", memory: str = IDLE) -> None:
    """An nvidia-smi that knows four GPUs."""
    answers = {
        "index,uuid": FOUR,
        "gpu_uuid,pid,process_name,used_gpu_memory": apps,
        "uuid,memory.used,display_active": memory,
    }
    answers["gpu_uuid,process_name"] = "".join(
        f"{line.split(', ')[0]}, {line.split(', ')[2]}\n" for line in apps.splitlines()
    )
    cases = "".join(f"*\"={fields} --format\"*) printf '{text}' ;;\n" for fields, text in answers.items())
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1 ;;\nesac\n'.replace("\n' ;;", "\\n' ;;"), encoding="utf-8"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("visible", "found"),
    [("2,0", [2, 0]), ("GPU-3a", [3]), ("", []), ("1,9,2", [1]), ("MIG-x", [-1])],
)
def test_only_visible_gpus_are_ones_own(
    visible: str, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch)
    assert [gpu.index for gpu in own_gpus({})] == [0, 1, 2, 3]
    assert [gpu.index for gpu in own_gpus({"CUDA_VISIBLE_DEVICES": visible})] == found


def test_a_job_on_a_gpu_that_is_not_measured_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, apps="GPU-2aa, 77, python, 900\n")
    assert [fault.place for fault in running_jobs(4)] == ["GPU 2"]
    assert running_jobs(2) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    assert running_jobs(1) == []
    assert "process 77 (python) holds 900 MiB" in str(running_jobs(2)[0])


def test_a_rank_of_a_launcher_looks_at_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, apps="GPU-2aa, 77, python, 900\n")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    assert running_jobs() == []  # a sibling's GPU may be busy with the sibling
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert len(running_jobs()) == 1


def test_mps_and_a_display_are_nobodys_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = "GPU-0aa, 5, nvidia-cuda-mps-server, 30\nGPU-1aa, 6, /usr/lib/xorg/Xorg, 900\n"
    memory = "GPU-0aa, 700, Disabled\nGPU-1aa, 990, Disabled\nGPU-2aa, 2000, Enabled\nGPU-3aa, 2000, Disabled\n"
    driver(tmp_path, monkeypatch, apps=apps, memory=memory)
    assert [fault.place for fault in busy(own_gpus())] == ["GPU 3"]  # memory that nothing explains is somebody's


def test_where_no_driver_answers_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (own_gpus(), running_jobs(8), facts_of(None)) == ([], [], {})
    log = gpus.ClockLog(Gpu(0, "GPU-0aa"))
    assert log.taken() == {}
    log.close()


def test_clocks_of_a_phase_are_those_under_load() -> None:
    rows = [
        ["1980", "2619", "650.1", "60", "0x0000000000000000"],
        ["1410", "2619", "700.0", "71", "0x0000000000000004"],
    ]
    rows += [["1400", "2619", "[N/A]", "70", "0x0000000000000044"], ["cut"]]
    told = summary(rows)
    assert (told["sm_clock_mhz"], told["lowest_sm_clock_mhz"], told["readings"]) == (1410, 1400, 3)
    assert (told["power_w"], told["temperature_c"]) == (pytest.approx(675.05), 71)
    assert told["throttled_by"] == "power cap, hardware thermal"
    assert summary([]) == {}


def test_settings_and_cards_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "NCCL_ALGO": "Ring",
        "PYTORCH_ALLOC_CONF": "a:1",
        "HOME": "/x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert sorted(settings(told)) == ["NCCL_ALGO", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_BLOCKING_WAIT"]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "old:1")
    assert allocator_settings() == "old:1"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "new:1")
    assert allocator_settings() == "new:1"
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)"), ("state", "4: ACTIVE")):
        (port / name).write_text(f"{text}\n", encoding="utf-8")
    (tmp_path / "infiniband/mlx5_0/fw_ver").write_text("28.39\n", encoding="utf-8")
    assert nics(tmp_path) == ["mlx5_0 port 1: InfiniBand, 400 Gb/sec (4X NDR), ACTIVE, firmware 28.39"]
