"""Pages of the site that are made of the code, and links that leave it. `docs/site/build.py` itself is run by .ci/run."""

from __future__ import annotations

import re
from types import SimpleNamespace

import click
import made_of_code  # docs/site/
import pytest

import simulator
from simulator.cli import shardwise


def test_every_command_and_option_has_its_line() -> None:
    page = made_of_code.commands()
    for name in shardwise.list_commands(click.Context(shardwise)):
        command = shardwise.get_command(click.Context(shardwise), name)
        assert command is not None
        (section,) = re.findall(rf"^## shardwise {name}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
        for option in (one for one in command.params if isinstance(one, click.Option) and not one.hidden):
            assert f"| `{option.opts[0]}" in section or f"{option.opts[0]} " in section, option.opts


def test_every_public_name_has_its_section_and_signature() -> None:
    page = made_of_code.names()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == simulator.__all__
    assert "### Cluster.load()" in page
    assert "predict(model: Model, plan: Plan, cluster: Cluster" in page


@pytest.mark.parametrize(
    ("page", "written", "read"),
    [
        ("guides/a.md", "[b](../reference/cli.md#x)", "[b](../reference/cli.md#x)"),
        ("guides/a.md", "[b](../../CONTRIBUTING.md)", "[b](../contributing.md)"),
        ("security.md", "[b](../experiments/accuracy.py)", "b (`experiments/accuracy.py`)"),
        ("changelog.md", "[b](docs/guides/a.md#c)", "[b](guides/a.md#c)"),
        ("guides/a.md", "[b](https://example.org)", "[b](https://example.org)"),
        ("guides/a.md", "```sh\n[b](../../CONTRIBUTING.md)\n```", "```sh\n[b](../../CONTRIBUTING.md)\n```"),
        ("guides/a.md", "| `full\\|lora` | <a> |", "| <code>full&#124;lora</code> | <a> |"),
    ],
)
def test_links_stay_inside_or_are_paths(page: str, written: str, read: str) -> None:
    hooks = pytest.importorskip("hooks", reason="the extra docs is not installed", exc_type=ImportError)
    found = hooks.on_page_markdown(
        written, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)), config=None, files=None
    )
    assert found == read
