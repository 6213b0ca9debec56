# SPDX-License-Identifier: Apache-2.0
"""OpenNebula templates: text to nested dictionaries, dictionaries to the XML the API serves."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Sequence, Tuple, Union
from xml.etree import ElementTree

Vector = Dict[str, str]
Value = Union[str, Vector, List[Vector]]
Template = Dict[str, Value]

_PAIR = re.compile(r'\s*([A-Za-z_][\w/-]*)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s,\]"]*)\s*', re.DOTALL)
_NAME = re.compile(r"\s*([A-Za-z_][\w/-]*)\s*=\s*")


def parse(text: str) -> Template:
    """Read template text; refuse what is not a template instead of guessing."""
    result: Template = {}
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    position = 0
    while text[position:].strip():
        name = _NAME.match(text, position)
        if name is None:
            raise ValueError(f"not a template at: {text[position : position + 40]!r}")
        position = name.end()
        if text[position : position + 1] == "[":
            vector, position = _vector(text, position + 1)
            add(result, name.group(1).upper(), vector)
        else:
            pair = _PAIR.match(text, name.start())
            if pair is None:
                raise ValueError(f"no value at: {text[position : position + 40]!r}")
            add(result, name.group(1).upper(), _unquote(pair.group(2)))
            position = pair.end()
    return result


def add(template: Template, name: str, value: Union[str, Vector]) -> None:
    """Add one attribute; a repeated vector becomes a list, a repeated scalar replaces the first."""
    old = template.get(name)
    if isinstance(value, dict) and isinstance(old, dict):
        template[name] = [old, value]
    elif isinstance(value, dict) and isinstance(old, list):
        old.append(value)
    else:
        template[name] = value


def merge(template: Template, new: Mapping[str, Value]) -> None:
    """Update with append, as Template::merge does (src/template/Template.cc).

    Each attribute that the new template names goes, all of that name, and the new ones come; a vector without
    fields only goes. Attributes that it does not name stay.
    """
    for name, value in new.items():
        template.pop(name, None)
        many = [one for one in vectors(new, name) if one]
        if isinstance(value, str):
            template[name] = value
        elif many:
            template[name] = many if len(many) > 1 else many[0]


def parse_any(text: str, root: str) -> Template:
    """Read a template as text or, if it begins as such, as XML (Template::parse_str_or_xml)."""
    if not text.startswith("<"):
        return parse(text)
    element = ElementTree.fromstring(text)
    if element.tag != root:
        raise ValueError(f"<{element.tag}> where <{root}> belongs")
    return from_xml(element)


def restricted_change(new: Template, base: Template, restricted: Sequence[str], append: bool) -> str:
    """Return the attribute for which oned refuses a user's update, '' for none (Template::check_restricted).

    `restricted`: NAME, which is compared as a single attribute alone, or NAME/FIELD of vectors. A single one
    that an update leaves out is added to it.
    """
    for row in restricted:
        name, slash, field = row.partition("/")
        if slash:
            was, now = (sorted(one[field] for one in vectors(of, name) if field in one) for of in (base, new))
            if was != now and (name in new or (not append and name in base)):
                return name
        elif isinstance(new.get(name), str):
            if new[name] != scalar(base, name):
                return name
        elif isinstance(base.get(name), str):
            new[name] = base[name]
    return ""


def vectors(template: Mapping[str, Value], name: str) -> List[Vector]:
    """List the vectors of one name, whether there are none, one or many."""
    value = template.get(name)
    if value is None or isinstance(value, str):
        return []
    return [value] if isinstance(value, dict) else value


def scalar(template: Mapping[str, Value], name: str, default: str = "") -> str:
    """Return a plain attribute, or the default when it is absent or a vector."""
    value = template.get(name, default)
    return value if isinstance(value, str) else default


def cdata(text: str) -> str:
    """Wrap text as oned does; the end mark inside it must be split."""
    return "<![CDATA[" + text.replace("]]>", "]]]]><![CDATA[>") + "]]>"


def render(template: Mapping[str, Value]) -> str:
    """Write the children of a TEMPLATE element: sorted by name, values in CDATA."""
    out = []
    for name in sorted(template):
        value = template[name]
        if isinstance(value, str):
            out.append(f"<{name}>{cdata(value)}</{name}>")
        else:
            for vector in vectors(template, name):
                out.append(f"<{name}>{render(dict(vector))}</{name}>")
    return "".join(out)


def render_nested(name: str, template: Mapping[str, Value]) -> str:
    """Write one element with a template inside."""
    return f"<{name}>{render(template)}</{name}>"


def from_xml(element: ElementTree.Element) -> Template:
    """Read back a TEMPLATE element as served by the API."""
    result: Template = {}
    for child in element:
        if len(child):
            add(result, child.tag, {item.tag: item.text or "" for item in child})
        else:
            result[child.tag] = child.text or ""
    return result


def _vector(text: str, position: int) -> Tuple[Vector, int]:
    vector: Vector = {}
    while True:
        end = re.compile(r"\s*,?\s*\]").match(text, position)
        if end is not None:
            return vector, end.end()
        pair = _PAIR.match(text, position)
        if pair is None:
            raise ValueError(f"vector not closed near: {text[position : position + 40]!r}")
        vector[pair.group(1).upper()] = _unquote(pair.group(2))
        position = pair.end()
        if text[position : position + 1] == ",":
            position += 1


def _unquote(value: str) -> str:
    value = value.strip()
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL)
    return value
