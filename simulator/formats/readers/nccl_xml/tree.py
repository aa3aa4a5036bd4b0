"""The XML as a tree of elements: parsed by the standard library's expat, within reason, and without a document type.

A document type is refused, so that no entity can be declared, expanded or fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from simulator.base.errors import ClusterError

_MOST_ELEMENTS = 20_000
_MOST_DEPTH = 32


@dataclass(slots=True)
class Element:
    """One element: its tag, attributes, where it stands, and what it holds."""

    tag: str
    attributes: dict[str, str]
    line: int
    parent: Element | None
    children: list[Element] = field(default_factory=list)

    def get(self, name: str) -> str:
        return self.attributes.get(name, "").strip()

    def inside(self, tag: str) -> Iterator[Element]:
        return (child for child in self.children if child.tag == tag)

    @property
    def above(self) -> list[Element]:
        """The element and everything around it, from the inside out."""
        path: list[Element] = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path


def parse(data: bytes, place: str) -> tuple[Element, str]:
    """The root element and all comments. Raises ClusterError at what is not XML, or not within reason."""
    parser = expat.ParserCreate()
    stack: list[Element] = []
    roots: list[Element] = []
    comments: list[str] = []
    count = 0

    def refuse(problem: str, remedy: str = "") -> NoReturn:
        raise ClusterError.at(f"{place}: line {parser.CurrentLineNumber}", problem, remedy)

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > _MOST_ELEMENTS or len(stack) >= _MOST_DEPTH:
            refuse(f"more than {_MOST_ELEMENTS} elements or {_MOST_DEPTH} levels", "one host's topology")
        element = Element(tag, attributes, parser.CurrentLineNumber, stack[-1] if stack else None)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def doctype(*_: object) -> NoReturn:
        refuse("a document type, which could declare entities", "a topology file needs none: remove <!DOCTYPE …>")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _tag: stack.pop()
    parser.StartDoctypeDeclHandler = doctype
    parser.EntityDeclHandler = doctype
    parser.CommentHandler = comments.append
    try:
        parser.Parse(data, True)  # noqa: FBT003  expat's own signature
    except (LookupError, ValueError) as exc:  # codecs that expat cannot use, as the declaration names them
        raise ClusterError.at(f"{place}: line 1", f"unusable encoding: {exc}", "UTF-8") from None
    except expat.ExpatError as exc:
        where = f"{place}: line {exc.lineno}"
        raise ClusterError.at(where, f"not XML: {expat.ErrorString(exc.code)}", "the file as NCCL wrote it") from None
    if roots[0].tag != "system":
        raise ClusterError.at(f"{place}: line 1", f"the root is <{roots[0].tag[:40]}>", "NCCL's begins with <system>")
    return roots[0], "\n".join(comments)
