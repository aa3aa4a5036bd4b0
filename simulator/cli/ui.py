"""`shardwise ui`: edit a study in a browser and see its prediction; on this machine only."""

from __future__ import annotations

import tempfile
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import click

from simulator.base.errors import Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.files import ordinary
from simulator.cli.options import print_status

_MOST_BYTES = 2**20  # of a study
_DEFAULT = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n\n[plan]\nzero = 3\nseq_len = 8192\n'
_HELP = """Edit a study in a browser and see what it predicts, while you type.

The command prints an address on 127.0.0.1 whose token opens it once, in one browser; nothing else is answered, and no
other interface listens. The page is that of `predict --html`, or that of `explore --html` for values to try. STUDY.toml is read and never written. Runs that you keep
go to --folder; without it, they are gone at the end.

Exit codes: 0 at Ctrl-C, 2 usage, 3 bad input."""


@click.command("ui", help=_HELP)
@click.argument("study", required=False, type=click.Path(path_type=Path), metavar="[STUDY.toml]")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, show_default=True, help="0: any that is free.")
@click.option("--folder", type=click.Path(path_type=Path), metavar="DIR", help="Keep runs here, and list those of before.")  # fmt: skip
def command(study: Path | None, *, port: int, folder: Path | None) -> int:
    """Serve until Ctrl-C."""
    from simulator.cli.ui_runs import Runs
    from simulator.cli.ui_server import Server

    faults = []
    text, beside = _DEFAULT, Path.cwd()
    try:
        if study is not None:
            text, beside = ordinary(study, _MOST_BYTES).read_text(encoding="utf-8"), study.resolve().parent
    except (OSError, UnicodeDecodeError) as exc:
        problem = f"cannot be read: {getattr(exc, 'strerror', None) or 'not UTF-8'}"
        faults.append(Fault(place=str(study), problem=problem, remedy="a study as for predict"))
    try:
        if folder is not None:
            folder.mkdir(exist_ok=True)
    except OSError as exc:
        faults.append(Fault(place=f"--folder {folder}", problem=f"cannot be made: {exc.strerror}", remedy="a folder"))
    InputError.raise_for(faults)
    with nullcontext(str(folder)) if folder is not None else tempfile.TemporaryDirectory() as place:
        try:
            server = Server(Runs(Path(place), beside), text, study.name if study is not None else "study.toml", port)
        except OSError as exc:
            raise InputError.at(f"--port {port}", f"cannot listen: {exc.strerror}", "--port 0") from None
        click.echo(server.address)
        print_status("shardwise: open this address once, in one browser; Ctrl-C ends")
        with suppress(KeyboardInterrupt), closing(server):
            server.serve_forever(poll_interval=0.2)
    return ExitCode.OK
