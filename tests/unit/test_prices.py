"""Prices come from a file of the user's own; what is missing or zero is an error."""

from pathlib import Path

import pytest

from simulator.base.errors import InputError
from simulator.spec.cluster import Cluster
from simulator.spec.prices import Prices, cost

FILE = """
currency = "USD"
[[price]]
device = "{device}"
kind = "on-demand"
per_gpu_hour = 3.0
date = "2026-11-01"
source = "a provider's page"
[[price]]
cluster = "hgx-h100-8"
kind = "purchase"
price_per_gpu = 35064.0
years = 4.0
power_w = 1000.0
power_per_kwh = 0.1
pue = 1.5
utilization = 0.5
date = "2026-11-01"
source = "an offer"
"""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.load("hgx-h100-8", 1)


def _prices(folder: Path, text: str) -> Prices:
    path = folder / "prices.toml"
    path.write_text(text, encoding="utf-8")
    return Prices.load(path)


def test_a_purchase_is_paid_off_and_draws_power(tmp_path: Path, cluster: Cluster) -> None:
    prices = _prices(tmp_path, FILE.format(device=cluster.device.name))
    own, device = prices.of(cluster)
    # 35,064 over 4 years of 8,766 hours, half of them used, is 2 an hour; 1 kW at 0.1 and a PUE of 1.5 is 0.15
    assert own.gpu_hour == pytest.approx(2.15)
    assert device.gpu_hour == 3.0
    assert cost(device, 8, 1800) == pytest.approx(12.0)
    assert prices.of(cluster, "on-demand") == (device,)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("per_gpu_hour = 3.0", "per_gpu_hour = 0.0", "greater than 0"),
        ("per_gpu_hour = 3.0", "", "on-demand needs per_gpu_hour"),
        ("years = 4.0", "", "a purchase needs years"),
        ('date = "2026-11-01"', 'date = "soon"', "is not a date"),
        ('source = "an offer"', "", "is missing"),
        ('currency = "USD"', "", "is missing"),
        ('cluster = "hgx-h100-8"', "", "cluster or device"),
    ],
)
def test_what_is_missing_or_zero_is_told(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        _prices(tmp_path, FILE.format(device="h100").replace(old, new, 1))


def test_a_cluster_without_a_price_is_told(tmp_path: Path) -> None:
    prices = _prices(tmp_path, FILE.format(device="x"))
    with pytest.raises(InputError, match="no price of dgx-a100-80-8"):
        prices.of(Cluster.load("dgx-a100-80-8", 1))
    with pytest.raises(InputError, match="no reserved price"):
        prices.of(Cluster.load("hgx-h100-8", 1), "reserved")


def test_a_bad_price_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as told:
        _prices(tmp_path, FILE.format(device="h100").replace("per_gpu_hour = 3.0", "per_gpu_hour = 0.0"))
    assert len(told.value.faults) == 1
    with pytest.raises(InputError, match=r"there is no \[\[price\]\]"):
        _prices(tmp_path, 'currency = "USD"\nprice = []\n')


def test_one_kind_of_price_alone(tmp_path: Path, cluster: Cluster) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(FILE.format(device=cluster.device.name), encoding="utf-8")
    assert [price.kind for price in Prices.load(path, "on-demand").of(cluster)] == ["on-demand"]
    with pytest.raises(InputError, match="--price-kind spot"):
        Prices.load(path, "spot")


def test_of_very_many_faults_the_first_are_told_and_the_others_counted(tmp_path: Path) -> None:
    """A table of two million faults took 30 s of the processor to say them all, and nobody reads them."""
    file = tmp_path / "prices.toml"
    file.write_text("[[price]]\n" * 3000)
    with pytest.raises(InputError) as caught:
        Prices.load(file)
    *told, last = caught.value.faults
    every = 3 * 3000 + 1  # kind, date and source of each, and the currency
    assert len(told) == 1000
    assert f"{every - 1000:,} more faults" in last.problem
