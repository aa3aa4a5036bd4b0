"""8 × A100-80 on NVLink, or 16 × A100-40 on PCIe: which trains a model sooner, and at which price is which cheaper?

Each machine gets its own quickest plan. Then: both side by side, the price of a GPU hour at which they cost the same, and
how often the quicker one changes where links, kernels and the prediction are not what was taken. With a price file of
your own (docs/reference/prices-file.md; clusters hgx-a100-80-8 and pcie-a100-40-8) also costs and what they hang on.

    python experiments/a100_nvlink_or_pcie.py [--model llama2-13b] [--prices PRICES.toml] [-o FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _purchase import SPACE, quickest, write_study

from simulator.cli import main as shardwise
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.compare import Subject, compare

PCIE = Path(__file__).parent / "clusters" / "pcie-a100-40-8.toml"


def main() -> None:
    """Search, compare, ask what it hangs on."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="llama2-13b")
    arguments.add_argument("--global-batch", type=int, default=128)
    arguments.add_argument("--seq-len", type=int, default=4096)
    arguments.add_argument("--samples", default="64")
    arguments.add_argument("--jobs", type=int)
    arguments.add_argument("--prices", type=Path)
    arguments.add_argument("-o", "--folder", type=Path, default=Path("a100-nvlink-or-pcie"))
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = Model.load(options.model)
    machines = {"nvlink": ("hgx-a100-80-8", 1), "pcie": (str(PCIE), 2)}
    subjects, studies = [], []
    for name, (cluster, nodes) in machines.items():
        machine = Cluster.load(cluster, nodes)
        row = quickest(model, machine, options.global_batch, options.seq_len, SPACE, options.jobs)
        if row is None:
            sys.exit(f"{options.model} does not fit on {name}")
        studies.append(str(options.folder / f"{name}.toml"))
        write_study(Path(studies[-1]), options.model, cluster, row)
        subjects.append(Subject(name=name, model=model, plan=row.plan, cluster=machine))
    _, pcie = compare(subjects, ablate=False).rows
    against = pcie.against_first
    assert against is not None
    even = [8 / (16 * ratio) for ratio in (against.high, against.ratio, against.low)]
    print(
        f"An hour of one A100-40 on PCIe is worth {even[1]:.2f} ({even[0]:.2f} to {even[2]:.2f}) of one A100-80 on NVLink: "
        f"below that 16 of them are cheaper a token.\n"
    )
    ranges = ["B:link.inter.bytes_per_s=x0.5..x1", "B:cluster.intra.bytes_per_s=x0.6..x1", "kernels.gemm=x0.9..x1.1"]
    vary = [word for one in ranges for word in ("--vary", one)]
    priced = ["--prices", str(options.prices)] if options.prices else []
    drawn = ["--plot", str(options.folder / "front.svg")] if options.prices else []
    if options.prices:
        vary += ["--vary", "A:price.per_gpu_hour=x0.7..x1.3", "--vary", "B:price.per_gpu_hour=x0.7..x1.3"]
    jobs = ["--jobs", str(options.jobs)] if options.jobs else []
    shardwise(["compare", *studies, *priced, *drawn, "--plain"])
    print()
    sys.exit(shardwise(["sensitivity", *studies, *priced, *vary, *jobs, "--samples", options.samples, "--plain"]))


if __name__ == "__main__":
    main()
