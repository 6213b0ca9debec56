# SPDX-License-Identifier: Apache-2.0
"""What the operator's command prints with --json, held to the schema of its verb (docs/reference/schemas).

`check` is called by what runs the command in tests. Where jsonschema is not installed, as under Pythons of
other releases, nothing is compared; tests/unit/test_schemas.py says so.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

IS_INSTALLED = importlib.util.find_spec("jsonschema") is not None
FOLDER = Path(__file__).resolve().parent.parent / "docs/reference/schemas"
NAME = "semishared"


def closed(value: Any) -> Any:
    """Return a schema that lets pass no name but its own: a schema of ours is open to later ones."""
    if isinstance(value, list):
        return list(map(closed, value))
    if not isinstance(value, dict):
        return value
    found = {name: closed(one) for name, one in value.items()}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


@cache
def validator(verb: str) -> Any:
    """Return what compares with the schema of a verb."""
    import jsonschema  # takes a while, and few tests need it

    schema = json.loads((FOLDER / f"{verb}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(closed(schema))


def verb_of(argv: Sequence[object]) -> Optional[str]:
    """Return the verb of a command line with --json, None for any other."""
    words = [str(word) for word in argv]
    place = next((n for n, word in enumerate(words) if word.rpartition("/")[2] == NAME), None)
    if place is None or "--json" not in words[place:] or place + 1 == len(words):
        return None
    verb = words[place + 1]
    # What follows an action of `plan` is for the action.
    return verb if (FOLDER / f"{verb}.json").exists() and "--help" not in words else None


def objects(text: str) -> Iterator[Any]:
    """Yield the objects that were printed: one, or one a line; none of a line that is not JSON."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        at = text.find("{", at)
        if at < 0:
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError:
            return  # cut off: whoever reads it says so
        yield found


def check(argv: Sequence[object], printed: bytes) -> None:
    """Compare what a command line has printed with its schema, if it has one; raise AssertionError."""
    verb = verb_of(argv)
    if verb and IS_INSTALLED:
        for found in objects(printed.decode("utf-8", "replace")):
            compare(verb, found)


def compare(verb: str, found: Any) -> None:
    """Compare an object with the schema of a verb; raise AssertionError."""
    errors = sorted(validator(verb).iter_errors(found), key=lambda error: str(error.json_path))
    if errors:
        best = max(errors, key=lambda error: len(error.absolute_path))
        why = "; ".join(one.message[:300] for one in [best, *(best.context or ())])
        raise AssertionError(f"semishared {verb} --json: {best.json_path}: {why}")
