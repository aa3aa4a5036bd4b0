"""docs/gpu-queue.md from validate/queue.toml: `python experiments/gpu_queue.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from validate.queued import page

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu-queue.md"
MEASURED = sorted(path.parent.name for path in ROOT.glob("experiments/measured/*/README.md"))

if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page(MEASURED))
    PAGE.write_text(page(MEASURED), encoding="utf-8")
