# SPDX-License-Identifier: Apache-2.0
"""The requirements of a VM: what oned writes for its system datastore, and whether a datastore meets it."""

from __future__ import annotations

import re
from typing import List, Mapping, Set

from .drivers import Refused
from .objects import Datastore, Vm
from .template import scalar
from .transfer import is_directory

_TOKEN = re.compile(r'\s*(\(|\)|&|\||!=|!|@>|=|"[^"]*"|[^\s()&|!=@"]+)')


def of_system(vm: Vm, datastores: Mapping[int, Datastore]) -> str:
    """Return AUTOMATIC_DS_REQUIREMENTS, as VirtualMachine::automatic_requirements does of disks.

    Raise Refused if no system datastore, or no cluster, is that of all disks.
    """
    clusters: Set[int] = set()
    systems: Set[int] = set()
    shareable = False
    for disk in vm.disks:
        if "DATASTORE_ID" not in disk:
            continue
        store = datastores[int(disk["DATASTORE_ID"])]
        if not store.clusters:
            raise Refused(f"Missing clusters. Datastore for DISK {disk['DISK_ID']} is not in any cluster")
        clusters = _both(clusters, set(store.clusters), f"Incompatible clusters in DISK {disk['DISK_ID']}")
        if is_directory(disk):
            continue
        shareable = shareable or disk.get("SHAREABLE") == "YES"
        named = compatible(store)
        if named:
            why = f"Images Datastore for DISK {disk['DISK_ID']}"
            systems = _both(systems, named, f"Incompatible system datastore in DISK. {why}")
    # Without an image it is the networks' clusters, which here are the first.
    parts = [_any_of("CLUSTERS/ID", clusters or {0}), _any_of("ID", systems)]
    mode = scalar(vm.template, "TM_MAD_SYSTEM")
    if any(parts) and mode:
        parts.append(f'(TM_MAD = "{mode}")')
    if shareable:
        parts.append('(SHARED = "YES")')
    return " & ".join(part for part in parts if part)


def _both(so_far: Set[int], more: Set[int], otherwise: str) -> Set[int]:
    found = so_far & more if so_far else more
    if not found:
        raise Refused(otherwise)
    return found


def _any_of(name: str, ids: Set[int]) -> str:
    return "(" + " | ".join(f'"{name}" @> {item}' for item in sorted(ids)) + ")" if ids else ""


def compatible(store: Datastore) -> Set[int]:
    """Return the ids in COMPATIBLE_SYS_DS: a word that does not begin with a number is passed over."""
    words = scalar(store.template, "COMPATIBLE_SYS_DS").split(",")
    found = (re.match(r"\s*([+-]?\d+)", word) for word in words)
    return {int(one.group(1)) for one in found if one}


def meets(store: Datastore, expression: str) -> bool:
    """Tell whether a datastore meets an expression of `=`, `!=`, `@>`, `!`, `&`, `|` and brackets."""
    tokens: List[str] = []
    position = 0
    while expression[position:].strip():
        found = _TOKEN.match(expression, position)
        assert found, f"not understood: {expression[position:]!r}"
        tokens.append(found.group(1).strip('"'))
        position = found.end()
    met = _either(store, tokens) if tokens else True
    assert not tokens, f"left over: {tokens}"
    return met


def _either(store: Datastore, tokens: List[str]) -> bool:
    found = _all(store, tokens)
    while tokens[:1] == ["|"]:
        tokens.pop(0)
        found = _all(store, tokens) or found
    return found


def _all(store: Datastore, tokens: List[str]) -> bool:
    found = _one(store, tokens)
    while tokens[:1] == ["&"]:
        tokens.pop(0)
        found = _one(store, tokens) and found
    return found


def _one(store: Datastore, tokens: List[str]) -> bool:
    word = tokens.pop(0)
    if word == "!":
        return not _one(store, tokens)
    if word == "(":
        found = _either(store, tokens)
        assert tokens.pop(0) == ")"
        return found
    operator, value = tokens.pop(0), tokens.pop(0)
    there = {
        "ID": [str(store.id)],
        "CLUSTERS/ID": [str(item) for item in store.clusters],
        "NAME": [store.name],
        "TM_MAD": [store.tm_mad],
    }.get(word, [scalar(store.template, word)])
    return (value not in there) if operator == "!=" else (value in there)
