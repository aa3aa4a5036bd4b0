"""What MkDocs needs beyond the pages: the navigation, pages made of the code, and links that leave docs/.

A page finds its place by its folder; a new one needs no line here. Links to files that are not part of the site become
the file's path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS, GALLERY = ROOT / "docs", ROOT / "build" / "gallery"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import made_of_code

ELSEWHERE: Final = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "README.md"}
START: Final = ("README.md", "tutorial.md", "guides/questions.md", "features.md", "other-tools.md", "security.md")
ACCURACY: Final = (
    "accuracy.md",
    "accuracy-serving.md",
    "search-regret.md",
    "scales.md",
    "learning.md",
    "claims.md",
    "benchmarks.md",
)
BARS: Final = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
LINK: Final = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every page has its place."""
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    named = {*START, *ACCURACY}

    def under(folder: str) -> list[str]:
        return [page for page in pages if page.startswith(f"{folder}/") and page not in named]

    sections = {
        "Start": list(START),
        "Guides": under("guides"),
        "Reference": ["reference/commands.md", "reference/api.md", *under("reference")],
        "Accuracy": [*ACCURACY, {"Appendices": under("accuracy")}],
        "Background": under("background"),
        "Decisions": under("decisions"),
        "Gallery": ["gallery/index.md", "examples/index.md"],
    }
    placed = named | {
        page for folder in ("guides", "reference", "accuracy", "background", "decisions") for page in under(folder)
    }
    rest = [page for page in pages if page not in placed]
    config.nav = [{title: entries} for title, entries in sections.items()]
    config.nav.append({"Project": ["changelog.md", "contributing.md", *rest]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that no file of docs/ holds."""
    for source, target in ELSEWHERE.items():
        if target != "README.md":
            files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for target, text in {**made_of_code.pages(), "examples/index.md": _examples()}.items():
        files.append(File.generated(config, target, content=text))
    for file in sorted(GALLERY.iterdir()) if GALLERY.is_dir() else ():
        files.append(File.generated(config, f"gallery/{file.name}", abs_src_path=str(file)))
    return files


def _examples() -> str:
    folder = DOCS / "examples"
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    rows = [f"- [{name}]({name})" if not name.endswith(".py") else f"- `{name}`" for name in names]
    return "\n".join(["# Files of the examples", "", "Tutorial and guides name them.", "", *rows, ""])


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links out of docs/ lead to the page made of that file, or are its path."""
    source = page.file.src_uri
    at = ROOT / source.upper() if source in ("changelog.md", "contributing.md") else DOCS / source
    at = at.with_name(f"{at.stem}.md")

    def lead(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        target = (at.parent / path).resolve()
        if not path or not target.is_relative_to(ROOT) or source.startswith(("gallery/", "examples/")):
            return found[0]
        if target.is_relative_to(DOCS):
            inside = str(target.relative_to(DOCS))
            inside = f"{inside}/index.md" if inside == "examples" else inside
        elif target.name in ELSEWHERE and target.parent == ROOT:
            inside = ELSEWHERE[target.name]
        else:
            return f"{found[1]} (`{target.relative_to(ROOT)}`)" if found[1] not in str(target) else f"`{found[1]}`"
        up = "../" * source.count("/")
        return f"[{found[1]}]({up}{inside}{mark}{anchor})"

    return "".join(
        part if part.startswith("```") else BARS.sub(_code, LINK.sub(lead, part)) for part in _parts(markdown)
    )


def _code(found: re.Match[str]) -> str:
    """GitHub reads a bar with a backslash in a table's code as a bar; Markdown in Python keeps the backslash."""
    text = found[1].replace("&", "&amp;").replace("<", "&lt;").replace("\\|", "&#124;")
    return f"<code>{text}</code>"


def _parts(markdown: str) -> Iterator[str]:
    """Prose and fenced blocks, in turn."""
    yield from re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
