"""Pictures of every kind of page, to be looked at: light and dark, on a phone and on a wide screen.

    python -m tests.screenshots FOLDER [KIND ...]

Writes FOLDER/KIND-390-dark.png and so on; `ui` is the live page. A page longer than a screen is cut into PARTs of 1,800 pixels
(KIND-1600-light-2.png), so that nothing is scaled down when it is shown.
"""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from simulator.cli import main
from simulator.cli.ui_runs import Runs
from simulator.cli.ui_server import Server
from tests.browser import Browser
from tests.pages import COMMANDS, EXAMPLES

WIDTHS = (390, 1600)
PART = 1800  # pixels of a picture's height
MOST = 6  # parts of a page
LIVE = "ui"
SEEN = """(async () => {  // what is drawn when it comes into sight
  const wait = () => new Promise((done) => setTimeout(done, 120));
  for (const one of document.querySelectorAll("[data-draw]")) { one.scrollIntoView({behavior: "instant"}); await wait(); }
  scrollTo({top: 0, behavior: "instant"});
  await wait();
})()"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a live page over the example study; its runs are below `folder`."""
    folder.mkdir(exist_ok=True)
    study = (EXAMPLES / "study.toml").read_text(encoding="utf-8")
    server = Server(Runs(folder, EXAMPLES), study, "study.toml", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        server.close()
        thread.join()


def shoot(browser: Browser, file: Path) -> None:
    """The whole page, in parts."""
    height = browser.ask("Math.max(document.documentElement.scrollHeight, innerHeight)")
    for part in range(min(MOST, -(-height // PART))):
        clip = {"x": 0, "y": part * PART, "width": browser.ask("innerWidth"), "scale": 1}
        clip["height"] = min(PART, height - part * PART)
        data = browser.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        file.with_name(f"{file.stem}{f'-{part + 1}' if part else ''}.png").write_bytes(base64.b64decode(data))


def looks(browser: Browser, kind: str, address: str, folder: Path) -> None:
    """A page in each theme and width."""
    for width in WIDTHS:
        for dark in (False, True):
            browser.size(width, 1000, dark=dark)
            if kind != LIVE or "token" in address:
                browser.open(address)
            if kind == LIVE:
                address = address.partition("?")[0]
                browser.open(address)
                browser.wait("document.getElementById('report').contentDocument?.documentElement?.dataset.ready")
            browser.ask(SEEN)
            shoot(browser, folder / f"{kind}-{width}-{'dark' if dark else 'light'}.png")


def command(words: Sequence[str]) -> int:
    """Write the pages and their pictures."""
    folder, kinds = Path(words[0]), words[1:] or [*COMMANDS, LIVE]
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for kind in kinds:
            if kind == LIVE:
                with served(folder / "runs") as address:
                    looks(browser, kind, address, folder)
                continue
            file = (folder / f"{kind}.html").resolve()
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                main([*COMMANDS[kind], "--html", str(file)])
            looks(browser, kind, file.as_uri(), folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
