"""`shardwise capture`: what one step of somebody's own program does, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource
from typing_extensions import override

from simulator.base.schema import check_writable
from simulator.cli.finite import FiniteRange
from simulator.cli.options import FILE, all_of, cluster_option, needs_torch, print_status, print_text, tokens_option

if TYPE_CHECKING:
    from simulator.spec.cluster import Cluster

_HELP = """Capture one training step of a program: a script as one would give torchrun, module:function, or a config.json.

The program runs in a process of its own on this machine's CPU, on tensors without values that say they are on CUDA, as one
rank of as many as asked; it is your code and runs with your rights. Recorded is the step behind --warm-up steps, from one
optimizer step to the next; then the program is stopped. `shardwise predict --program FILE` predicts the file.

A config.json of Hugging Face's is trained by --recipe: transformers' own model, --micro-batch-size sequences of --seq-len.

Exit codes: 0 written, 2 usage, 3 bad input or a program that fails, 130 interrupted."""

_OF_RECIPES: Final = ("seq_len", "micro_batch_size", "images", "image_size", "freeze", "adapter")
_NEAR: Final = 0.85  # --warmup, but not --batch-size
_how = all_of(
    click.option("--ranks", type=click.IntRange(1), metavar="INTEGER", help="Of the job. [all GPUs of the cluster]"),
    cluster_option(default="hgx-h100-8", show_default=True),
    click.option("--nodes", type=click.IntRange(1), metavar="INTEGER", help="How many of the cluster's nodes."),
    click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which of them is captured."),
    click.option("--check", is_flag=True, help="Capture the last rank too, and compare its collectives."),
    click.option("--warm-up", type=click.IntRange(1, 1000), default=2, show_default=True, help="Steps before the recorded one."),
    tokens_option,
    click.option("--minutes", type=FiniteRange(0.01, 1440), default=10.0, show_default=True, help="Deadline."),
    click.option("--expert-imbalance", type=FiniteRange(1, 1e6), default=1.0, show_default=True, help="Tokens of the busiest expert over the mean, where a router's values decide."),
    click.option("--recipe", type=click.Choice(["fsdp2", "ddp", "zero3"]), help="How a config.json is trained."),
    click.option("--seq-len", type=click.IntRange(1), default=4096, show_default=True, help="With --recipe."),
    click.option("--micro-batch-size", type=click.IntRange(1), default=1, show_default=True, help="With --recipe."),
    click.option("--images", type=click.IntRange(0), metavar="INTEGER", help="With --recipe, of a sequence, where the config.json has a tower for them. [1]"),
    click.option("--image-size", type=click.IntRange(0), default=0, metavar="PIXELS", help="With --recipe, a side of one, of towers that take any size or cut images into tiles. [448]"),
    click.option("--freeze", multiple=True, metavar="PATTERN", help="With --recipe, parameters that are not trained: '*visual*'."),
    click.option("--adapter", default="", metavar="adapter_config.json", help="With --recipe, peft's LoRA: its pairs alone are trained."),
)  # fmt: skip


class _NearMissesRefused(click.Command):
    """A word before -- that is nearly one of the command's own flags is no argument of the program."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = [name for one in self.params if one.name not in _OF_RECIPES for name in one.opts]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known and get_close_matches(name, known, cutoff=_NEAR):
                raise click.NoSuchOption(name, f"No such option {name}; the program's own stand behind --.", ctx=ctx)
        return super().parse_args(ctx, args)


@click.command("capture", cls=_NearMissesRefused, help=_HELP, context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="SCRIPT.py|MODULE:FUNCTION|CONFIG.json")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@_how
@click.option("-o", "--out", type=FILE, required=True, metavar="OUT.capture.gz", help="The file to write.")
def command(target: str, arguments: tuple[str, ...], *, out: Path, **options: Any) -> int:  # noqa: ANN401
    """Capture a step, write it, and print a summary."""
    check_writable(out, "-o")
    from simulator.spec.cluster import Cluster
    from validate.capture.written import write_capture

    source = click.get_current_context().get_parameter_source
    given = [name for name in (*_OF_RECIPES, "nodes") if source(name) is not ParameterSource.DEFAULT]
    where = Cluster.load(options.pop("cluster"), options.pop("nodes"))
    tokens = options.pop("tokens_per_step")
    options["settings"] = {name: options.pop(name) for name in _OF_RECIPES}
    data = captured(target, arguments, where, given=given, **options)
    data |= {"tokens_per_step": tokens} if tokens else {}
    write_capture(out, data)
    _print_summary(out, data)
    return 0


def _print_summary(out: Path, data: Mapping[str, Any]) -> None:
    """What was captured, and what the program was answered in the place of a GPU."""
    ranks = data["ranks"]
    count = sum(len(one["events"]) - one["steady"] for one in ranks)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(one['rank']) for one in ranks)}"
    print_text(f"{out}: {count:,} events of a step on {who} of {data['world_size']:,}")
    answers = [answer for one in ranks for answer in one["answers"].items()]
    for question, times in dict(sorted(answers, key=lambda one: one[1])).items():
        print_status(f"shardwise: answered {question}{f' ({times} times)' if times > 1 else ''}")


def captured(
    target: str, arguments: tuple[str, ...], where: Cluster, *, ranks: int | None, recipe: str | None = None,
    **how: Any,  # noqa: ANN401  other fields of Job
) -> dict[str, Any]:  # fmt: skip
    """A capture as its file keeps it. Raises InputError; a program's own traceback goes to stderr before."""
    needs_torch()
    from validate.capture.command import CaptureError, Job, captured_json

    job = Job(
        target=target, arguments=arguments, world_size=ranks or where.num_devices, num_gpus=where.num_devices,
        gpus_per_node=where.gpus_per_node, device=where.device, recipe=recipe or "", **how,
    )  # fmt: skip
    try:
        return captured_json(job, progress=lambda _, phase: print_status(f"shardwise: {phase}"))
    except CaptureError as exc:
        if exc.traceback:
            print_status(exc.traceback)
        raise
