"""Commands of a shell script, without running it: assignments, conditions, loops, functions, here-documents, sourced files.

Nothing is executed. What only a run knows (a command's output, an unset variable, an arm of a condition) stays in the
words as a mark that says what it was and where it stands. Commands are taken to succeed, and arms that end the script
are taken to be for runs that go wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from simulator.base.errors import PlanError
from simulator.formats.readers.plans.shell_blocks import OPEN, Blocks
from simulator.formats.readers.plans.shell_expansion import PLACEHOLDER
from simulator.formats.readers.plans.shell_tests import Block, Conditions
from simulator.formats.readers.plans.shell_words import MARK, Chars, Word, protected, words_of

_MOST_NESTED: Final = 12  # shells, sourced files and calls of functions inside each other

_ASSIGN: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARE: Final = {"export", "declare", "local", "readonly", "typeset"}
_INNER: Final = {"then", "else", "elif", "do"}
_BODY: Final = re.compile(r"(\s|#[^\n]*\n)*\{")
_FUNCTION: Final = re.compile(rf"[ \t]*([\w-]+)[ \t]*(\([ \t]*\))?{_BODY.pattern}")
_TESTS: Final = {"[", "[[", "test", "((", "!", "true", "false"}


@dataclass
class Shell(Blocks):
    """Reads one script. define: variables as the environment would set them, and its arguments as `@`.

    source: reads a file that the script takes in, by its name without folders; None: there is none.
    """

    source: Callable[[str], str | None] = lambda _: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nested = 0
        self.guessed = False  # `last` takes a variable as unset
        self.stopped = ""  # the command that ended it

    def read(self) -> list[list[Word]]:
        """Every simple command that runs or may run, in that order."""
        listing = re.match(r"([ \t]*(#[^\n]*)?\n)*[ \t]*--[A-Za-z]", self.text) is not None
        words: list[Word] = []
        while not self.stopped:
            self.skip_blanks()
            char = self.peek()
            if not char:
                break
            if char in "&|<>()" and _in_brackets(words):
                words.append(self._sign())
            elif char == "\n" and listing:
                self.next()
            elif char in "\n;&|":
                self._end(words)
                words = []
                self._join()
            elif char in "()":
                words = self._parenthesis(words)
            elif found := PLACEHOLDER.match(self.text, self.at):
                words.append(Word(found.group(), self.line))
                self.at = found.end()
            elif redirect := re.match(r"\d*(<<<|<<-?|>>|[<>]&?|&>)", self.text[self.at : self.at + 12]):
                self._redirect(redirect.group())
            elif not self._assigns(words):
                more = words_of(self.word(), self.unknown)
                words += more
                words = self._keyword(words) if more else words
        self._end(words)
        return self.commands

    def read_uncalled(self) -> list[list[Word]]:
        """Commands of functions that are never called, and of here-documents: another script may run them."""
        for body, line, calls in list(self.shared.functions.values()):
            self.commands += self._inner(body, line) if not calls else []
        for text, line in list(self.shared.bodies):
            self.commands += self._inner(text, line)
        return self.commands

    # -- what ends a command, and what it does -------------------------------------------------------------------

    def _sign(self) -> Word:
        sign = self.peek(2) if self.peek(2) in ("&&", "||") else self.peek()
        self.at += len(sign)
        return Word(sign, self.line)

    def _join(self) -> None:
        """Handle a command's separator; && and || decide on the next one."""
        char = self.next()
        self.gate = True
        if char in "&|" and self.peek() == char:
            self.next()
            self.joins[len(self.commands)] = 2 * char
            if not self.testing():
                self.gate = self.last if char == "&" or self.last is None else not self.last
        elif char == ";" and self.peek() in (";", "&") and self.blocks and self.blocks[-1].end == "esac":
            self.next()
            self.at += self.peek() == "&"
            self.pattern(self.blocks[-1])

    def _end(self, words: list[Word]) -> None:
        """Take a command."""
        if words and words[0].text in ("for", "select") and self.blocks:
            self.begin_for(words, self.blocks[-1])
            return
        live = self.live()
        if not words or live is False:
            return
        self.commands += self._run(words, live)
        if not self.testing():
            conditions = Conditions()
            self.last = conditions.one(words) if words[0].text in _TESTS else True
            self.guessed = bool(conditions.assumed)
            self.note(conditions)

    def _run(self, words: list[Word], live: bool | None) -> list[list[Word]]:  # noqa: FBT001
        """The command itself; of `bash -c "…"`, `eval …` and `source …` the commands inside, behind the words before."""
        texts = [word.text for word in words]
        match texts:
            case [name, *_] if name in self.shared.functions and not self.testing():
                return self._call(name, words[1:])
            case ["eval", _, *_]:
                return self._inner(" ".join(texts[1:]), words[1].line)
            case ["source" | ".", name, *_]:
                return self._source(name, words[0].line)
            case ["exit" | "return", *_] if not self.testing():
                self._leave(texts[0], live)
            case _ if live:
                self._builtin(texts, words[0].line)
        for index in range(len(words) - 2):
            if texts[index] in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", texts[index + 1]):
                inside = self._inner(texts[index + 2], words[index + 2].line)
                return [[*words[:index], *command] for command in inside]
        return [words]

    def _builtin(self, texts: list[str], line: int) -> None:
        match texts:
            case ["shift", *count]:
                steps = int(count[0]) if count and count[0].isdecimal() and len(count[0]) < 5 else 1
                self.pass_on(self.arguments.get("@", [])[steps:])
            case ["set", "--", *rest]:
                self.pass_on([[(protected(c), line) for c in text] for text in rest])
            case ["unset", *names]:
                for name in names:
                    self.variables.pop(name, None)
            case ["break" | "continue" as word, *_]:
                for block in reversed(self.blocks):
                    block.live = False
                    if block.end == "done":
                        block.values = block.values if word == "continue" else []
                        return

    def _inside(self, text: str, line: int, counts: int) -> Shell:
        if self.nested >= _MOST_NESTED:
            raise self.refuse("shells and functions are nested too deeply")
        shell = replace(self, text=text, commands=[])
        shell.unknown, shell.shared, shell.arguments = self.unknown, self.shared, self.arguments
        shell.line, shell.nested, shell.counts = line, self.nested + 1, counts * self.counts
        return shell

    def _inner(self, text: str, line: int, counts: int = 1, arguments: list[Chars] | None = None) -> list[list[Word]]:
        """Commands of a text that runs here. arguments: those of a function."""
        shell = self._inside(text, line, counts)
        shell.variables, shell.outer = self.variables, self.live()
        if arguments is not None:
            shell.pass_on(arguments)
        found = shell.read()
        self.spent += shell.spent
        self.stopped = "exit" if shell.stopped == "exit" else self.stopped
        return found

    def _source(self, path: str, line: int) -> list[list[Word]]:
        """A file beside the script, read in; its lines are that of the `source`."""
        name = path.rpartition("/")[2]
        text = self.source(name) if name and name.isprintable() and name.isascii() else None
        if text is None:
            self.shared.missing.append((name if name.isascii() and name else "a file", line))
            return []
        self.step(len(text), "files take each other in without end")
        return self._inner(text, line, counts=0)

    def output(self, text: str) -> Chars | None:
        """What `echo`, `expr`, `basename` and `… | bc` print, in conditions and loops too."""
        if self.nested >= _MOST_NESTED or not re.match(r"\s*(echo|expr|basename|case|if|for)\s", text):
            return None
        shell = self._inside(text, self.line, 0)
        shell.variables = dict(self.variables)
        try:
            printed = [[word.text for word in words] for words in shell.read()]
        except PlanError:
            return None
        match printed:
            case [["expr", *rest]] | [["echo", *rest], ["bc", *_]]:
                return self.evaluated(" ".join(rest))
            case [["basename", path, *suffix]]:
                name = path.rstrip("/").rpartition("/")[2]
                return [(protected(c), self.line) for c in (name.removesuffix(suffix[0]) if suffix else name)]
            case [["echo", *rest]] | [
                ["echo", *rest],
                ["xargs"] | ["tr", "-s", " "] | ["sed", *_, "s/  */ /g" | r"s/\s\+/ /g"],
            ]:
                return [(c, self.line) for c in " ".join(text for text in rest if text not in ("-n", "-e"))]
        return None

    def _leave(self, word: str, live: bool | None) -> None:  # noqa: FBT001
        """`exit` or `return`: the end, or an arm that no run takes that trains."""
        doubtful = next((block for block in reversed(self.blocks) if block.live is None or block.assumed), None)
        if doubtful is not None and doubtful.end in ("fi", "esac"):
            for name, value in doubtful.tested if word == "exit" else ():
                self.shared.refused.setdefault(name, set()).add(value)
            doubtful.leave()
        elif live and doubtful is None and not (self.guessed and self.joins.get(len(self.commands))):
            self.stopped = word

    def _keyword(self, words: list[Word]) -> list[Word]:
        """Keywords begin and end blocks; arms of a condition that the script itself settles run or do not."""
        word, block = words[-1].text, self.blocks[-1] if self.blocks else None
        if block and block.end == "esac" and block.subject is None and word == "in" and 2 <= len(words) <= 3:
            block.subject = words[1] if len(words) == 3 else Word("", words[0].line)
            self.pattern(block)
        elif len(words) != 1:
            return words
        elif word == "function" and (found := _FUNCTION.match(self.text, self.at)):
            self._define(found.group(1), found.end())
        elif word in OPEN:
            self.open_block(word, words[0].line)
            return words if word in ("for", "select", "case") else []
        elif block is not None and word == block.end:
            self.close(block)
        elif block is not None and word in _INNER and block.end in ("fi", "done"):
            self.arm(block, word)
        elif word not in _INNER and word != "}":
            return words
        return []

    # -- functions, groups and here-documents --------------------------------------------------------------------

    def _define(self, name: str, start: int) -> None:
        """Its body is passed over, to its end."""
        self.line += self.text.count("\n", self.at, start) * self.counts
        self.at = start
        self.opened.append((name, start, self.line))
        self.blocks.append(Block("}", self.line, live=False, begun=start, name=name))

    def _call(self, name: str, words: list[Word]) -> list[list[Word]]:
        """A function: its body is read with the call's words."""
        body, line, calls = self.shared.functions[name]
        self.step(len(body), "functions are called too often")
        self.shared.functions[name] = (body, line, calls + 1)
        return self._inner(body, line, arguments=[[(protected(c), word.line) for c in word.text] for word in words])

    def _parenthesis(self, words: list[Word]) -> list[Word]:
        """`name() {` opens a function, `((…))` computes, a bare parenthesis groups."""
        char = self.next()
        if char == "(" and len(words) == 1 and self.peek() == ")" and (found := _BODY.match(self.text, self.at + 1)):
            self._define(words[0].text, found.end())
            return []
        if char == "(" and self.peek() == "(" and (not words or words[0].text in ("for", "!")):
            end = self.text.find("))", self.at)
            text = self.text[self.at + 1 : end if end >= 0 else len(self.text)]
            self.at = end + 2 if end >= 0 else len(self.text)
            if words and words[0].text == "for":
                return [*words, Word(text, self.line)]
            return [*words, Word("((", self.line), *words_of(self.evaluated(text), self.unknown)]
        self._end(words)
        if char == "(":
            self.blocks.append(Block(")", self.line, live=self.gate))
        elif self.blocks and self.blocks[-1].end == ")":
            self.blocks.pop()
        self.gate = True
        return []

    def _redirect(self, sign: str) -> None:
        place = self.at
        self.at += len(sign)
        self.skip_blanks()
        target = "".join(c for c, _ in self.word() if c != "\x01") if self.peek() not in ("", "\n") else ""
        if sign in ("<<", "<<-") and place not in self.documents:
            self.documents.add(place)
            self._document(target)

    def _document(self, target: str) -> None:
        """A here-document begins behind this line, or behind the one before it."""
        line_end = self.text.find("\n", self.at)
        start = self.skips[line_end][0] - 1 if line_end in self.skips else line_end
        body = (
            re.compile(rf"\n(.*?\n)??[\t ]*{re.escape(target)}(?=\n|$)", re.DOTALL).search(self.text, start)
            if start >= 0
            else None
        )
        if body is None:
            raise self.refuse(f"the text up to {target!r} does not end")
        end = min(body.end() + 1, len(self.text))
        self.skips[line_end] = (end, self.text.count("\n", line_end + 1, end))
        if self.live() is not False:
            self.shared.bodies.append((body.group(1) or "", self.line + 1))

    # -- assignments ---------------------------------------------------------------------------------------------

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
        live = self.live()
        if name in self.defined or live is False:  # the caller's word stands
            return True
        if live is None:
            rest = None if adds else _added(self.variables.get(name, []), value)
            value, adds = (
                self._conditional(name, rest or value, adds or ("+" if rest else "")),
                adds or ("+" if rest else ""),
            )
            is_array = is_array and len(self.variables.get(name, [])) != 1
        elif not adds and not is_array:
            self._name(name, value[0])
        old = self.variables.get(name, [])
        if adds and is_array:
            value = [*old, *value]
        elif adds:
            value = [[*(old[0] if old else []), *value[0]], *old[1:]]
        self.variables[name] = [self.spend(part) for part in value]
        return True

    def _name(self, name: str, value: Chars) -> None:
        """Name an unnamed unknown by the variable that holds it."""
        marks = [ord(c) - MARK for c, _ in value if c != "\x01"]
        if len(marks) == 1 and 0 <= marks[0] < len(self.unknown) and not self.unknown[marks[0]].name:
            self.unknown[marks[0]] = replace(self.unknown[marks[0]], name=name)

    def _conditional(self, name: str, value: list[Chars], adds: str) -> list[Chars]:
        """A value that a condition may give: a mark that knows which options it may hold."""
        line = next((block.line for block in self.blocks if block.live is None), self.line)
        old = [] if adds else self.variables.get(name, [])
        words = [word for part in (*old, *value) for word in words_of(part, self.unknown)]
        within = [unknown for word in words for unknown in word.unknown]
        names = {one.partition("=")[0] for word in words for one in word.text.split() if one.startswith("--")}
        names.update(option for unknown in within for option in unknown.options)
        asks = {one for block in self.blocks if block.live is None for one, _ in block.tested if one}
        asks.update(one for unknown in within if unknown.kind == "condition" for one in unknown.asks)
        chars = self.mark(f"${name} depends on what begins at line {line}", "condition")
        self.unknown[-1] = replace(self.unknown[-1], options=frozenset(names), asks=frozenset(asks))
        return [[(" ", self.line), *chars] if adds else chars]


def _added(old: list[Chars], new: list[Chars]) -> list[Chars] | None:
    """What `X="$X more"` or `X=(${X[@]} more)` adds to the old value; None where the new one does not begin with it."""
    if len(new) > len(old) > 0 and [_plain(one) for one in new[: len(old)]] == [_plain(one) for one in old]:
        return new[len(old) :]
    if len(old) == len(new) == 1 and _plain(old[0]) and _plain(new[0]).startswith(_plain(old[0])):
        chars = [char for char in new[0] if char[0] != "\x01"]
        return [chars[len(_plain(old[0])) :]]
    return None


def _plain(chars: Chars) -> str:
    return "".join(protected(c) for c, _ in chars if c != "\x01")


def _in_brackets(words: list[Word]) -> bool:
    """`[[` is open, where && and || stand between tests."""
    texts = [word.text for word in words[-64:]]
    return "[[" in texts[:2] and "]]" not in texts
