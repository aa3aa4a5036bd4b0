import csv
from pathlib import Path

import pytest

from simulator.base.errors import ClusterError
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device, device_names

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"

GOOD = """
name = "x"
architecture = "hopper"
memory_bytes = "80GiB"
memory_bytes_per_s = "3TB/s"
num_sms = 132
power_w = 700
[peak_flop_per_s]
fp32 = "67TFLOP/s"
"""


@pytest.mark.parametrize("name", device_names())
def test_every_device_loads_and_says_where_each_number_stands(name: str) -> None:
    device = Device.load(name)
    assert device.name == name
    numbers = {"memory_bytes", "memory_bytes_per_s", "peak_flop_per_s", "num_sms", "power_w"}
    if device.cuda_memory_bytes is not None:
        numbers |= {"cuda_memory_bytes"}
    assert numbers <= set(device.sources)
    assert all(device.sources.values())


def test_data_sheet_numbers() -> None:
    """NVIDIA's H100 SXM5 table (dense): 989 TFLOP/s bf16, 3.35 TB/s, 132 SMs; 81,559 MiB in nvidia-smi."""
    h100 = Device.load("h100-sxm5-80gb")
    assert h100.peak("bf16") == 989e12
    assert h100.peak("fp8") == 2 * 989.5e12
    assert h100.memory_bytes == 81559 * 2**20
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.num_sms == 132
    assert Device.load("v100-sxm2-16gb").peak("bf16") == 0


@pytest.mark.parametrize("name", device_names())
def test_numbers_are_physical(name: str) -> None:
    device = Device.load(name)
    assert device.usable_bytes <= device.memory_bytes
    assert device.peak("fp8") >= device.peak("bf16") or device.peak("fp8") == 0
    assert device.peak("bf16") >= device.peak("tf32")


def test_no_two_devices_share_a_spelling() -> None:
    owners: dict[str, str] = {}
    for name in device_names():
        for alias in (name, *Device.load(name).aliases):
            assert Device.resolve(alias) == name
            assert owners.setdefault(alias.casefold(), name) == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("a100_sxm4_40gb", "a100-sxm4-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("H100-96GB-HBM2e-SXM(500W)", "h100-96gb-500w"),
        ("H100 80GB HBM3 SXM5", "h100-sxm5-80gb"),
        ("8x A100 80GB", "a100-sxm4-80gb"),
        ("DGX A100 40GB", "a100-sxm4-40gb"),
        ("HGX H200 141GB", "h200-sxm"),
        ("B200-SXM-192GB", "b200-sxm"),
        ("RTX A6000 48GB", "a6000"),
        ("H20 141GB", "h20-141gb"),
        ("AMD MI250X", "mi250x-gcd"),
        ("a100-40", "a100-sxm4-40gb"),
        ("V100-32", "v100-sxm2-32gb"),
        ("a100-pcie-80", "a100-pcie-80gb"),
    ],
)
def test_usual_spellings(spelling: str, name: str) -> None:
    assert Device.resolve(spelling) == name


@pytest.mark.parametrize("spelling", ["H100 64GB", "H100 SXM (500W)", "MI455X", "GPU", "A100-SXM-64GB", "a100-64"])
def test_another_memory_or_power_is_another_board(spelling: str) -> None:
    with pytest.raises(ClusterError):
        Device.resolve(spelling)


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_usual_machine(name: str) -> None:
    assert Cluster.synthesise(name, 8).num_devices == 8


def test_every_gpu_of_the_runs_table_is_known() -> None:
    table = SHARED / "runs.csv"
    if not table.exists():
        pytest.skip("the reference tables are not beside this checkout")
    with table.open(newline="", encoding="utf-8") as file:
        names = {row["gpu"] for row in csv.DictReader(file)}
    for name in names:
        assert Device.load(name)


def test_an_unknown_device_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(ClusterError) as caught:
        Device.load("h100-smx5-80gb")
    assert "h100-sxm5-80gb" in caught.value.faults[0].remedy


def test_a_bad_file_lists_every_fault(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    bad = GOOD.replace('"80GiB"', "80").replace("132", "0").replace('"67TFLOP/s"', '"67TB/s"') + 'colour = "red"\n'
    file.write_text(bad, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        Device.load(str(file))
    places = {fault.place.removeprefix(f"{file}: ") for fault in caught.value.faults}
    assert places == {"memory_bytes", "num_sms", "peak_flop_per_s.fp32", "peak_flop_per_s.colour"}


def test_a_good_file_loads_by_path(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(GOOD, encoding="utf-8")
    device = Device.load(str(file))
    assert device.usable_bytes == device.memory_bytes == 80 * 2**30
