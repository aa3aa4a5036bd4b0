"""Kernels inside real steps of one H200: what each op took and what we say it takes.

    python experiments/kernels_in_steps.py [--only REGEX] [--each]

One line an op: milliseconds measured and predicted, the error, and the speed reached: TFLOP/s of products and attention, TB/s
of the bytes we bill elsewhere. Stream kernels and `memory_draw` of the H200's calibration were fitted on the plans of
`_tables.SEEN`; the others are held out. `--each` prints a table a plan, and what is lost in the sums: the mean
absolute error over ops and plans, weighted by measured time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from _in_steps import Bill, Ops, joined
from _tables import SEEN


def show(title: str, ops: Ops) -> None:
    """The table of one plan, or of several together."""
    total, ours = sum(s for s, _ in ops.values()), sum(bill.seconds for _, bill in ops.values())
    print(f"{title}: {1e3 * total:.1f} ms measured, {1e3 * ours:.1f} predicted ({100 * (ours / total - 1):+.1f} %)")
    for name, (seconds, bill) in sorted(ops.items(), key=lambda item: -item[1][0]):
        error = f"{100 * (bill.seconds / seconds - 1):+7.1f} %" if seconds and bill.seconds else "      – "
        speed = f"{1e-12 * bill.amount / seconds:7.2f} T/s" if seconds else ""
        print(f"  {name:36} {1e3 * seconds:9.2f} {1e3 * bill.seconds:9.2f} {error} {speed}")


def misplaced(ops: Ops) -> float:
    """Seconds by which the ops miss, whatever cancels in their sum."""
    return sum(abs(bill.seconds - seconds) for seconds, bill in ops.values())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="plans whose name matches")
    parser.add_argument("--each", action="store_true", help="a table a plan")
    options = parser.parse_args()
    for title, plans in _split(joined(options.only)).items():
        total: Ops = {}
        for label, ops in plans.items():
            if options.each:
                show(label, ops)
            for name, (seconds, bill) in ops.items():
                old_s, old = total.get(name, (0.0, Bill()))
                total[name] = old_s + seconds, old + bill
        if plans:
            show(title, total)
            total_s = sum(seconds for seconds, _ in total.values())
            print(
                f"  missed op by op and plan by plan: {100 * sum(map(misplaced, plans.values())) / total_s:.1f} % of the time"
            )


def _split(plans: Iterable[tuple[str, Ops]]) -> dict[str, dict[str, Ops]]:
    found: dict[str, dict[str, Ops]] = {"plans that the fit saw": {}, "plans held out": {}}
    for label, ops in plans:
        found["plans that the fit saw" if label in SEEN else "plans held out"][label] = ops
    return found


if __name__ == "__main__":
    main()
