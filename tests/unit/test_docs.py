"""The pages hold together: links lead somewhere, references know every field, and named files and presets exist."""

import re
from pathlib import Path

import pytest
import readme  # experiments/
from pydantic import BaseModel

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.studies.serving import stack_named

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if link.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_project_that_are_named_exist(page: Path) -> None:
    own = r"`((?:simulator|validate|experiments|tests|topologies|docs)/[\w./-]+)`"
    assert [name for name in re.findall(own, page.read_text(encoding="utf-8")) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("name", "noun"),
    [
        ("stack-file", Stack),
        ("stack-file", AttentionBackend),
        ("plan-file", Plan),
        ("model-file", Model),
        ("cluster-file", Cluster),
        ("cluster-file", Device),
    ],
)
def test_a_reference_knows_every_field(name: str, noun: type[BaseModel]) -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")))
    assert [field for field in noun.model_fields if field not in words] == []


def test_presets_in_commands_exist() -> None:
    """--cluster, --model, --stack of README, tutorial and guides, unless it is a file of the reader's."""
    load = {"model": Model.load, "cluster": Cluster.load, "stack": lambda name: Stack.load(stack_named(name))}
    for page in PAGES:
        for noun, name in re.findall(
            r"--(model|cluster|stack) (?![A-Z]+\b)(\w[\w./-]+)", page.read_text(encoding="utf-8")
        ):
            if not name.endswith((".toml", ".json")) and name != "path":
                assert load[noun](name.rstrip(".")), f"{page.name}: {name}"


def test_what_is_made_of_the_readme_is_as_it_would_be_made_now() -> None:
    """Its picture, and how far off predictions are: python experiments/readme.py."""
    assert [file.name for file, text in readme.made().items() if file.read_text(encoding="utf-8") != text] == []
