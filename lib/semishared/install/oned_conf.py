# SPDX-License-Identifier: Apache-2.0
"""oned.conf with the place of every attribute, so that an edit changes no other byte.

The syntax is that of OpenNebula's own template files:

    NAME = value                      bare: no blank, no `=`, `#`, `,`, `[` or `]` in it
    NAME = "value"                    may span lines; \" is a quote
    NAME = [ KEY = "value", KEY = value ]
    NAME =                            empty
    # comment                         to the end of its line, wherever a name, comma or bracket may stand

Why not augeas: few front-ends have the package of its lens for oned.conf, which wants one attribute per line
and gives up on files that oned itself reads. A single path is always tested.
"""

from __future__ import annotations

import re
from typing import Optional

from ..errors import BadConfiguration
from ..named import NamedTuple

BLANKS = re.compile(r"[ \t\n]*")
COMMENT = re.compile(r"[ \t]*#[^\n]*(?:\n|\Z)")
NAME = re.compile(r"[A-Za-z0-9_]+")
EQUALS = re.compile(r"[ \t]*=[ \t]*")
QUOTED = re.compile(r'"(?:\\"|[^"])*"')
BARE = re.compile(r"[^=# \t\n,\[\]]+")


class Value(NamedTuple):
    """A value, and its place with its quotes."""

    text: str
    start: int
    end: int


class Field(NamedTuple):
    """`NAME = value` inside brackets; the name in capitals, as oned keeps it."""

    name: str
    value: Value


class Attribute(NamedTuple):
    """One attribute, from its name to the end of its value or bracket."""

    name: str
    value: Value
    """The value; the whole bracket if it has fields."""
    fields: Optional[tuple[Field, ...]]
    start: int
    end: int

    def field(self, name: str) -> Optional[Value]:
        """Return the value of field `name` in force (the first one, as for oned), None if there is none."""
        return next((field.value for field in self.fields or () if field.name == name), None)

    def text(self, name: str) -> str:
        """Return the text of field `name`, '' if there is none."""
        value = self.field(name)
        return value.text if value else ""


class _Reader:
    def __init__(self, text: str, path: str) -> None:
        self.text, self.path, self.at = text, path, 0

    def fail(self, what: str) -> BadConfiguration:
        line = self.text.count("\n", 0, self.at) + 1
        return BadConfiguration(f"{self.path} line {line}: {what}")

    @property
    def next(self) -> str:
        return self.text[self.at : self.at + 1]

    def expect(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self.text, self.at)
        if not match:
            raise self.misplaced(what)
        self.at = match.end()
        return match.group()

    def misplaced(self, what: str) -> BadConfiguration:
        found = repr(self.next) if self.next else "the end of the file"
        return self.fail(f"{what} belongs where {found} is")

    def skip(self) -> None:
        while True:
            match = COMMENT.match(self.text, self.at) or BLANKS.match(self.text, self.at)
            if not match or match.end() == self.at:
                return
            self.at = match.end()

    def name(self) -> str:
        name = self.expect(NAME, "a name").upper()
        self.expect(EQUALS, "'='")
        return name

    def value(self) -> Value:
        quoted, bare = QUOTED.match(self.text, self.at), BARE.match(self.text, self.at)
        start = self.at
        if quoted and (not bare or quoted.end() >= bare.end()):
            self.at = quoted.end()
            return Value(quoted.group()[1:-1].replace('\\"', '"'), start, self.at)
        if not bare or bare.group().startswith('"'):
            raise self.fail("a value's quotes are not closed") if bare else self.misplaced("a value")
        self.at = bare.end()
        return Value(bare.group(), start, self.at)

    def fields(self) -> tuple[Field, ...]:
        found: list[Field] = []
        self.at += 1
        self.skip()
        while self.next != "]" or found:
            found.append(Field(self.name(), self.value()))
            self.skip()
            if self.next == "]":
                break
            if self.next != ",":
                raise self.misplaced("',' or ']'")
            self.at += 1
            self.skip()
        self.at += 1
        return tuple(found)

    def attribute(self) -> Attribute:
        start = self.at
        name = self.name()
        begin = self.at
        if self.next == "\n":
            return Attribute(name, Value("", begin, begin), None, start, begin)
        if self.next == "[":
            fields = self.fields()
            return Attribute(name, Value(self.text[begin : self.at], begin, self.at), fields, start, self.at)
        value = self.value()
        return Attribute(name, value, None, start, self.at)


def parse(text: str, path: str = "oned.conf") -> list[Attribute]:
    """Return all attributes in order; raise BadConfiguration, naming `path` and line, for another syntax."""
    if "\r" in text or "\0" in text:
        raise BadConfiguration(f"{path} has carriage returns or NUL bytes")
    reader = _Reader(text, path)
    found = []
    reader.skip()
    while reader.at < len(text):
        found.append(reader.attribute())
        reader.skip()
    return found


def quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


class Edit(NamedTuple):
    """Put `text` in the place of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


def apply(text: str, edits: list[Edit]) -> str:
    """Return `text` with all edits, which must not overlap, done."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def within(value: Value, edits: list[Edit]) -> list[Edit]:
    """Return edits of a value's text as edits of the file."""
    if value.end - value.start == len(value.text):
        new = apply(value.text, edits)
        return [Edit(value.start, value.end, new if BARE.fullmatch(new) else quoted(new))] if edits else []

    def place(at: int) -> int:
        # A quote in the text is two characters in the file.
        return value.start + 1 + at + value.text.count('"', 0, at)

    return [Edit(place(edit.start), place(edit.end), edit.text.replace('"', '\\"')) for edit in edits]


def removal(text: str, attribute: Attribute) -> Edit:
    """Return the edit that removes an attribute, with its lines if nothing else is on them."""
    start = text.rfind("\n", 0, attribute.start) + 1
    end = text.find("\n", attribute.end)
    end = len(text) if end < 0 else end + 1
    if text[start : attribute.start].strip(" \t") or text[attribute.end : end].strip(" \t\n"):
        return Edit(attribute.start, attribute.end, "")
    return Edit(start, end, "")


class Word(NamedTuple):
    """One word of a driver's ARGUMENTS, which oned splits at blanks; `start` and `end` count in that text."""

    text: str
    start: int
    end: int


class Arguments:
    """ARGUMENTS of a driver, read as by GetoptLong: options anywhere, -d x, -dx, --long x, --long=x."""

    def __init__(self, text: str, long_names: dict[str, str], flags: str = "") -> None:
        """Parse `text`; `long_names`: letter to long name of options, `flags`: letters without a value."""
        self.text = text
        self.values: dict[str, list[Word]] = {}
        """Option letter -> its values; the last one counts. An option without a value has an empty word."""
        self.whole: dict[str, list[Word]] = {}
        """Option letter -> the options with their values."""
        self.words: list[Word] = []
        """Words that are no options."""
        todo = [Word(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+", text)]
        while todo:
            word = todo.pop(0)
            letter, value = self._option(word, long_names)
            if not letter:
                self.words.append(word)
                continue
            if value is None:
                value = Word("", word.end, word.end)
                if letter not in flags and todo and not todo[0].text.startswith("-"):
                    value = todo.pop(0)
            self.values.setdefault(letter, []).append(value)
            self.whole.setdefault(letter, []).append(Word("", word.start, max(word.end, value.end)))

    def _option(self, word: Word, long_names: dict[str, str]) -> tuple[str, Optional[Word]]:
        """Return the option letter of `word`, '' if it is none, and the value that is part of it."""
        text = word.text
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text[2:].partition("=")
            letter = next((letter for letter, long in long_names.items() if long.startswith(name)), "")
            return letter or name, Word(value, word.end - len(value), word.end) if equals else None
        if text.startswith("-") and len(text) > 1:
            rest = text[2:]
            return text[1], Word(rest, word.start + 2, word.end) if rest else None
        return "", None

    def last(self, letter: str) -> Optional[Word]:
        """Return the value in force of an option; None without one."""
        return self.values[letter][-1] if letter in self.values else None
