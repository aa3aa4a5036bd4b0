"""Words of a shell script as the shell would expand them: quotes, `$X`, `${X:-y}`, arrays, `$((…))`.

What only a run knows (a command's output, an unset variable) stays in the words as a mark that says what it was and
where it stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.formats.readers.plans.shell_words import MARK, Chars, Unknown, bare, fields, integer, kept

_MAX_CHARACTERS: Final = 2**20
_MAX_DEPTH: Final = 40
_MAX_UNKNOWN: Final = 6000

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_SPECIAL: Final = re.compile(r"[0-9@*#?$!-]")


@dataclass
class Expansion:
    """Reads words at a place of the script, which moves on. define: variables as the environment would set them."""

    text: str
    file: str
    define: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unknown: list[Unknown] = []
        self.variables: dict[str, list[Chars]] = {}  # every variable is a list; a plain one has one element
        self.defined = {name: [[(c, 0) for c in value]] for name, value in self.define.items()}
        self.at = 0
        self.line = 1
        self.spent = 0
        if len(self.text) > _MAX_CHARACTERS:
            raise self.refuse(f"more than {_MAX_CHARACTERS} characters", "a script")

    # -- characters ----------------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def next(self) -> str:
        char = self.text[self.at]
        self.at += 1
        self.line += char == "\n"
        return char

    def refuse(self, problem: str, remedy: str = "") -> PlanError:
        return PlanError(Fault(place=f"{self.file}:{self.line}", problem=problem, remedy=remedy))

    def mark(self, what: str, kind: str) -> Chars:
        """A character that stands for something unknown."""
        if len(self.unknown) >= _MAX_UNKNOWN:
            raise self.refuse("too many variables that are not set", "a training script")
        self.unknown.append(Unknown(what, kind, self.line))
        return [(chr(MARK + len(self.unknown) - 1), self.line)]

    def spend(self, chars: Chars) -> Chars:
        self.spent += len(chars)
        if self.spent > 4 * _MAX_CHARACTERS:
            raise self.refuse("its variables expand beyond all proportion", "a training script")
        return chars

    def skip_blanks(self) -> None:
        """On to the next character that is neither blank, continuation nor comment."""
        while char := self.peek():
            if char in " \t\r" or self.peek(2) == "\\\n":
                self.at += 1
                self.at += char == "\\"
                self.line += char == "\\"
            elif self.peek(3) == "\\\r\n":
                self.at += 3
                self.line += 1
            elif char == "#":
                while self.peek() and self.peek() != "\n":
                    self.at += 1
            else:
                return

    # -- words ---------------------------------------------------------------------------------------------------

    def array(self) -> list[Chars]:
        """The elements up to the closing parenthesis."""
        elements: list[Chars] = []
        while True:
            self.skip_blanks()
            char = self.peek()
            if not char:
                raise self.refuse("an array's parenthesis is not closed", ")")
            if char in "\n)":
                self.next()
                if char == ")":
                    return elements
            else:
                elements += fields(self.word())

    def word(self, depth: int = 0) -> Chars:
        """Characters up to the next separator. Blanks that quotes protect come as codes of their own."""
        chars: Chars = []
        while (char := self.peek()) and char not in " \t\r\n;&|<>()":
            if char == "'":
                chars += self._single()
            elif char == '"':
                chars += self._double(depth)
            elif char == "\\":
                self.at += 1
                if self.peek() == "\n":
                    self.next()
                elif self.peek():
                    chars.append((kept(self.next()), self.line))
            elif char in "$`":
                chars += self._dollar(depth, quoted=False)
            else:
                chars.append((self.next(), self.line))
        if not chars and self.peek() in ("(", ")"):
            self.next()
        return self.spend(chars)

    def _single(self) -> Chars:
        self.next()
        chars: Chars = [("\x01", self.line)]
        while self.peek() != "'":
            if not self.peek():
                raise self.refuse("a quote is not closed", "'")
            chars.append((kept(self.next()), self.line))
        self.next()
        return chars

    def _double(self, depth: int) -> Chars:
        self.next()
        chars: Chars = [("\x01", self.line)]
        while (char := self.peek()) != '"':
            if not char:
                raise self.refuse("a quote is not closed", '"')
            if char == "\\" and self.peek(2)[1:] in ("\n", '"', "\\", "$", "`"):
                self.at += 1
                char = self.next()
                if char != "\n":
                    chars.append((kept(char), self.line))
            elif char in "$`":
                chars += [(kept(c), line) for c, line in self._dollar(depth, quoted=True)]
            else:
                line = self.line
                chars.append((kept(self.next()), line))
        self.next()
        return chars

    def _dollar(self, depth: int, *, quoted: bool) -> Chars:
        if depth > _MAX_DEPTH:
            raise self.refuse("expansions are nested too deeply")
        if self.next() == "`":
            return self._command("`")
        ahead = self.peek(2)
        if ahead.startswith("("):
            return self._arithmetic() if ahead == "((" else self._command(")")
        if ahead.startswith("{"):
            return self._braces(depth, quoted=quoted)
        if name := _NAME.match(self.text, self.at) or _SPECIAL.match(self.text, self.at):
            self.at = name.end()
            return self._value(name.group(), quoted=quoted)
        return [("$", self.line)]

    def _command(self, end: str) -> Chars:
        """A command's output is not known."""
        self.at += end == ")"
        start, depth = self.at, 1
        while depth:
            if not self.peek():
                raise self.refuse("a command's parenthesis is not closed", end)
            char = self.next()
            depth += (char == "(" and end == ")") - (char == end)
        return self.mark(f"$({self.text[start : self.at - 1].strip()[:40]})", "command")

    def _braces(self, depth: int, *, quoted: bool) -> Chars:
        """`${NAME}`, `${NAME[@]}`, `${NAME:-word}` and its kin; other forms are not known."""
        self.next()
        start = self.at
        name = _NAME.match(self.text, self.at) or re.compile(r"[0-9@*]").match(self.text, self.at)
        if name is not None:
            self.at = name.end()
            if self.peek(3) in ("[@]", "[*]"):
                self.at += 3
            if self.peek() == "}":
                self.next()
                return self._value(name.group(), quoted=quoted)
            if default := re.compile(r":?[-=]").match(self.text, self.at):
                self.at = default.end()
                word = self._until_brace(depth + 1)
                held = self._held(name.group())
                return [c for part in held for c in part] if held is not None else word
        while self.peek() and self.peek() != "}":
            self.next()
        what = self.text[start : self.at]
        if not self.peek():
            raise self.refuse("a brace is not closed", "}")
        self.next()
        return self.mark(f"${{{what}}}", "command")

    def _until_brace(self, depth: int) -> Chars:
        chars: Chars = []
        while (char := self.peek()) != "}":
            if not char:
                raise self.refuse("a brace is not closed", "}")
            if char == '"':
                chars += self._double(depth)
            elif char == "'":
                chars += self._single()
            elif char in "$`":
                chars += self._dollar(depth, quoted=False)
            else:
                chars.append((self.next(), self.line))
        self.next()
        return chars

    def _held(self, name: str) -> list[Chars] | None:
        return self.defined.get(name, self.variables.get(name))

    def _value(self, name: str, *, quoted: bool) -> Chars:
        held = self._held(name)
        if held is None:
            kind = "arguments" if name in "@*" else "variable"
            return self.mark(f"${name}", kind)
        chars: Chars = []
        for index, part in enumerate(held):
            if index:
                chars.append((" ", part[0][1] if part else self.line))
            protects = len(held) > 1 or quoted
            chars += [(c if protects else bare(c), line) for c, line in part if c != "\x01"]
            if not part:
                chars.append(("\x01", self.line))
        # an array's elements are words, whether its expansion is quoted or not; a plain quoted value is one word
        return self.spend([(("\x02" if c == " " and quoted and len(held) > 1 else c), line) for c, line in chars])

    def _arithmetic(self) -> Chars:
        start, depth = self.at + 2, 2
        self.at += 2
        while depth and self.peek():
            char = self.next()
            depth += (char == "(") - (char == ")")
        if depth:
            raise self.refuse("$((… is not closed", "))")
        return self._evaluated(self.text[start : self.at - 2])

    def _evaluated(self, text: str) -> Chars:
        line = self.line
        for name in dict.fromkeys(re.findall(r"\$?\{?([A-Za-z_]\w*|\d+(?=\}))\}?", text)):
            held = self._held(name)
            value = "".join(bare(c) for part in held or [] for c, _ in part if c not in "\x01\x02")
            if held is None or not re.fullmatch(r"\s*-?\d{1,18}\s*", value):
                return self.mark(f"${name}" if held is None else f"$(({text.strip()}))", "variable")
            text = re.sub(rf"\$\{{{name}\}}|\${name}\b|\b{name}\b", value.strip(), text)
        try:
            number = integer(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self.mark(f"$(({text.strip()[:40]}))", "command")
        return [(c, line) for c in str(number)]
