# SPDX-License-Identifier: Apache-2.0
"""Shapes of other machines' answers, as data, and the check of a value against a shape.

    None                    null
    "count"                 one of FORMS
    [shape]                 a list of such
    (shape, shape)          one or the other
    {"name": shape}         an object that has these; `?` behind a name: it may be absent; others are not read
    {"*": shape}            an object of such, by any names; {"#": shape}: by numbers

ANSWER is the shape of a machine's answer to install/preflight.py.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Iterable

from .disk import names as disk_names

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
_is_digest = _matches(r"[0-9a-f]{32,128}")


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
    "nothing": lambda value: value == {},
    "never": lambda value: False,
    "capacity": lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)),
    "disk": _matches(r"[0-9]{1,9}"),
    "lease": _matches(r"[0-9]{1,9}-[0-9]{1,9}"),
    "base": _matches(r"([0-9]{1,9}-[0-9]{1,9}-[0-9a-f]{32})?"),
    "generation": _matches(r"([0-9a-f]{1,64})?"),
    "digest": _is_digest,
    "marker": _matches(r"([0-9a-f]{32})?"),
    "pair": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_text, value)),
    "digested": lambda value: isinstance(value, list)
    and len(value) == 2
    and _is_digest(value[0])
    and _is_count(value[1]),
    "token": _is_token,
    "probe": _is_probe,
    "path": _matches(PATH),
    "stored": _matches(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*/[A-Za-z0-9_][A-Za-z0-9_.\-]*"),
    "snapshot": _matches(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"),
    "format": _matches(r"[a-z0-9]{0,16}"),
}


def wrong(answer: object, shape: Shape) -> str | None:
    """Return how an answer differs from a shape, and where; None if it does not."""
    return _wrong(answer, shape, "")


def _wrong(value: object, shape: Shape, where: str) -> str | None:
    """Return what is wrong with a value, and where it is; None if it has the shape."""
    if isinstance(shape, str):
        return None if FORMS[shape](value) else _said(value, where)
    if isinstance(shape, tuple):
        found = [_wrong(value, other, where) for other in shape]
        return None if None in found else max(map(str, found), key=lambda text: text.count("."))
    if isinstance(shape, list) and isinstance(value, list):
        return next(
            filter(None, (_wrong(item, shape[0], f"{where}[{number}]") for number, item in enumerate(value))),
            None,
        )
    if isinstance(shape, dict) and isinstance(value, dict):
        return next(
            filter(None, (_wrong_field(value, name, inner, where) for name, inner in shape.items())), None
        )
    return None if shape is None and value is None else _said(value, where)


def _wrong_field(value: dict[str, object], name: str, shape: Shape, where: str) -> str | None:
    if name in ("*", "#"):
        if name == "#" and not all(map(FORMS["disk"], value)):
            return _said(value, where)
        return next(
            filter(None, (_wrong(item, shape, f"{where}.{key[:50]}") for key, item in value.items())), None
        )
    key = name.rstrip("?")
    if key not in value:
        return None if name.endswith("?") else _said(None, f"{where}.{key}")
    return _wrong(value[key], shape, f"{where}.{key}")


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
}
SIGNED = {"place": "text", "machine?": "text", "count?": "number", "seen?": {"*": "number"}}

ANSWER: Any = {
    "programs": {"*": ("text", None)},
    "lacks": {"needed": ["text"], "wanted": ["text"]},
    "python": ["count"],
    "user": "text",
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
