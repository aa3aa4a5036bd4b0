"""The search on a real dask cluster of this machine, one of whose workers is killed under way."""

import math
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from simulator.base.errors import InputError
from simulator.cli.search import _warn_of_open
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.search import Dask, Progress, SearchStudy, Serial, Space, search
from simulator.studies.search.space import Pruned

pytest.importorskip("distributed", reason="dask.distributed is an extra: pip install 'shardwise[distributed]'")

pytestmark = pytest.mark.filterwarnings("default")  # a killed worker leaves sockets behind

MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, num_kv_heads=4, d_ff=2816, vocab_size=8192)


def _study() -> SearchStudy:
    fixed = {"recompute": ("none", "full"), "cp": (1,), "pp": (1, 2), "tp": (1, 2), "micro_batch_size": (1, 2)}
    clusters = (Cluster.load("hgx-h100-8", 1),)
    return SearchStudy(space=Space(model=MODEL, clusters=clusters, global_batch=16, seq_len=512, fixed=fixed), top=5)


def test_a_killed_worker_changes_nothing() -> None:
    from distributed import LocalCluster

    study = _study()
    with Serial(study) as engine:
        alone = search(study, engine).as_json()
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        killed: list[int] = []

        def kill(progress: Progress) -> None:
            if progress.phase == "simulation" and not killed:
                victim = next(iter(cluster.workers.values()))
                killed.append(victim.process.pid)
                os.kill(victim.process.pid, signal.SIGKILL)

        with Dask(study, cluster.scheduler_address) as engine:
            assert search(study, engine, on_progress=kill).as_json() == alone
    assert killed


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "tls://127.0.0.1:9", "nonsense://x", "127.0.0.1:notaport"])
def test_a_scheduler_that_is_not_there_is_told(address: str) -> None:
    with pytest.raises(InputError, match="--scheduler"):
        Dask(_study(), address)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make certificates")
def test_certificates_of_dasks_configuration_are_used(tmp_path: Path) -> None:
    from dask import config
    from distributed import LocalCluster, Security

    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x -keyout {key} -out {certificate}"
    subprocess.run(made.split(), check=True, capture_output=True)
    ends = {
        f"distributed.comm.tls.{end}.{what}": file
        for end in ("scheduler", "worker", "client")
        for what, file in (("cert", certificate), ("key", key))
    }
    tls = {"distributed.comm.tls.ca-file": certificate, "distributed.comm.require-encryption": True} | ends
    study = _study()
    with config.set(tls):
        running = LocalCluster(
            n_workers=1, processes=False, protocol="tls://", security=Security(), dashboard_address=None
        )
        with running as cluster, Dask(study, cluster.scheduler_address) as engine:
            branch = next(study.space.branches(Pruned()))
            assert cluster.scheduler_address.startswith("tls://")
            assert engine.survey([branch], math.inf).result().num_legal


@pytest.mark.parametrize(
    "address", ["10.0.0.1:8786", "tcp://head:8786", "tls://head:1", "tcp://127.0.0.1:9", "localhost:9", "tcp://[::1]:9"]
)
def test_what_is_open_to_others_is_said(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_open(address)
    warned = "can run code on its workers" in capsys.readouterr().err
    assert warned == (address in ("10.0.0.1:8786", "tcp://head:8786"))


def test_a_scheduler_that_is_lost_is_told() -> None:
    from distributed import LocalCluster

    study, cluster = _study(), LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)

    def close(progress: Progress) -> None:
        if progress.phase == "simulation":
            cluster.close(timeout=10)

    with cluster, Dask(study, cluster.scheduler_address) as engine, pytest.raises(InputError, match="--journal"):
        search(study, engine, on_progress=close)


def test_workers_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outcomes would be others, and stand in the journal of this one."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        monkeypatch.setattr("simulator.studies.search.engines.software_version", lambda: "0.0.9")
        with pytest.raises(InputError, match=r"and this is 0\.0\.9"):
            Dask(_study(), cluster.scheduler_address)


def test_a_scheduler_without_workers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Client, LocalCluster

    wait = Client.wait_for_workers
    monkeypatch.setattr(Client, "wait_for_workers", lambda self, n, timeout: wait(self, n, timeout=timeout / 20))
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, pytest.raises(InputError, match="has no worker"):
        Dask(_study(), cluster.scheduler_address)


def test_a_worker_that_is_lost_while_it_is_asked_for_its_version_is_another_s_work() -> None:
    from simulator.studies.search.engines import _versions

    class Client:
        """Answers as distributed does with on_error="return": all lost first, then one of two."""

        answers = [{"a": OSError("closed")}, {"b": OSError("closed"), "c": "1.0"}]

        def wait_for_workers(self, number: int, timeout: int) -> None:
            assert (number, timeout) == (1, 10)

        def run(self, *_: object, on_error: str) -> dict[str, object]:
            assert on_error == "return"
            return dict(self.answers.pop(0))

    client = Client()
    assert _versions(client) == {"1.0"}
    assert client.answers == []
    client.answers = [{"a": ImportError("no shardwise")}]
    with pytest.raises(ImportError):
        _versions(client)
