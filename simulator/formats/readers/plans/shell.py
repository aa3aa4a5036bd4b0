"""Commands of a shell script, without running it: assignments, arrays, `+=`, functions, conditions, here-documents.

Nothing is executed. What only a run knows (a command's output, an unset variable, an arm of a condition) stays in the
words as a mark that says what it was and where it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from simulator.formats.readers.plans.shell_expansion import Expansion
from simulator.formats.readers.plans.shell_tests import Block, holds
from simulator.formats.readers.plans.shell_words import Chars, Word, words_of

_MOST_NESTED: Final = 4

_ASSIGN: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARE: Final = {"export", "declare", "local", "readonly", "typeset"}
_OPEN: Final = {"if": "fi", "while": "done", "until": "done", "for": "done", "case": "esac", "function": "}"}
_INNER: Final = {"then", "else", "elif", "do", "in"}


@dataclass
class Shell(Expansion):
    """Reads one script. define: variables as the environment would set them."""

    commands: list[list[Word]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nested = 0
        self.blocks: list[Block] = []
        self.joins: dict[int, str] = {}  # commands behind && or ||

    def read(self) -> list[list[Word]]:
        """Every simple command, in the file's order."""
        listing = re.match(r"(\s*(#[^\n]*)?\n)*\s*--[A-Za-z]", self.text) is not None
        words: list[Word] = []
        while self.at < len(self.text):
            self.skip_blanks()
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
                words += words_of(self.word(), self.unknown)
                words = self._keyword(words)
        self._end(words)
        return self.commands

    def _join(self) -> None:
        """What ends a command; && and || are kept for conditions."""
        char = self.next()
        if char in "&|" and self.peek() == char:
            self.next()
            self.joins[len(self.commands)] = 2 * char

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
        self.skip_blanks()
        target = "".join(c for c, _ in self.word()) if self.peek() not in ("", "\n") else ""
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
            value, is_array = self.array(), True
        else:
            value, is_array = [self.word()], False
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
