"""The files of a launch kit, from a study: what the command line adds to the writer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from simulator.base.errors import ClusterError, InputError
from simulator.formats.exchange import FORMATS, Job, export_plan
from simulator.formats.readers.hostlist import expand
from simulator.formats.readers.placement import read_placement
from simulator.formats.readers.topology_source import read_source
from simulator.formats.study import Study
from simulator.formats.writers.launch_kit import launch_kit, make_kit, ranks_table
from simulator.parallel.legality import check_split
from simulator.predict.transfers import transfer_schedule
from simulator.spec.cluster.host import Host


def kit_files(
    study: Study, job: Job, head: dict[str, str | int], hosts: str | None, host: Host | None
) -> dict[str, str]:
    """Name -> text. Raises InputError with every fault of hosts, topology and plan."""
    names = expand(hosts, "--hosts") if hosts is not None else ()
    check_split(job.plan, job.model, study.cluster)
    kit = make_kit(job, study.cluster, hosts=names, host=host)
    if study.cluster.seats:
        head = {**head, "placement": "../ranks.tsv"}
    formats: dict[str, str] = {}
    refused: dict[str, list[str]] = {}
    for form in FORMATS:
        try:
            formats[form] = export_plan(job, form, head).text
        except InputError as exc:
            refused[form] = [str(fault) for fault in exc.faults]
    schedule = transfer_schedule(job.model, job.plan, study.cluster, study.calibration, study.stack)
    return launch_kit(kit, formats, refused, schedule)


def check_kit(study: Study, job: Job, hosts: str | None, host: Host | None, folder: Path | None) -> None:
    """Raise InputError with every fault that a kit would have, before hours are spent on what goes into it."""
    check_split(job.plan, job.model, study.cluster)
    make_kit(job, study.cluster, hosts=expand(hosts, "--hosts") if hosts is not None else (), host=host)
    check_folder(folder)


def check_folder(folder: Path | None) -> None:
    """Raise InputError where a kit cannot be written for what is there already, or for who may write there."""
    if folder is None:
        return
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    problem = ""
    if not above.is_dir():
        problem = f"{above} is not a folder"
    elif folder.exists() and any(folder.iterdir()):
        problem = "is not empty"
    elif not os.access(above, os.W_OK | os.X_OK):
        problem = f"{above} cannot be written"
    if problem:
        raise InputError.at(str(folder), problem, "a new folder where you may write")


def table_of(study: Study, job: Job, host: Host | None) -> str:
    """The placement's table alone."""
    return ranks_table(make_kit(job, study.cluster, host=host))


def placed(study: Study, topology: str | None, placement: Path | None) -> tuple[Host | None, Study]:
    """The node that --topology describes, and the study with its ranks where --placement says."""
    host = host_of(topology)
    if placement is None:
        return host, study
    seats = read_placement(placement, study.cluster, host)
    return host, replace(study, cluster=study.cluster.with_rank_mapping(seats))


def host_of(source: str | None) -> Host | None:
    """The node that --topology describes, if any. Raises ClusterError where it describes something else."""
    if source is None:
        return None
    found = read_source(source)
    if not isinstance(found, Host):
        remedy = "an NCCL topology XML, or what `nvidia-smi topo -m` printed"
        raise ClusterError.at(f"--topology {source}", "describes no single host with its GPUs", remedy)
    return found
