"""This machine's own description of itself: what `nvidia-smi` prints here."""

from __future__ import annotations

import shutil
import subprocess
from typing import Final

from simulator.base.errors import ClusterError
from simulator.formats.readers.nvidia_smi import read_matrix
from simulator.spec.cluster.host import Host

HERE: Final = "here"
_PATIENCE_S: Final = 60


def read_here() -> Host:
    """The host that this process runs on. Raises ClusterError where no NVIDIA driver answers."""
    if shutil.which("nvidia-smi") is None:
        problem = "this machine has no nvidia-smi, so no NVIDIA GPU that could be asked"
        raise ClusterError.at(HERE, problem, "a saved matrix or NCCL's XML, on any machine")
    return read_matrix(_answer("topo", "-m"), HERE)


def _answer(*arguments: str) -> str:
    command = ("nvidia-smi", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)  # noqa: S603  fixed words
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ClusterError.at(" ".join(command), f"does not answer: {exc}") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        message = (done.stderr.decode("utf-8", "replace") or text).strip()[:200]
        raise ClusterError.at(" ".join(command), f"ends with code {done.returncode}: {message}")
    return text
