"""Commands of a shell script, without running it: assignments, arrays, `+=`, continuations, quotes, `${X:-y}`, `$((…))`.

Nothing is executed. What only a run knows (a command's output, an unset variable, an arm of a condition) stays in the
words as a mark that says what it was and where it stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from simulator.errors import Fault, PlanError
from simulator.readers.plans.shell_tests import Block, holds
from simulator.readers.plans.shell_words import MARK, Chars, Unknown, Word, bare, fields, integer, kept, words_of

MAX_CHARACTERS: Final = 2**20
MAX_DEPTH: Final = 40
_MAX_UNKNOWN: Final = 6000
_MOST_NESTED: Final = 4

_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_SPECIAL: Final = re.compile(r"[0-9@*#?$!-]")
_ASSIGN: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARE: Final = {"export", "declare", "local", "readonly", "typeset"}
_OPEN: Final = {"if": "fi", "while": "done", "until": "done", "for": "done", "case": "esac", "function": "}"}
_INNER: Final = {"then", "else", "elif", "do", "in"}


@dataclass
class Shell:
    """Reads one script. define: variables as the environment would set them."""

    text: str
    file: str
    define: Mapping[str, str] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unknown: list[Unknown] = []
        self.variables: dict[str, list[Chars]] = {}  # every variable is a list; a plain one has one element
        self.defined = {name: [[(c, 0) for c in value]] for name, value in self.define.items()}
        self.nested = 0
        self.at = 0
        self.line = 1
        self.spent = 0
        self.blocks: list[Block] = []
        self.joins: dict[int, str] = {}  # commands behind && or ||
        if len(self.text) > MAX_CHARACTERS:
            raise self.refuse(f"more than {MAX_CHARACTERS} characters", "a script")

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
        if self.spent > 4 * MAX_CHARACTERS:
            raise self.refuse("its variables expand beyond all proportion", "a training script")
        return chars

    # -- statements ----------------------------------------------------------------------------------------------

    def read(self) -> list[list[Word]]:
        """Every simple command, in the file's order."""
        listing = re.match(r"(\s*(#[^\n]*)?\n)*\s*--[A-Za-z]", self.text) is not None
        words: list[Word] = []
        while self.at < len(self.text):
            self._skip_blanks()
            char = self.peek()
            if not char:
                break
            if char == "\n" and listing:
                self.next()
            elif char in "\n;&|":
                words = self._end(words)
                self._join()
            elif char in "()":
                self.next()
                words = self._function_or_group(char, words)
            elif redirect := re.match(r"\d*(<<<|<<-?|>>|[<>]&?|&>)", self.text[self.at : self.at + 12]):
                self._redirect(redirect.group())
            elif self._assigns(words):
                pass
            else:
                words += words_of(self._word(), self.unknown)
                words = self._keyword(words)
        self._end(words)
        return self.commands

    def _join(self) -> None:
        """What ends a command; && and || are kept for conditions."""
        char = self.next()
        if char in "&|" and self.peek() == char:
            self.next()
            self.joins[len(self.commands)] = 2 * char

    def _skip_blanks(self) -> None:
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

    def _end(self, words: list[Word]) -> list[Word]:
        if words and not any(block.live is False for block in self.blocks):
            self.commands += self._run(words)
        return []

    def _run(self, words: list[Word]) -> list[list[Word]]:
        """The command itself; of `bash -c "…"` and `eval …` the commands inside, behind the words before."""
        texts = [word.text for word in words]
        if texts[0] == "eval" and len(words) > 1:
            return self._inner(" ".join(texts[1:]), words[1].line, [])
        for index in range(len(words) - 2):
            if texts[index] in ("bash", "sh") and texts[index + 1] in ("-c", "-lc"):
                return self._inner(texts[index + 2], words[index + 2].line, words[:index])
        return [words]

    def _inner(self, text: str, line: int, before: list[Word]) -> list[list[Word]]:
        if self.nested > _MOST_NESTED:
            raise self.refuse("shells are nested too deeply")
        shell = Shell(text, self.file, self.define)
        shell.variables, shell.unknown, shell.line, shell.nested = self.variables, self.unknown, line, self.nested + 1
        return [[*before, *command] for command in shell.read()]

    def _keyword(self, words: list[Word]) -> list[Word]:
        """Keywords begin and end blocks; arms of a condition that the script itself settles run or do not."""
        if len(words) != 1:
            return words
        word, block = words[0].text, self.blocks[-1] if self.blocks else None
        if word in _OPEN:
            self.blocks.append(Block(_OPEN[word], words[0].line, begun=len(self.commands)))
            return words if word in ("for", "case", "function") else []
        if block is not None and word == block.end:
            self.blocks.pop()
            return []
        if block is not None and block.end == "fi" and word in ("then", "elif", "else"):
            self._arm(block, word)
            return []
        return [] if word in _INNER or word in ("{", "}") else words

    def _arm(self, block: Block, word: str) -> None:
        if word == "then":
            tests = range(block.begun + 1, len(self.commands))
            block.begin_arm(holds(self.commands[block.begun :], [self.joins.get(at, "") for at in tests]))
            del self.commands[block.begun :]
            self.joins.clear()
        elif word == "else":
            block.begin_else()
        else:
            block.begun, block.live = len(self.commands), None

    def _function_or_group(self, char: str, words: list[Word]) -> list[Word]:
        """`name() {` opens a function; a bare parenthesis groups, and ends an arm of a case."""
        if char == "(" and len(words) == 1 and self.peek() == ")":
            self.next()
            self.blocks.append(Block("}", self.line))
            return []
        return self._end(words) if not any(block.end == "esac" for block in self.blocks) else []

    def _redirect(self, sign: str) -> None:
        self.at += len(sign)
        self._skip_blanks()
        target = "".join(c for c, _ in self._word()) if self.peek() not in ("", "\n") else ""
        if sign in ("<<", "<<-"):
            body = re.compile(rf"\n(.*?\n)??[\t]*{re.escape(target)}(?=\n|$)", re.DOTALL).search(self.text, self.at)
            if body is None:
                raise self.refuse(f"the text up to {target!r} does not end")
            rest = self.text.find("\n", self.at)
            self.text = self.text[:rest] + "\n" * body.group().count("\n") + self.text[body.end() :]

    def _assigns(self, words: list[Word]) -> bool:
        """Read `NAME=…`, `NAME+=…`, `NAME=(…)` where a command may begin."""
        found = _ASSIGN.match(self.text, self.at)
        if found is None or (words and words[0].text not in _DECLARE):
            return False
        name, adds = found.groups()
        self.at = found.end()
        if self.peek() == "(":
            self.next()
            value, is_array = self._array(), True
        else:
            value, is_array = [self._word()], False
        if name in self.defined:
            return True  # the caller's word stands
        if any(block.live is False for block in self.blocks):
            return True
        if line := next((block.line for block in self.blocks if block.live is None), 0):
            value = self._conditional(name, value, line, adds)
        old = self.variables.get(name, [])
        if adds and is_array:
            value = [*old, *value]
        elif adds:
            value = [[*(old[0] if old else []), *value[0]], *old[1:]]
        self.variables[name] = [self.spend(part) for part in value]
        return True

    def _conditional(self, name: str, value: list[Chars], line: int, adds: str) -> list[Chars]:
        """A value that a condition may give: a mark that knows which options it may hold."""
        old = [] if adds else self.variables.get(name, [])
        words = [word for part in (*old, *value) for word in words_of(part, self.unknown)]
        held = {word.text.partition("=")[0] for word in words if word.text.startswith("--")}
        held.update(option for word in words for unknown in word.unknown for option in unknown.options)
        chars = self.mark(f"${name} depends on what begins at line {line}", "condition")
        self.unknown[-1] = replace(self.unknown[-1], options=frozenset(held))
        return [[(" ", self.line), *chars] if adds else chars]

    def _array(self) -> list[Chars]:
        elements: list[Chars] = []
        while True:
            self._skip_blanks()
            char = self.peek()
            if not char:
                raise self.refuse("an array's parenthesis is not closed", ")")
            if char in "\n)":
                self.next()
                if char == ")":
                    return elements
            else:
                elements += fields(self._word())

    def _word(self, depth: int = 0) -> Chars:
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
        if depth > MAX_DEPTH:
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
