#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""List what the storage scripts of OpenNebula read: attributes of objects, and words of their configuration.

    SRC=<checkout of OpenNebula> tests/stock_attributes.py release-7.4.0 release-7.2.0 release-6.10.5

What it prints is tests/unit/stock_attributes.txt: names and versions. tests/unit/test_stock_attributes.py
holds the table of model/stock.py, which says what becomes of each name here, against that list.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile

SCRIPTS = (
    "src/tm_mad",
    "src/datastore_mad/remotes",
    "src/mad/sh/scripts_common.sh",
)
BACKUP_DRIVERS = re.compile(r"remotes/(restic|rsync|interactive)")
"""They stay stock's: a backup datastore has its own driver."""
CONFIGURATION = re.compile(r"(\.conf|/tmrc)\Z")
NAME = r"[A-Z][A-Z0-9_]*"
HOLDERS = {"DATASTORE": "datastore", "IMAGE": "image", "DISK": "disk", "HOST": "host", "VM": "vm"}
PREDICATE = re.compile(rf" *\\?\[ *(?:{NAME} *=[^\]\n]*|last\\?\(\\?\)) *\\?\]")
PATH = re.compile(
    rf"(?<!VMM_DRIVER_ACTION_DATA/)\b(?:(?:DS_DRIVER_ACTION_DATA|VM|DATASTORE|IMAGE|HOST)/)+(?:TEMPLATE/)?{NAME}(?:/{NAME})*"
)
"""After predicates are gone: /VM/TEMPLATE/DISK[DISK_ID=$DISK_ID]/FORMAT is /VM/TEMPLATE/DISK/FORMAT."""
OF_RUBY = (
    (re.compile(rf"disk_attribute\([^,()]*, *'({NAME})'"), "disk"),
    (re.compile(rf"\b(?:d|disk|disk_xml)(?:\.elements)?\[[\"'](?:\./)?({NAME})[\"']\]"), "disk"),
    (re.compile(rf"(?:BACKUP_CONFIG/|\bbc\.elements\[')({NAME})"), "vm"),
    (re.compile(rf"(?<!r)@?ds\[[\"'](?:/DATASTORE/)?TEMPLATE/({NAME})[\"']"), "datastore"),
    (re.compile(rf"self\[\"TEMPLATE/(?:#\{{@mad\}})({NAME}|_{NAME})"), "datastore"),
    (re.compile(rf"self\[[\"']TEMPLATE/({NAME})"), "datastore"),
)
SET = re.compile(rf"^#?(?:export +)?({NAME}(?:<FS>)?)=", re.MULTILINE)
OPTIONS = re.compile(r"FS_OPTS_<FS>")


def read_in(path: str, text: str) -> set[tuple[str, str]]:
    """Return what one file reads, each as what has it and its name."""
    if CONFIGURATION.search(path):
        found = {("configuration", name) for name in SET.findall(text)}
        return found | {("configuration", "FS_OPTS_*") for _ in OPTIONS.findall(text)}
    plain = PREDICATE.sub("", text)
    found = set()
    for path in PATH.findall(plain):
        words = [word for word in path.split("/") if word not in ("TEMPLATE", "DS_DRIVER_ACTION_DATA")]
        holders = [word for word in words[:-1] if word in HOLDERS]
        if not holders or words[-1] in HOLDERS:
            continue
        if words[-2] == holders[-1]:
            found.add((HOLDERS[holders[-1]], words[-1]))
        elif holders[-1] == "VM":
            found.add(("vm", "/".join(words[words.index("VM") + 1 :])))
    for pattern, holder in OF_RUBY:
        found |= {(holder, _spelt(holder, name)) for name in pattern.findall(plain) if name not in HOLDERS}
    return found


def _spelt(holder: str, name: str) -> str:
    return f"BACKUPS/BACKUP_CONFIG/{name}" if holder == "vm" else f"*{name}" if name.startswith("_") else name


def read_by(src: str, tag: str) -> set[tuple[str, str]]:
    """Return what all scripts of a version read."""
    known = subprocess.run(
        ["git", "-C", src, "ls-tree", "-r", "--name-only", tag, *SCRIPTS],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    packed = subprocess.run(
        [
            "git",
            "-C",
            src,
            "archive",
            tag,
            *{path for path in SCRIPTS if any(k.startswith(path) for k in known)},
        ],
        check=True,
        capture_output=True,
    ).stdout
    found: set[tuple[str, str]] = set()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if _is_read(member) else None
            if file:
                found |= read_in(member.name, file.read().decode("utf-8", "replace"))
    return found


def _is_read(member: tarfile.TarInfo) -> bool:
    return member.isfile() and "test" not in member.name and not BACKUP_DRIVERS.search(member.name)


def main() -> None:
    """Print the list."""
    tags = sys.argv[1:] or sys.exit(__doc__)
    versions = {tag: read_by(os.environ["SRC"], tag) for tag in tags}
    print("# What OpenNebula's storage scripts read, by tests/stock_attributes.py: of what, name, versions.")
    for holder, name in sorted(set().union(*versions.values())):
        print(holder, name, *(tag for tag, found in versions.items() if (holder, name) in found))


if __name__ == "__main__":
    main()
