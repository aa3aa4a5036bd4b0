"""What the recipes about purchases share: the quickest plan of a machine, study files, and one column of a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from simulator.base.errors import InputError
from simulator.formats.writers.plans.study_toml import study_toml
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.search import Processes, Row, SearchStudy, Serial, Space, search

# Wide enough for one node and for hundreds, narrow enough for minutes: the whole space is `shardwise search` without --fix
SPACE: dict[str, tuple[object, ...]] = {
    "data_parallel": ("fsdp2",),
    "zero": (3,),
    "cp": (1,),
    "pp": (1,),
    "tp": (1, 2, 4, 8),
    "recompute": ("none", "full"),
}


def quickest(
    model: Model,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    fixed: dict[str, tuple[object, ...]] = SPACE,
    jobs: int | None = None,
) -> Row | None:
    """The quickest plan that fits; None where none does, or none is legal, which is told."""
    tps = tuple(one for one in fixed.get("tp", (1,)) if isinstance(one, int) and cluster.num_devices % one == 0)
    space = Space(
        model=model, clusters=(cluster,), global_batch=global_batch, seq_len=seq_len, fixed=fixed | {"tp": tps}
    )
    study = SearchStudy(space=space, top=1)
    jobs = jobs or len(os.sched_getaffinity(0))
    try:
        with Processes(study, jobs) if jobs > 1 else Serial(study) as engine:
            rows = search(study, engine).rows
    except InputError as exc:
        print(f"{cluster.num_nodes} nodes: {exc.faults[0]}")
        return None
    return rows[0] if rows else None


def write_study(path: Path, model: str, cluster: str, row: Row) -> None:
    """The plan as a study file that every verb reads."""
    path.write_text(study_toml(row.plan, {"model": model, "cluster": cluster, "nodes": row.nodes}), encoding="utf-8")


def picture(path: Path, draw: Callable[..., None]) -> None:
    """A picture whose bytes depend on its content alone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "shardwise", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    print(f"picture: {path}")


def bars(low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Reaches below and above, as error bars take them."""
    return [
        [m - a for a, m in zip(low, middle, strict=True)],
        [b - m for m, b in zip(middle, high, strict=True)],
    ]
