# SPDX-License-Identifier: Apache-2.0
"""Change single values of an XML text and leave every other byte as it came.

A serialiser would lose CDATA sections, quotes and prefixes, and stock scripts depend on them: kvm/deploy
looks for `source file='` in single quotes, live datastore migration for `CDATA[` in the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Optional
from xml.parsers import expat

from ..errors import BadArguments
from .values import ID_BITS, integer, is_yes

ATTRIBUTE = re.compile(rb"""([^\s=<>"'/]+)\s*=\s*("[^"]*"|'[^']*')""")
DEEPEST = 250
"""oned nests 8 deep, libvirt 200 layers of a disk at most; more is an attack on the reader."""


class Element:
    """An element and where it lies in the text."""

    def __init__(self, name: str, attributes: dict[str, str], start: int, inside: int) -> None:
        self.name = name
        self.attributes = attributes
        self.start = start
        self.inside = inside
        """Offset behind the start tag."""
        self.close = inside
        """Offset of the end tag; of an empty-element tag, its end."""
        self.end = inside
        self.is_empty_tag = False
        self.text = ""
        self.children: list[Element] = []

    def all(self, name: str) -> list[Element]:
        return [child for child in self.children if child.name == name]

    def first(self, name: str) -> Optional[Element]:
        return next(iter(self.all(name)), None)

    def find(self, *path: str) -> Iterator[Element]:
        if not path:
            yield self
            return
        for child in self.all(path[0]):
            yield from child.find(*path[1:])

    def value(self, name: str) -> str:
        """Return the text of the child `name` as it stands, '' without one."""
        child = self.first(name)
        return child.text if child else ""

    def number(self, name: str) -> Optional[int]:
        """Return the number that oned reads as an id from the child `name`, None if it reads none."""
        return integer(self.value(name), ID_BITS)

    def is_yes(self, name: str) -> bool:
        return is_yes(self.value(name))


def escape(text: str) -> str:
    """Return `text` for an attribute in either kind of quotes, or between tags."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&apos;"), ('"', "&quot;")):
        text = text.replace(char, entity)
    return text


class Markup:
    """An XML text, and the changes to be made to it."""

    def __init__(self, text: bytes, root: str) -> None:
        self.source = text
        self._changes: list[tuple[int, int, str]] = []
        self.root = _parse(text, root)

    def set_attribute(self, element: Element, name: str, value: str) -> None:
        """Give `element` the attribute `name`; it keeps its place and its quotes if it is there."""
        if element.attributes.get(name) == value:
            return
        tag = self.source[element.start : element.inside]
        # The element's name matches nothing, as no `=` follows it.
        for match in ATTRIBUTE.finditer(tag):
            if match.group(1) == name.encode():
                begin, end = match.span(2)
                self._changes.append((element.start + begin + 1, element.start + end - 1, escape(value)))
                return
        at = element.inside - (2 if element.is_empty_tag else 1)
        self._changes.append((at, at, f" {name}='{escape(value)}'"))

    def set_text(self, element: Element, text: str) -> None:
        """Replace all that is between the tags of `element`."""
        if element.is_empty_tag:
            self._changes.append(
                (element.start, element.end, f"<{element.name}>{escape(text)}</{element.name}>")
            )
        elif element.text != text or element.children:
            self._changes.append((element.inside, element.close, escape(text)))

    def set_child(self, parent: Element, name: str, text: str) -> None:
        """Give `parent` one child `name` with `text`."""
        children = parent.all(name)
        for child in children:
            self.set_text(child, text)
        if not children:
            self._changes.append((parent.close, parent.close, f"<{name}>{escape(text)}</{name}>"))

    def insert_before(self, element: Element, markup: str) -> None:
        self._changes.append((element.start, element.start, markup))

    def insert_after(self, element: Element, markup: str) -> None:
        """Put `markup` behind `element`, on a line of its own if that is how it stands."""
        self._changes.append((element.end, element.end, self._space_before(element).decode() + markup))

    def replace(self, element: Element, *markup: str) -> None:
        """Put elements in the place of `element`, each on a line of its own if that is how it stands."""
        self._changes.append((element.start, element.end, self._space_before(element).decode().join(markup)))

    def remove(self, element: Element) -> None:
        self._changes.append((element.start, element.end, ""))

    def remove_line(self, element: Element) -> None:
        """Take `element` out with the space in front of it."""
        self._changes.append((element.start - len(self._space_before(element)), element.end, ""))

    def _space_before(self, element: Element) -> bytes:
        at = element.start
        while self.source[at - 1 : at].isspace():
            at -= 1
        return self.source[at : element.start]

    def result(self) -> bytes:
        parts: list[bytes] = []
        at = 0
        for begin, end, new in sorted(self._changes):
            parts += [self.source[at:begin], new.encode()]
            at = end
        return b"".join([*parts, self.source[at:]])


def _parse(text: bytes, root: str) -> Element:
    """Return the root element of `text`; raise BadArguments unless it is UTF-8 XML whose root is `root`."""
    # Offsets count bytes of UTF-8: other encodings, and entities, are not needed and not allowed.
    if b"\0" in text:
        raise BadArguments(f"the <{root}> XML holds a NUL byte")
    parser = expat.ParserCreate("UTF-8")
    parser.buffer_text = True
    top = Element("", {}, 0, 0)
    stack = [top]

    def start(name: str, attributes: dict[str, str]) -> None:
        begin = parser.CurrentByteIndex
        inside = _tag_end(text, begin)
        element = Element(name, attributes, begin, inside)
        element.is_empty_tag = text[inside - 2 : inside] == b"/>"
        stack[-1].children.append(element)
        stack.append(element)
        if len(stack) > DEEPEST:
            raise BadArguments(f"the <{root}> XML is nested too deep")

    def end(_name: str) -> None:
        element = stack.pop()
        if not element.is_empty_tag:
            element.close = parser.CurrentByteIndex
            element.end = _tag_end(text, element.close)

    def data(characters: str) -> None:
        stack[-1].text += characters

    def doctype(*_: object) -> None:
        raise BadArguments(f"the <{root}> XML has a DOCTYPE")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = data
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as e:
        raise BadArguments(f"the <{root}> XML does not parse: {e}") from None
    if top.children[0].name != root:
        raise BadArguments(f"XML is <{top.children[0].name}> where <{root}> belongs")
    return top.children[0]


def _tag_end(text: bytes, begin: int) -> int:
    """Return the offset behind the tag at `begin`; expat has found it well-formed, so quotes pair."""
    at = begin
    while True:
        char = text[at : at + 1]
        if char in (b'"', b"'"):
            at = text.index(char, at + 1)
        elif char == b">":
            return at + 1
        at += 1
