"""A Kubernetes manifest: a deployment a pool, a replica an engine, a service before each, and a config map of options files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.formats.writers.serving_launch.launcher import Launcher, Pool
from simulator.spec.model import Model

_PORT: Final = 8000
_FOLDER: Final = "/launch"
_READY_S: Final = 30 * 60  # that loading a checkpoint may take


def manifest(launcher: Launcher, pools: tuple[Pool, ...], model: Model, files: Mapping[str, str]) -> str:
    """The text of several documents."""
    import yaml

    name = _label(model.name)
    documents = [part for pool in pools for part in (_deployment(launcher, pool, name, files), _service(pool, name))]
    if files:
        documents.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(files)})
    notes = "".join(f"# {note}\n" for pool in pools for note in launcher.notes(pool))
    head = f"# Fill in the image's tag and MODEL: the checkpoint of {model.name}, a name or a folder.\n"
    return head + notes + str(yaml.safe_dump_all(documents, sort_keys=False, width=120))


def _label(text: str) -> str:
    """A name that Kubernetes takes."""
    found = "".join(char if char.isascii() and char.isalnum() else "-" for char in text.casefold()).strip("-")
    return found[:40] or "model"


def _deployment(launcher: Launcher, pool: Pool, name: str, files: Mapping[str, str]) -> dict[str, Any]:
    label = {"app": f"{name}-{pool.name}"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": label["app"]},
        "spec": {
            "replicas": pool.plan.dp,
            "selector": {"matchLabels": dict(label)},
            "template": {"metadata": {"labels": label}, "spec": _pod(launcher, pool, name, files)},
        },
    }


_TRIES: Final = {"periodSeconds": 10, "failureThreshold": _READY_S // 10}


def _pod(launcher: Launcher, pool: Pool, name: str, files: Mapping[str, str]) -> dict[str, Any]:
    command = ["$(MODEL)" if word == "$MODEL" else word for word in launcher.command(pool, _PORT)]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108  where NCCL and the engine's processes meet
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if files:
        mounts.append({"name": "launch", "mountPath": _FOLDER})
        volumes.append({"name": "launch", "configMap": {"name": name}})
    container = {
        "name": "engine",
        "image": f"{launcher.image}:TAG",
        "command": command,
        "env": [{"name": "MODEL", "value": ""}],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": pool.plan.engine_devices}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}, **_TRIES},
        "volumeMounts": mounts,
    }
    if files:
        container["workingDir"] = _FOLDER
    return {"containers": [container], "volumes": volumes}


def _service(pool: Pool, name: str) -> dict[str, Any]:
    label = f"{name}-{pool.name}"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": label},
        "spec": {"selector": {"app": label}, "ports": [{"port": _PORT, "targetPort": _PORT}]},
    }
