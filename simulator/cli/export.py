"""`shardwise export`: a plan in another framework's words, read back and compared before it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole
from simulator.cli.options import input_options, placement_option, print_status, set_option, write_files
from simulator.cli.predict import plan_file_options, plan_options, study_of
from simulator.formats.exchange import FORMATS, Export, Job, export_plan
from simulator.formats.study import Study
from simulator.formats.study.loading import calibration_named
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.spec.software.stack import Stack

KIT, CHAKRA = "launch-kit", "chakra"
MOST_TRACES = 4096  # files that --all-ranks may write
MOST_NODES = 2_000_000  # of a trace: a minute or two, and a gigabyte
_HELP = """Write a plan as Megatron-LM's arguments, DeepSpeed's JSON, accelerate's YAML, torchtitan's TOML, or our study file.

The plan is a study's, --plan's and the flags', as for predict. What is written is read back to the same plan; fields
that the framework cannot run are reported together, with what it would run instead. Fields that it keeps in the training
script are named on stderr. `--to launch-kit -o DIR` writes all that starts the plan: scripts, host and rank files, SLURM,
Kubernetes, environment, and the plan in every format that can express it. `--to chakra -o DIR` writes the predicted step as
Chakra execution traces, a file a class of equal ranks.

Exit codes: 0 written, 2 usage, 3 bad input, or not expressible."""


@click.command("export", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@click.option("--to", "form", required=True, metavar="|".join((*FORMATS, KIT, CHAKRA)), help="The format to write.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE|DIR", help="[stdout]")
@click.option("--hosts", metavar="HOSTLIST", help="launch-kit: the nodes' names, as node[1-8].")
@click.option("--topology", metavar="SOURCE", help="launch-kit: one node, as for `shardwise topo`: bus ids, cards, cores.")  # fmt: skip
@placement_option
@plan_file_options
@input_options
@plan_options
@set_option("As for predict. May be repeated.")
@click.option("--all-ranks", is_flag=True, help="chakra: a file of every rank, as ASTRA-sim wants them.")
@click.option("--json", "as_json", is_flag=True, help="The text and what stands beside it, as JSON.")
def command(  # noqa: PLR0913  one an option
    study: Path | None,
    *,
    form: str,
    out: Path | None,
    hosts: str | None,
    topology: str | None,
    placement: str | None,
    settings: tuple[str, ...],
    all_ranks: bool,
    as_json: bool,
    **flags: Any,  # noqa: ANN401  text of Plan's fields, and a plan's file
) -> int:
    """Export a plan in another framework's format and check it by reading it back."""
    loaded = study_of(study, flags, settings)
    if form != CHAKRA and all_ranks:
        raise click.UsageError("--all-ranks is of --to chakra")
    if form == CHAKRA:
        if out is None or as_json:
            raise click.UsageError("traces are a folder: -o DIR, without --json")
        write_files(_chakra_files(loaded, all_ranks=all_ranks), out, "Chakra trace")
        return ExitCode.OK
    if form == KIT:
        if out is None or as_json:
            raise click.UsageError("a launch kit is a folder: -o DIR, without --json")
        return _write_kit(loaded, out, hosts, topology, Path(placement) if placement is not None else None)
    if hosts is not None or topology is not None or placement is not None:
        raise click.UsageError("--hosts, --topology and --placement are the launch kit's: --to launch-kit")
    head = head_of(loaded)
    written = export_plan(job_of(loaded), form, head)
    _tell_what_is_apart(loaded, written, head)
    text = json.dumps(_report(written), indent=2, ensure_ascii=False) + "\n" if as_json else written.text
    if out is None:
        click.echo(text, nl=False)
    else:
        write_whole(out, text, "-o")
        print_status(f"written to {out}")
    return ExitCode.OK


def _tell_what_is_apart(study: Study, written: Export, head: Mapping[str, object]) -> None:
    given = {"model": study.model, "cluster": study.cluster, "calibration": study.calibration}
    lost = [name for name, one in (given | {"[checkpoint]": study.checkpoint}).items() if one and name not in head]
    lost += ["stack"] if study.stack not in (None, Stack.of(study.plan)) else []
    if lost and written.format == "toml":
        print_status(f"shardwise: not in the file, which has no name for it: {', '.join(lost)}")
    for name, value in written.beside.items():
        text = str(value).lower() if isinstance(value, bool) else value
        print_status(f"shardwise: not in the file, for the training script: {name} = {text}")
    if study.cluster.seats:
        print_status("shardwise: not in the file: the GPU of each rank; --to launch-kit writes it")


def job_of(study: Study) -> Job:
    """The parts of a study that a launch needs."""
    stack = study.stack or Stack.of(study.plan)
    return Job(plan=study.plan, model=study.model, stack=stack, gpus_per_node=study.cluster.gpus_per_node)


def _write_kit(study: Study, folder: Path, hosts: str | None, topology: str | None, placement: Path | None) -> int:
    """Every file of a launch kit, into a folder that is new or empty."""
    from simulator.cli.launch_kit import kit_files, placed

    host, study = placed(study, topology, placement)
    write_files(kit_files(study, job_of(study), head_of(study), hosts, host), folder)
    return ExitCode.OK


def _chakra_files(study: Study, *, all_ranks: bool) -> dict[str, bytes]:
    """The predicted step as execution traces."""
    from simulator.formats.writers.chakra import trace_files
    from simulator.play.engine import run
    from simulator.play.lower import lowered

    lowering = lowered(*study.parts)
    mesh = lowering.mesh
    faults = []
    if lowering.rank_classes is not None:
        problem = "its GPUs differ, and a trace has one class of ranks a stage"
        faults.append(Fault(f"cluster {study.cluster.name}", problem, "equal GPUs"))
    if all_ranks and mesh.num_ranks > MOST_TRACES:
        problem = f"would write {mesh.num_ranks:,} files"
        faults.append(Fault("--all-ranks", problem, f"at most {MOST_TRACES:,} ranks, or one a class"))
    count, few = study.plan.num_micro_batches, min(study.plan.num_micro_batches, 2 * study.plan.pp)
    nodes = sum(len(one.ops) for one in lowering.programs(few)) * count // few
    if nodes > MOST_NODES:
        problem = f"{count:,} micro-batches are some {nodes:,} nodes"
        faults.append(Fault("--to chakra", problem, f"at most {MOST_NODES:,}"))
    InputError.raise_for(faults)
    if nodes > MOST_NODES / 20:
        print_status(f"shardwise: writing some {nodes:,} nodes")
    programs = lowering.programs(count)
    timeline = run(programs)
    stages = [mesh.rank({"pp": stage}) for stage in range(study.plan.pp)]
    ranks = range(mesh.num_ranks) if all_ranks else stages
    inside = lowering.exchanges_inside(count)
    spans = {one.name: timeline.of(one.name) for one in programs}
    return trace_files(lowering.fabric, programs, inside, spans, ranks, study.model.name)


def head_of(study: Study) -> dict[str, str | int]:
    """Names for our own file, of what a reader finds by them: not of what a file gave or --set has changed."""
    found, whole = dict[str, str | int](), study.cluster.model_copy(update={"seats": ()})
    if study.model.name in preset_names() and Model.load(study.model.name) == study.model:
        found["model"] = study.model.name
    for name in (whole.name, f"{whole.num_devices}x{whole.device.name}"):  # of --gpus
        with suppress(InputError):
            found |= (
                {"cluster": name} if "cluster" not in found and Cluster.load(name, whole.num_nodes) == whole else {}
            )
    found["nodes"] = whole.num_nodes
    with suppress(InputError):
        name = study.calibration.name.partition(":")[0] if study.calibration is not None else ""  # datasheet:h100-sxm
        found |= {"calibration": name} if name and calibration_named(name, whole) == study.calibration else {}
    return found


def _report(written: Export) -> dict[str, Any]:
    return {"schema_version": 1, "format": written.format, "beside": dict(written.beside), "text": written.text}
