"""The documentation as a site: `python docs/site/build.py`, then open build/site/index.html.

Needs the extra `docs`. Any warning is an error: a page without a place, a link or an anchor that leads nowhere; so is
anything that a page would load from elsewhere. Where there is a Chromium, it opens the site as a file and searches.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|"""
    r"""<link[^>]*\srel=["']?(?:stylesheet|preload|preconnect)[^>]*href=["']?https?:"""
)
BROWSERS = "chromium", "chromium-browser", "google-chrome"
WORD = "recompute"


def main() -> int:
    """The gallery first, which the site shows."""
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for command in (["experiments/gallery.py"], ["-m", "mkdocs", "build", "--strict", "--quiet"]):
        done = subprocess.run([sys.executable, *command], check=False, cwd=ROOT, env=quiet)
        if done.returncode:
            return done.returncode
    pages = sorted(SITE.rglob("*.html"))
    texts = {str(page.relative_to(SITE)): page.read_text(encoding="utf-8") for page in pages}
    faults = [f"{name}: loads from elsewhere" for name, text in texts.items() if LOADED.search(text)] + _unsearched()
    print("\n".join([*faults, f"{len(pages)} pages in {SITE.relative_to(ROOT)}"]))
    return 1 if faults else 0


def _unsearched() -> list[str]:
    """A fault if the search finds nothing when the site is opened as a file."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print("no Chromium here: the search was not tried")
        return []
    url = f"{(SITE / 'index.html').as_uri()}?q={WORD}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom", url]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"(\d+) matching documents", shown)
    print(f"search for {WORD}: {found[0] if found else 'nothing'}")
    return [] if found else [f"the search finds nothing for {WORD}"]


if __name__ == "__main__":
    raise SystemExit(main())
