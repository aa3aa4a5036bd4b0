"""Words of a shell script as the shell would expand them: quotes, `$X`, `${X:-y}`, arrays, `$((…))`.

What only a run knows (a command's output, an unset variable) stays in the words as a mark that says what it was and
where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.formats.readers.plans.shell_words import MARK, Chars, Unknown, arithmetic, fields, protected, unprotected

_MAX_CHARACTERS: Final = 2**20
_MAX_DEPTH: Final = 40
_MAX_UNKNOWN: Final = 6000
_MOST_TRIMMED: Final = 4096  # characters of a value that a pattern is tried on

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
# <PATH TO DATA>: a reader fills it in
PLACEHOLDER: Final = re.compile(r"<[A-Za-z](?:[^<>\n|;&]*[^\s<>|;&])?>(?=[\s\"')\\,:/]|$)")
_ALL: Final = re.compile(r'"\$(@|\{@\}|\{\w+\[@\]\})"')  # no word at all where there are no elements
_CASE: Final = re.compile(r"(?<![\w-])(case|esac)(?![\w-])")
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
        self.defined = {name: _as_elements(value) for name, value in self.define.items() if name != "@"}
        self.arguments: dict[str, list[Chars]] = {}  # positional parameters, where they are known
        if "@" in self.define:
            self.pass_on([_as_elements(word)[0] for word in self.define["@"].split()])
        self.skips: dict[int, tuple[int, int]] = {}  # ends of lines that here-documents follow: where, how many lines
        self.documents: set[int] = set()  # where here-documents are asked for that were found
        self.counts = 1  # 0: every line counts as the one that reads this text in
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
        if char == "\n":
            self.at, lines = self.skips.get(self.at - 1, (self.at, 0))
            self.line += (1 + lines) * self.counts
        return char

    def refuse(self, problem: str, remedy: str = "") -> PlanError:
        return PlanError(Fault(place=f"{self.file}:{self.line}", problem=problem, remedy=remedy))

    def mark(self, name: str, kind: str) -> Chars:
        """A placeholder character for something unknown."""
        if len(self.unknown) >= _MAX_UNKNOWN:
            raise self.refuse("too many variables that are not set", "a training script")
        self.unknown.append(Unknown(name, kind, self.line))
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
                self.line += (char == "\\") * self.counts
            elif self.peek(3) == "\\\r\n":
                self.at += 3
                self.line += self.counts
            elif char == "#":
                while self.peek() and self.peek() != "\n":
                    self.at += 1
            else:
                return

    # -- words ---------------------------------------------------------------------------------------------------

    def pass_on(self, words: list[Chars]) -> None:
        """Set the positional parameters: $1, $2, …, $@ and $#."""
        numbered = {str(index): [word] for index, word in enumerate(words, 1)}
        rest: dict[str, list[Chars]] = {str(index): [[]] for index in range(len(words) + 1, 10)}
        self.arguments = {**rest, **numbered, "@": words, "*": words, "#": _as_elements(str(len(words)))}

    def output(self, text: str) -> Chars | None:
        """The output of a command; None if unknown."""
        del text
        return None

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
            elif char in ";&|<>(":
                found = PLACEHOLDER.match(self.text, self.at)
                start, self.at = self.at, found.end() if found else self.at + 1
                elements.append([(protected(c), self.line) for c in self.text[start : self.at]])
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
                    chars.append((protected(self.next()), self.line))
            elif char in "$`":
                chars += self._dollar(depth, quoted=False)
            else:
                chars.append((self.next(), self.line))
        return self.spend(chars)

    def _single(self) -> Chars:
        self.next()
        chars: Chars = [("\x01", self.line)]
        while self.peek() != "'":
            if not self.peek():
                raise self.refuse("a quote is not closed", "'")
            chars.append((protected(self.next()), self.line))
        self.next()
        return chars

    def _double(self, depth: int) -> Chars:
        start = self.at
        self.next()
        chars: Chars = [("\x01", self.line)]
        while (char := self.peek()) != '"':
            if not char:
                raise self.refuse("a quote is not closed", '"')
            if char == "\\" and self.peek(2)[1:] in ("\n", '"', "\\", "$", "`"):
                self.at += 1
                char = self.next()
                if char != "\n":
                    chars.append((protected(char), self.line))
            elif char in "$`":
                chars += [(protected(c), line) for c, line in self._dollar(depth, quoted=True)]
            else:
                line = self.line
                chars.append((protected(self.next()), line))
        self.next()
        return [] if len(chars) == 1 and _ALL.fullmatch(self.text, start, self.at) else chars

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
            return self.value(name.group(), quoted=quoted)
        return [("$", self.line)]

    def _command(self, end: str) -> Chars:
        """A command's output, as far as it is known."""
        self.at += end == ")"
        start, line = self.at, self.line
        self._skip_to(end)
        text = self.text[start : self.at - 1]
        known = self.output(text)
        return [(c, line) for c, _ in known] if known is not None else self.mark(f"$({text.strip()[:40]})", "command")

    def _skip_to(self, end: str) -> None:
        """Skip past the closing sign of a command substitution, over nested quotes, parentheses and case patterns."""
        open_signs, cases = [end], list[int]()
        while open_signs:
            if not self.peek():
                raise self.refuse("a command's parenthesis is not closed", end)
            top, char = open_signs[-1], self.next()
            if char == "\\" and self.peek():
                self.next()
            elif char == top and not (char == ")" and cases and cases[-1] == len(open_signs)):
                open_signs.pop()
            elif top == '"' and char == "$" and self.peek() == "(":
                self.next()
                open_signs.append(")")
            elif top == ")":
                cases = self._inside_command(char, open_signs, cases)

    def _inside_command(self, char: str, open_signs: list[str], cases: list[int]) -> list[int]:
        """One character of a command in parentheses; how deep the cases stand that are open behind it."""
        if char == "'":
            end = self.text.find("'", self.at)
            while self.at <= end:
                self.next()
        elif char in '"(':
            open_signs.append(")" if char == "(" else '"')
        elif found := _CASE.match(self.text, self.at - 1):
            self.at = found.end()
            return [*cases, len(open_signs)] if found.group() == "case" else cases[:-1]
        return cases

    def _braces(self, depth: int, *, quoted: bool) -> Chars:
        """`${NAME}`, `${NAME[@]}`, `${NAME:-word}`, `${NAME%pattern}` and similar; other forms are unknown."""
        self.next()
        start = self.at
        name = _NAME.match(self.text, self.at) or re.compile(r"[@*]|\d+").match(self.text, self.at)
        if name is not None:
            self.at = name.end()
            if self.peek(3) in ("[@]", "[*]"):
                self.at += 3
            if self.peek() == "}":
                self.next()
                return self.value(name.group(), quoted=quoted)
            if sign := re.compile(r":?[-=+?]|##?|%%?|,,|\^\^").match(self.text, self.at):
                self.at = sign.end()
                return self._altered(
                    name.group(), sign.group(), self._until_brace(depth + 1), self.text[start : self.at]
                )
        while self.peek() and self.peek() != "}":
            self.next()
        expression = self.text[start : self.at]
        if not self.peek():
            raise self.refuse("a brace is not closed", "}")
        self.next()
        index = re.fullmatch(r"(\w+)\[(\d{1,18})\]", expression)
        elements = self._elements(index.group(1)) if index else None
        if index and elements and int(index.group(2)) < len(elements):
            return [(c, line) for c, line in elements[int(index.group(2))] if c != "\x01"]
        return self.mark(f"${{{expression}}}", "command")

    def _altered(self, name: str, sign: str, word: Chars, expression: str) -> Chars:
        """A value with its default or alternative, or with a matched pattern removed."""
        elements = self._elements(name)
        value = None if elements is None else [c for part in elements for c in part]
        is_set = value is not None and not (sign[0] == ":" and all(c == "\x01" for c, _ in value))
        if sign[-1] == "+":
            return word if is_set else []
        if sign[-1] == "?":
            return value if is_set and value is not None else self.mark(f"${name}", "variable")
        if sign[-1] in "-=":
            if sign[-1] == "=" and not is_set:
                self.variables[name] = [word]
            return value if is_set and value is not None else word
        if value is None or any(MARK <= ord(c) < MARK + _MAX_UNKNOWN for c, _ in (*value, *word)):
            return self.mark(f"${{{expression}", "command")
        text, pattern = ("".join(unprotected(c) for c, _ in chars if c != "\x01") for chars in (value, word))
        return [(protected(c), self.line) for c in _trimmed(text, sign, pattern)]

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

    def _elements(self, name: str) -> list[Chars] | None:
        return self.arguments.get(name, self.defined.get(name, self.variables.get(name)))

    def holds(self, name: str) -> bool:
        """Whether the script, or `define`, sets this variable."""
        return self._elements(name) is not None

    def value(self, name: str, *, quoted: bool) -> Chars:
        """The expansion of a variable."""
        elements = self._elements(name)
        if elements is None:
            kind = "arguments" if name in "@*" else "variable"
            return self.mark(f"${name}", kind)
        chars: Chars = []
        for index, part in enumerate(elements):
            if index:
                chars.append((" ", part[0][1] if part else self.line))
            protects = len(elements) > 1 or quoted
            chars += [(c if protects else unprotected(c), line) for c, line in part if c != "\x01"]
            if not part and (quoted or len(elements) > 1):
                chars.append(("\x01", self.line))
        # an array's elements are words, whether its expansion is quoted or not; a plain quoted value is one word
        return self.spend([(("\x02" if c == " " and quoted and len(elements) > 1 else c), line) for c, line in chars])

    def _arithmetic(self) -> Chars:
        start, depth = self.at + 2, 2
        self.at += 2
        while depth and self.peek():
            char = self.next()
            depth += (char == "(") - (char == ")")
        if depth:
            raise self.refuse("$((… is not closed", "))")
        return self.evaluated(self.text[start : self.at - 2])

    def evaluated(self, text: str) -> Chars:
        line = self.line
        if "$(" in text or "`" in text:
            return self.mark(f"$(({text.strip()[:40]}))", "command")
        for name in dict.fromkeys(re.findall(r"\$?\{?([A-Za-z_]\w*|\d+(?=\}))\}?", text)):
            elements = self._elements(name)
            value = "".join(unprotected(c) for part in elements or [] for c, _ in part if c not in "\x01\x02")
            if elements is None or not re.fullmatch(r"\s*-?\d{1,18}\s*", value):
                return self.mark(f"${name}" if elements is None else f"$(({text.strip()}))", "variable")
            text = re.sub(rf"\$\{{{name}\}}|\${name}\b|\b{name}\b", value.strip(), text)
        try:
            return [(c, line) for c in str(arithmetic(text))]
        except ValueError:
            return self.mark(f"$(({text.strip()[:40]}))", "command")


def _as_elements(value: str) -> list[Chars]:
    return [[(c, 0) for c in value]]


def _trimmed(text: str, sign: str, pattern: str) -> str:
    """`text` in upper or lower case, or without the beginning or end that a pattern matches: the shortest or the longest."""
    if sign in (",,", "^^"):
        return text.lower() if sign == ",," else text.upper()
    if len(text) > _MOST_TRIMMED:
        return text
    ends = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for count in ends:
        part, rest = (
            (text[:count], text[count:]) if sign[0] == "#" else (text[len(text) - count :], text[: len(text) - count])
        )
        if fnmatchcase(part, pattern):
            return rest
    return text
