"""Blocks of a shell script: which arms of a condition run, and how often a loop turns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from simulator.formats.readers.plans.shell_expansion import Expansion
from simulator.formats.readers.plans.shell_tests import Block, Conditions, both
from simulator.formats.readers.plans.shell_words import Word, protected, words_of

_MOST_STEPS: Final = 2000  # turns of loops and calls of functions, together
_MOST_READ: Final = 2**22  # characters that they read again
OPEN: Final = {"if": "fi", "while": "done", "until": "done", "for": "done", "select": "done", "case": "esac", "{": "}"}


@dataclass
class Shared:
    """State shared by a script, its subshells and the files that it sources.

    functions: body, line, and how often called. steps, characters: turns of loops and calls so far, and what they read.
    bodies: here-documents. missing: sourced files that are not there. literals: what the script compares a variable
    with; refused: values with which it ends. unset: variables that a condition takes as unset, by line.
    """

    functions: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    steps: int = 0
    characters: int = 0
    bodies: list[tuple[str, int]] = field(default_factory=list)
    missing: list[tuple[str, int]] = field(default_factory=list)
    literals: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, set[str]] = field(default_factory=dict)
    unset: dict[str, int] = field(default_factory=dict)


@dataclass
class Blocks(Expansion):
    """A place in a script, and the blocks that are open there."""

    commands: list[list[Word]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks: list[Block] = []
        self.joins: dict[int, str] = {}  # commands behind && or ||
        self.outer: bool | None = True  # whether the whole text runs
        self.gate: bool | None = True  # whether the next command runs, by the && or || before it
        self.last: bool | None = True  # whether the last command succeeded
        self.opened: list[tuple[str, int, int]] = []  # functions whose end is to come: name, where, line
        self.shared = Shared()

    def live(self) -> bool | None:
        """Whether the current command runs; None: unknown."""
        found = both(self.outer, self.gate)
        for block in self.blocks:
            found = both(found, True if block.testing else block.live)
        return found

    def testing(self) -> bool:
        """A condition is being read."""
        return bool(self.blocks) and self.blocks[-1].testing

    def open_block(self, word: str, line: int) -> None:
        """A keyword that begins a block."""
        block = Block(OPEN[word], line, live=word != "case", begun=len(self.commands))
        if word in ("if", "while", "until"):
            block.testing, block.live = True, None
        if word in ("while", "until"):
            block.start, block.until = (self.at, self.line), word == "until"
        if word == "{":
            block.live = self.gate
        self.gate = True
        self.blocks.append(block)

    def arm(self, block: Block, word: str) -> None:
        """A keyword inside a block: what follows runs or does not."""
        self.gate = True
        if word == "else":
            block.begin_else()
        elif word == "elif":
            block.begun, block.live, block.testing, block.assumed = len(self.commands), None, True, False
        elif block.testing:
            self.judge(block)
        elif word == "do" and block.start is None:
            block.start = (self.at, self.line)

    def judge(self, block: Block) -> None:
        """`then`, or a loop's `do`: judge the commands of the condition."""
        conditions, tests = Conditions(), self.commands[block.begun :]
        joins = [self.joins.get(at, "") for at in range(block.begun + 1, len(self.commands))]
        result = conditions.hold(tests, joins)
        del self.commands[block.begun :]
        self.joins.clear()
        if block.start is not None:
            block.settled = block.open = False
            result = None if result is None else result != block.until
            if any(unknown.what in ("$#", "$1") for words in tests for word in words for unknown in word.unknown):
                result = False  # a loop over the script's arguments, which are not given
        block.assumed, block.tested = bool(conditions.assumed), conditions.tested
        block.begin_arm(result)
        self.note(conditions)

    def note(self, conditions: Conditions) -> None:
        """Note the values that conditions compare variables with, and variables assumed unset."""
        for name, value in conditions.tested:
            if name and value not in self.shared.literals.setdefault(name, []):
                self.shared.literals[name].append(value)
        for word in conditions.assumed:
            self.shared.unset.setdefault(word.unknown[0].what, word.line)

    def begin_for(self, words: list[Word], block: Block) -> None:
        """`for NAME in WORDS`: one iteration per word; with unknown words, one iteration that may happen."""
        given = [[(protected(c), word.line) for c in word.text] for word in words[3:]]
        unknown = len(words) < 3 or any(word.unknown for word in words[3:])
        block.name = words[1].text if len(words) > 1 and words[1].text.isidentifier() else "_"
        block.live, block.values = (None, []) if unknown else (bool(given), given[1:])
        if unknown or given:
            self.variables[block.name] = [self.mark(f"${block.name}", "variable")] if unknown else [given[0]]

    def close(self, block: Block) -> None:
        """The end of a block: another turn of a loop, or the end of a function's text."""
        self.blocks.pop()
        self.gate = self.last = True
        if self.opened and block.end == "}" and (block.name, block.begun) == self.opened[-1][:2]:
            name, start, line = self.opened.pop()
            if self.live() is not False:
                self.shared.functions[name] = (self.text[start : self.at - 1], line, 0)
        if block.end != "done" or block.start is None or self.live() is False:
            return
        if not block.values and (block.name or not block.live):
            return
        self.step(self.at - block.start[0], "a loop does not end")
        self.blocks.append(block)
        if block.values:
            self.variables[block.name], block.live = [block.values.pop(0)], True
        else:
            block.testing, block.live, block.begun = True, None, len(self.commands)
        self.at, self.line = block.start

    def step(self, characters: int, problem: str) -> None:
        """Count a turn or a call, and the characters that it reads again. Raises PlanError."""
        self.shared.steps += 1
        self.shared.characters += characters
        if self.shared.steps > _MOST_STEPS or self.shared.characters > _MOST_READ:
            raise self.refuse(problem, f"fewer than {_MOST_STEPS} turns and calls")

    def pattern(self, block: Block) -> None:
        """An arm of a `case`: its patterns, up to the parenthesis."""
        self._skip_lines()
        if re.match(r"esac(?![\w-])", self.text[self.at : self.at + 5]):
            return
        self.at += self.peek() == "("
        patterns: list[Word] = []
        self.skip_blanks()
        while self.peek() not in ("", *"\n;&<>()"):
            patterns += words_of(self.word(), self.unknown)
            self.skip_blanks()
            self.at += self.peek() == "|"
            self.skip_blanks()
        self.at += self.peek() == ")"
        subject, conditions = block.subject or Word("", self.line), Conditions()
        results = [conditions.one([Word("[[", 0), subject, Word("==", 0), word, Word("]]", 0)]) for word in patterns]
        block.begin_arm(True if True in results else None if None in results else False)
        block.tested = [pair for pair in conditions.tested if not set(pair[1]) & set("*?[")]
        self.note(Conditions(tested=block.tested))

    def _skip_lines(self) -> None:
        self.skip_blanks()
        while self.peek() == "\n":
            self.next()
            self.skip_blanks()
