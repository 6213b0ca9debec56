#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Write the generated pages and pictures of docs/ (`make docs`); with --check, say which are stale."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Callable, Iterable

DOCS = Path(__file__).resolve().parent
sys.path[0:0] = [str(DOCS.parent / "lib"), str(DOCS)]

import fault_table  # noqa: E402
import json_schemas  # noqa: E402
import manuals  # noqa: E402
import pictures  # noqa: E402
import runs_table  # noqa: E402

from semishared.cli.explain import explained  # noqa: E402
from semishared.errors import catalogue  # noqa: E402
from semishared.model import stock  # noqa: E402
from semishared.model.attributes import Attribute, known, of_images  # noqa: E402
from semishared.model.platforms import PLATFORMS as ALL  # noqa: E402
from semishared.model.platforms import PROGRAMS, SUDO_FLOOR, Platform  # noqa: E402

ERRORS = """<!-- Generated from lib/semishared/errors.py by `make docs`. -->
# Errors

Look up what an error means and what to do. An action that fails ends with one line, which OpenNebula shows as the ERROR of the VM or image:

    ID WHAT IT IS ABOUT: REASON; WHAT TO DO [ACTION; COMMAND; PATHS]

OpenNebula keeps the first 100 characters of a VM's ERROR, 39 of them its own: id, what it is about (`image 7`, `VM 12 disk 0`,
`datastore 100`, `host h1`) and the reason are in the 61 that follow. The VM's log has all of it. The operator's command says
`COMMAND: ID REASON; WHAT TO DO`. Exit code 1 means refused or failed as described here, 2 a defect of semishared (its traceback is in the log lines).
Ids are stable.

| id | what it is | what to do |
|---|---|---|
"""  # noqa: E501


def errors() -> str:
    """Return the page of errors."""
    rows = [
        f'| <a id="{row.id}"></a>{row.id} {row.name} | {row.meaning} | {row.remedy} |'
        for row in map(explained, catalogue())
    ]
    return ERRORS + "\n".join(rows).replace("SEMISHARED_*", "SEMISHARED_\\*") + "\n"


ATTRIBUTES = DOCS / "reference" / "attributes.md"
ROWS = re.compile(r"(<!-- rows (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
HEAD = "\n| attribute | of | what it may be | meaning |\n|---|---|---|---|\n"


def with_rows(text: str) -> str:
    """Return a page with the rows of lib/semishared/model/attributes.py between its marks, which name the
    attributes by a pattern; `*`: those that no other pattern names.
    """
    patterns = [match.group(2) for match in ROWS.finditer(text)]

    def table(match: re.Match[str]) -> str:
        pattern = match.group(2)
        named = [other for other in patterns if other != pattern] if pattern == "*" else []
        rows = [
            _row(row, f"\n## {name}\n" in text)
            for name, row in known().items()
            if fnmatch(name, pattern) and not any(fnmatch(name, other) for other in named)
        ]
        return f"{match.group(1)}{HEAD}{''.join(rows)}\n{match.group(3)}"

    return ROWS.sub(table, text)


STOCK_ROWS = re.compile(r"(<!-- stock (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
STOCK_HEAD = "\n| name | here | what that means |\n|---|---|---|\n"


def with_stock(text: str) -> str:
    """Return a page with the rows of lib/semishared/model/stock.py between its marks, which name the kind of
    object.
    """

    def table(match: re.Match[str]) -> str:
        rows = [
            f"| `{row.name}` | {row.verdict}{_unless(row)} | {row.doc} |\n"
            for row in sorted(stock.ROWS, key=lambda row: row.name)
            if row.of == match.group(2)
        ]
        return f"{match.group(1)}{STOCK_HEAD}{''.join(rows)}\n{match.group(3)}"

    return STOCK_ROWS.sub(table, text)


def _unless(row: stock.Row) -> str:
    return f", but for {', '.join(f'`{word}`' for word in row.harmless)}" if row.harmless else ""


def _row(row: Attribute, has_section: bool) -> str:
    words = [f"`{word}`" + " (default)" * (word == row.default) for word in row.values]
    name = f"[`{row.name}`](#{row.name.lower()})" if has_section else f"`{row.name}`"
    return f"| {name} | {', '.join(row.of)} | {', '.join(words) or row.what} | {row.doc} |\n"


def attributes() -> str:
    """Return the page of attributes, whose tables of ours follow from the code."""
    return with_stock(with_rows(ATTRIBUTES.read_text(encoding="utf-8")))


CONFIGURE = DOCS / "how-to" / "configure-oned.md"
RESTRICTED = re.compile(r"(?:^    IMAGE_RESTRICTED_ATTR = .*\n)+", re.MULTILINE)


def configure() -> str:
    """Return the page of what install.sh writes into oned.conf, with the attributes that are restricted."""
    lines = [f'    IMAGE_RESTRICTED_ATTR = "{row.name}"\n' for row in of_images() if row.is_restricted]
    return RESTRICTED.sub("".join(lines), CONFIGURE.read_text(encoding="utf-8"))


SUPPORT = DOCS / "reference" / "support.md"


def support() -> str:
    """Return the page of what was tested, with what ran outside `make test`."""
    return runs_table.with_runs(SUPPORT.read_text(encoding="utf-8"))


PLATFORMS = """<!-- Generated from lib/semishared/model/platforms.py by `make docs`. -->
# Platforms

Look up what a host or front-end of your distribution has: paths, packages, daemons. `semishared doctor` and `install.sh` choose their remedies
by the same table: a machine says which release it is (`/etc/os-release`), which daemon libvirt has there and how old its Python and sudo are.
What a machine says itself goes first. EL: RHEL, AlmaLinux and other rebuilds.

**A column here is not a test.** What ran where is in [Support](support.md). Debian 12 is where the tests run; the other columns are read from
the sources that they name.

"""  # noqa: E501
FACTS = (
    ("QEMU", lambda it: f"`{it.qemu}`"),
    ("version of QEMU", lambda it: it.qemu_version),
    ("version of libvirt", lambda it: it.libvirt_version),
    ("libvirt's daemon", lambda it: f"`{it.daemon}`"),
    ("user and group of QEMU", lambda it: f"`{it.user}`"),
    ("`/usr/bin/python3`", lambda it: it.python),
    ("virtiofsd", lambda it: f"`{it.virtiofsd}`"),
    ("sudo", lambda it: it.sudo),
    ("lines for sudoers of [shares](../how-to/shares.md)", lambda it: _sudoers(it)),
    ("QEMU is confined by", lambda it: it.confined),
    ("temporary files", lambda it: it.tmp or "not looked up"),
    ("packages are installed by", lambda it: f"`{it.installer}`"),
    ("source", lambda it: it.source),
)


def _sudoers(it: Platform) -> str:
    numbers = tuple(map(int, it.sudo.split(".")))
    return "work" if numbers >= SUDO_FLOOR else "do not work: no regular expressions before 1.9.10"


def _across(head: str, rows: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return a table with a column for each platform."""
    lines = [f"| {head} | {' | '.join(it.name for it in ALL)} |", f"|{'---|' * (len(ALL) + 1)}"]
    return lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]


def platforms() -> str:
    """Return the page of platforms."""
    names = [name for name in PROGRAMS if name != "qemu"]
    facts = _across("", ((name, (say(it) for it in ALL)) for name, say in FACTS))
    packages = _across(
        "program",
        (
            (name.replace("|", ", "), (it.packages[name] or "none is known" for it in ALL))
            for name in (*names, "qemu")
        ),
    )
    notes = [NEWER.format(it.name, it.python, it.newer_python) for it in ALL if it.newer_python]
    return PLATFORMS + "\n".join([*facts, "", "## Packages", "", *packages, NOTES.rstrip(), *notes]) + "\n"


NEWER = """- {}: Python {} is too old for semishared. As root: `{}`. `/usr/bin/python3` may stay as it is: every program of
  semishared goes on with the newest `/usr/bin/python3.N`, of those with libvirt's binding first. The packages of libvirt's and Ceph's bindings there
  are for the old one. Without bindings for the newer one, nothing works that asks libvirt about a guest that runs (snapshots, backups, live migration,
  resume), nor does Ceph (untried)."""  # noqa: E501
NOTES = """
## What follows

- OpenNebula's packages for hosts let libvirt run QEMU as oneadmin, and exempt `/var/tmp/one` from what cleans temporary files.
- Where sudo is older than 1.9.10, another machine makes shares (BRIDGE_LIST), or the front-end; `doctor` says so. Late releases of EL 9 bring a
  newer sudo: `doctor` asks the machine. Tried by hand: sudo of Debian 11 calls such a line a syntax error, sudo of Debian 13 goes by it.
- `udp-sender` and `udp-receiver` (udpcast), by which one session serves many hosts: no package on EL is known. Without them, bases go from host to
  host by TCP.
- `rbd` and its bindings have packages in Ceph's own repository for EL, or in CentOS' for storage.
- No list confirms `lzop` on EL 8 and 9, `xorriso` on EL 10, the packages of virtiofsd on EL 8 and 10, and QEMU's path and user on EL. The table
  has them as they are known of these systems.
- Of Debian 13's libvirt no package has `virtqemud`: the suite `platforms` has a host whose monolithic libvirt is at that path and answers at its
  sockets. libvirt's other daemons (`virtsecretd`, `virtnetworkd`) were not tried.
- A host of the suite is arranged like EL: QEMU only as `/usr/libexec/qemu-kvm`, `/usr/bin/python3` that says 3.6 beside a newer one. With QEMU as user
  `qemu` no disk can be opened: libvirt refuses the VM, and `doctor` names `qemu.conf`. EL's own machine types were not there.
- SELinux: [its lines](../how-to/apparmor.md#selinux), untried.
"""  # noqa: E501


def completion() -> dict[str, Callable[[], str]]:
    """Return what completes the command by its paths; nothing where shtab is not installed (make lint)."""
    for packages in (DOCS.parent / "build/venv").glob("lib/python3*/site-packages"):
        sys.path.append(str(packages))
    if importlib.util.find_spec("shtab") is None:
        print(
            "docs: shtab is not installed (make lint does it): completion is left as it is", file=sys.stderr
        )
        return {}
    return {f"../share/{name}": partial(manuals.completion, shell) for shell, name in manuals.SHELLS.items()}


PAGES = {
    "reference/errors.md": errors,
    "reference/platforms.md": platforms,
    "reference/faults.md": fault_table.page,
    "reference/attributes.md": attributes,
    "reference/support.md": support,
    "how-to/configure-oned.md": configure,
    "explanation/disk.svg": pictures.disk,
    "explanation/rooms.svg": pictures.rooms,
    **{f"reference/schemas/{verb}.json": partial(json_schemas.page, verb) for verb in json_schemas.verbs()},
    **{f"../share/man/man1/{name}": partial(manuals.page, verb) for name, verb in manuals.NAMES.items()},
}


def main(argv: list[str]) -> int:
    """Write all pages, or check them."""
    stale = 0
    for name, page in {**PAGES, **completion()}.items():
        path, text = DOCS / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in argv:
            print(f"{os.path.normpath(f'docs/{name}')} is out of date: run `make docs`", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{os.path.normpath(f'docs/{name}')} written")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
