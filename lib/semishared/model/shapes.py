# SPDX-License-Identifier: Apache-2.0
"""Shapes of other machines' answers, as data, and the check of a value against a shape.

    None                    null
    "count"                 one of FORMS
    [shape]                 a list of such
    (shape, shape)          one or the other
    {"name": shape}         an object that has these; `?` behind a name: it may be absent; others are not read
    {"*": shape}            an object of such, by any names; {"#": shape}: by numbers

The shape of a step's answer follows from its type (`declared`), which says:

    None, bool, int, float, str, Any    null, and the forms flag, number, real, text, json
    Count, Lease, Path...               a form, which mypy takes for an int or a str
    list[...], tuple[..., ...]          a list of such; tuple[A, B]: of an A and a B
    Optional[...], Union[...]           one or the other
    dict[str, ...], dict[Disk, ...]     an object of such
    a class of named.py                 an object of its fields, which is read as that class; a field that has
                                        a default may be absent, `_` behind its name is not part of it

ANSWER is the shape of a machine's answer to install/preflight.py.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, Callable, Iterable

from .disk import names as disk_names

if TYPE_CHECKING:
    Count = int
    Base = str
    Digest = str
    Disk = str
    Format = str
    Generation = str
    Lease = str
    Marker = str
    Path = str
    Probe = str
    Snapshot = str
    Stored = str
    Token = str

DEEPEST = 20
"""Most lists and objects within one another; a record has 4."""
MOST = 1 << 63
"""No size, time or number reaches that."""
LONGEST = 1 << 20
"""Characters of one text: a domain XML is the longest."""
Shape = Any


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_number(value: object) -> bool:
    return type(value) is int and -MOST < value < MOST


def _is_real(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < MOST  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    """Tell whether a value is a text for a program's argument: also a file name that is no UTF-8."""
    if not isinstance(value, str) or len(value) > LONGEST:
        return False
    try:
        return value.isascii() or bool(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


def _is_json(value: object, depth: int = 0) -> bool:
    if isinstance(value, (list, dict)):
        inner: Iterable[object] = value if isinstance(value, list) else (*value, *value.values())
        return depth < DEEPEST and all(_is_json(one, depth + 1) for one in inner)
    return value is None or isinstance(value, bool) or _is_real(value) or _is_text(value)


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: _is_text(value) and re.match(pattern + r"\Z", str(value)) is not None


PATH = r"(?s)/(?!(.*/)?\.\.?(/|\Z))[^\0]*"


def _is_token(value: object) -> bool:
    return value == "" or (_is_text(value) and "/" not in str(value) and disk_names.is_staged(str(value)))


def _is_probe(value: object) -> bool:
    folder, _, name = str(value).rpartition("/")
    return (
        _is_text(value)
        and folder in ("", disk_names.SIDE)
        and "\0" not in name
        and disk_names.is_staged(name)
    )


FORMS: dict[str, Callable[[object], bool]] = {
    "count": _is_count,
    "number": _is_number,
    "real": _is_real,
    "text": _is_text,
    "json": _is_json,
    "flag": lambda value: isinstance(value, bool),
    "never": lambda value: False,
    "disk": _matches(r"[0-9]{1,9}"),
    "lease": _matches(r"[0-9]{1,9}-[0-9]{1,9}"),
    "base": _matches(r"([0-9]{1,9}-[0-9]{1,9}-[0-9a-f]{32})?"),
    "generation": _matches(r"([0-9a-f]{1,64})?"),
    "digest": _matches(r"[0-9a-f]{32,128}"),
    "marker": _matches(r"([0-9a-f]{32})?"),
    "token": _is_token,
    "probe": _is_probe,
    "path": _matches(PATH),
    "stored": _matches(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*/[A-Za-z0-9_][A-Za-z0-9_.\-]*"),
    "snapshot": _matches(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"),
    "format": _matches(r"[a-z0-9]{0,16}"),
}


class Misfit(Exception):
    """What a value has that its shape has not, and where."""


class Object(dict[str, Shape]):
    """The shape of an object that is read as a named tuple."""

    kind: Any


class Row(list[Shape]):
    """The shape of a list that is read as a tuple."""


class Fixed(Row):
    """The same, of a list of as many."""


def wrong(answer: object, shape: Shape) -> str | None:
    """Return how an answer differs from a shape, and where; None if it does not."""
    try:
        read(answer, shape)
    except Misfit as e:
        return str(e)
    return None


def read(value: Any, shape: Shape, where: str = "") -> Any:
    """Return a value of a shape, objects of declared types as these; raise Misfit for any other."""
    if isinstance(shape, tuple):
        found = []
        for other in shape:
            try:
                return read(value, other, where)
            except Misfit as e:
                found.append(str(e))
        raise Misfit(max(found, key=lambda text: text.count(".")))
    if isinstance(shape, list) and isinstance(value, list):
        inner = shape if isinstance(shape, Fixed) else shape * len(value)
        if len(inner) == len(value):
            items = [read(item, inner[at], f"{where}[{at}]") for at, item in enumerate(value)]
            return tuple(items) if isinstance(shape, Row) else items
    if isinstance(shape, dict) and isinstance(value, dict):
        return _object(value, shape, where)
    if FORMS[shape](value) if isinstance(shape, str) else shape is None and value is None:
        return value
    raise Misfit(_said(value, where))


def _object(value: dict[str, Any], shape: dict[str, Shape], where: str) -> Any:
    read_here = {}
    for name, inner in shape.items():
        key = name.rstrip("?_")
        if name in "*#":
            if name == "#" and not all(map(FORMS["disk"], value)):
                raise Misfit(_said(value, where))
            read_here = {key: read(item, inner, f"{where}.{key[:50]}") for key, item in value.items()}
        elif key in value:
            read_here[name.rstrip("?")] = read(value[key], inner, f"{where}.{key}")
        elif not name.endswith("?"):
            raise Misfit(_said(None, f"{where}.{key}"))
    return shape.kind(**read_here) if isinstance(shape, Object) else read_here


class _Of:
    """A word of types with [...] behind it."""

    def __init__(self, shape: Callable[[Any], Shape]) -> None:
        self._shape = shape

    def __getitem__(self, inner: Any) -> Shape:
        return self._shape(inner)


WORDS: dict[str, Shape] = {
    "bool": "flag",
    "int": "number",
    "float": "real",
    "str": "text",
    "Any": "json",
    "list": _Of(lambda inner: [inner]),
    "tuple": _Of(lambda inner: Row(inner[:1]) if inner[-1] is ... else Fixed(inner)),
    "dict": _Of(lambda inner: {"#" if inner[0] == "disk" else "*": inner[1]}),
    "Optional": _Of(lambda inner: (inner, None)),
    "Union": _Of(tuple),
}


class _Names(dict[str, Shape]):
    """What the words of an annotation in a module mean."""

    def __init__(self, module: str) -> None:
        super().__init__(WORDS)
        self._module = sys.modules[module]

    def __missing__(self, name: str) -> Shape:
        if name.lower() in FORMS:
            return name.lower()
        return declared(getattr(self._module, name), self._module.__name__)


def declared(kind: Any, module: str) -> Shape:
    """Return the shape that a type declares: a class, or the text of an annotation in that module."""
    if isinstance(kind, str):
        return eval(kind, {}, _Names(module))
    if not hasattr(kind, "_fields"):
        return kind and WORDS[kind.__name__]
    shape = Object()
    shape.kind = kind
    for owner in reversed(kind.__mro__):
        for name, said in vars(owner).get("__annotations__", {}).items():
            shape[f"{name}?" if name in kind._field_defaults else name] = declared(said, owner.__module__)
    return shape


def _said(value: object, where: str) -> str:
    return f"{shown(value)} for {where.lstrip('.')}" if where else shown(value)


def shown(value: object) -> str:
    """Return a short text of a value of whatever size and depth."""
    if isinstance(value, (list, dict)):
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)}"
    return repr(value)[:100] if not isinstance(value, int) or abs(value) < MOST else "a huge number"


ERROR = {"error": "text"}
STORE = {
    "empty": "flag",
    "same": "flag",
    "writable": "flag",
    "marker": "text",
    "passable": "flag",
    "reason?": ("text", None),
    "mount": {"point?": "text", "type?": "text", "options?": ["text"]},
}
LOCAL = {
    "where": "text",
    "free": "count",
    "total": "count",
    "inodes": "count",
    "no_inodes": "flag",
    "writable": "flag",
    "read_only": "flag",
}
LIBVIRT = {
    "libvirt": "text",
    "qemu": "text",
    "secrets": ["text"],
    "virtiofs": ("flag", None),
    "confines": ["text"],
    "user": "text",
    "processor?": {"kind": "text", "name": "text", "has": ["text"], "kernel": "text"},
    "passed_through?": "count",
}
OS = {"id": "text", "version": "text", "like": ["text"], "installer": "text", "libvirt": "text"}
SIGNED = {"place": "text", "machine?": "text", "count?": "number", "seen?": {"*": "number"}}

ANSWER: Any = {
    "programs": {"*": ("text", None)},
    "lacks": {"needed": ["text"], "wanted": ["text"]},
    "python": ["count"],
    "user": "text",
    "os?": OS,
    "boot": "text",
    "up_s": "real",
    "tree?": {"version": "text", "parts": {"*": "text"}},
    "libvirt?": (ERROR, LIBVIRT),
    "local?": (ERROR, LOCAL),
    "signed?": {"*": (ERROR, SIGNED)},
    "stores?": {"*": (ERROR, STORE)},
    "ceph": {"*": ERROR},
}
"""The shape of an answer of install/preflight.py."""
