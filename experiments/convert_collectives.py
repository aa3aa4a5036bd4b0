"""Published sweeps with what is known of their sources: writes experiments/measured/collectives-plain.csv.gz.

    python experiments/convert_collectives.py             # experiments/measured/collectives.csv.gz -> collectives-plain.csv.gz
    python experiments/convert_collectives.py --check     # writes nothing; 1 if the file is not what would be written

Adds three columns that `shardwise backtest` and the fit of links take as they stand (docs/reference/collectives-table.md):
`degraded`, `left_out` and `usual_network`. Nothing else of a row changes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from convert_runs import zipped

HERE = Path(__file__).resolve().parent
# collectives-efa: data/*.csv of github.com/crazyguitar/aws-gpu-communication-benchmark at a77f70db (CC BY 4.0; times from algbw)
RAW = tuple(HERE / "measured" / f"{name}.csv.gz" for name in ("collectives", "collectives-efa"))
PLAIN = HERE / "measured" / "collectives-plain.csv.gz"
LARGE_BYTES: Final = 64 * 2**20

# Runs that were broken in reality. By the source's own words, or by the source.
DEGRADED: Final = (
    (
        r"xxrjun/nccl-tests-cluster.*\bNCCL 2\.28\.7\b",
        "its own repository has the same groups of the same cluster 3 to 8 times as fast with NCCL 2.29.2",
    ),
    (r"reported as degraded", "its source reports it as degraded (NVIDIA/nccl-tests issue 290, two nodes)"),
    (r"\b26285727504\b|\bdgx06\b", "two hosts with 4 GPUs each (dgx06): degraded"),
)
# What no fit takes, and why. Each is a pattern in "source location notes nccl n_gpus gpu" as `_text` writes it.
EXCLUDED: Final = (
    (r"does not say which", "A3 High or Edge: page does not say which"),
    (r"microsoft/vidur", "few iterations in a training framework, ranks not aligned"),
    (r"older stack", "EFA installer of an older release on the same hardware as two other sweeps"),
    (r"nccl 2\.5\.6", "one machine of 2019, times of neighbouring sizes differ tenfold"),
    (r"3 sample rows", "three rows of a sweep"),
)
# Machines whose notes do not name the network, and whose large messages run at what the usual machine's NICs carry
USUAL_NETWORK: Final = re.compile(r"xxrjun|sophia|DGX A100|same cluster scaling")

Cells = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    written = zipped(table())
    if args.check:
        return int(PLAIN.read_bytes() != written)
    PLAIN.write_bytes(written)
    return 0


def table() -> str:
    """The table with its further columns, as CSV."""
    rows: list[Cells] = []
    for raw in RAW:
        with gzip.open(raw, "rt", newline="", encoding="utf-8") as file:
            rows += csv.DictReader(file)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0], "degraded", "left_out", "usual_network"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **known(row)} for row in rows)
    return text.getvalue()


def known(row: Cells) -> Cells:
    """The three further cells."""
    text = f"{row['source']} {row['location']} {row['notes']} NCCL {row['nccl_version']}"
    degraded = next((reason for pattern, reason in DEGRADED if re.search(pattern, text)), "")
    usual = "y" if USUAL_NETWORK.search(_text(row)) else ""
    return {"degraded": degraded, "left_out": _left_out(row), "usual_network": usual}


def _left_out(row: Cells) -> str:
    """Empty, or why no fit takes the row."""
    small = int(row["size_bytes"]) < LARGE_BYTES
    reasons = {
        "timed from Python: small calls wait for the host": "stas00" in row["source"] and small,
        "a channel's own speed limits it": row["collective"] == "sendrecv" and row["n_nodes"] == "10",
        "V100: these run at half of the same sweep's broadcast, cause unknown": "V100" in row["gpu"]
        and row["collective"] in ("all_gather", "reduce_scatter"),
    }
    marked = (reason for pattern, reason in EXCLUDED if re.search(pattern, _text(row)))
    return next(marked, "") or next((reason for reason, holds in reasons.items() if holds), "")


def _text(row: Cells) -> str:
    gpus = row["n_gpus"] or None
    return f"{row['source']} {row['location']} {row['notes']} nccl {row['nccl_version']} {row['gpu']} gpus {gpus}"


if __name__ == "__main__":
    sys.exit(main())
