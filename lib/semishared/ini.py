# SPDX-License-Identifier: Apache-2.0
"""A file of [section], key = value, read as configparser reads it; that and its regular expressions took
every action 4 ms.
"""

from __future__ import annotations

from .errors import BadAttribute

DEFAULT = "DEFAULT"
"""The section whose values are those of all others that do not say otherwise."""


def read(path: str) -> dict[tuple[str, str], str]:
    """Return the values by (section, key), none if there is no such file; raise BadAttribute."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except UnicodeDecodeError as e:
        raise BadAttribute(f"semishared.conf: {e}") from None
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as e:
        # Its defaults are not what somebody has written there.
        raise BadAttribute(f"semishared.conf cannot be read: {e.strerror}: {path}") from None
    found: dict[tuple[str, str], list[str]] = {}
    sections: set[str] = set()
    section, value, depth = "", None, 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith(("#", ";")):
            continue
        indent = len(line) - len(line.lstrip())
        if not text or (value is not None and indent > depth):
            # Of a value of several lines.
            if value is not None:
                value.append(text)
            continue
        depth = indent
        if text.startswith("[") and "]" in text[2:]:
            section, value = text[1 : text.rindex("]")], None
            if section in sections and section != DEFAULT:
                raise BadAttribute(f"semishared.conf: line {number}: [{section}] is there twice")
            sections.add(section)
            continue
        delimiter = min("=:", key=lambda sign: text.find(sign) % (len(text) + 1))
        key, is_one, rest = text.partition(delimiter)
        key = key.strip().lower()
        if not section or not is_one or not key:
            raise BadAttribute(
                f"semishared.conf: line {number}: {text!r} is neither [section] nor key = value in one"
            )
        if (section, key) in found:
            raise BadAttribute(f"semishared.conf: line {number}: {key!r} is in [{section}] twice")
        value = found[section, key] = [rest.strip()]
    values = {name: "\n".join(lines).rstrip() for name, lines in found.items() if name[0] != DEFAULT}
    for (whose, key), lines in found.items():
        for section in sections - {DEFAULT} if whose == DEFAULT else ():
            values.setdefault((section, key), "\n".join(lines).rstrip())
    return values
