# SPDX-License-Identifier: Apache-2.0
"""Put up a lab by hand and look around in it.

    python3 -m lab up [N] [--ceph]   a front-end and N hosts (2) that stay until `down`, and a Ceph cluster
    python3 -m lab install           the checkout's drivers into it
    python3 -m lab status            what is up, and where its files are
    python3 -m lab exec NODE CMD...  a command in a node, as oneadmin; `root@NODE` as root
    python3 -m lab down              take all standing labs away, and what dead test runs left
    python3 -m lab prepare           have below build/lab what labs keep there, before several want it at once
    python3 -m lab root PLATFORM...  have below build/roots the programs of other Debian releases for these

With more than one standing, `--lab ID` in front of the command says which.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from lab import layout, roots, state
from lab.cloud import Cloud
from lab.guest import linux, metal
from lab.hosts import MOST_HOSTS, Lab
from lab.node import Node


def _labs(wanted: str) -> list[Lab]:
    labs = [lab for lab in Lab.standing() if wanted in ("", lab.id)]
    if wanted and not labs:
        raise SystemExit(f"lab: no lab {wanted} is up")
    return labs


def _one(wanted: str) -> Lab:
    labs = _labs(wanted)
    if not labs:
        raise SystemExit("lab: none is up; `lab up 2` puts one up")
    if len(labs) > 1:
        raise SystemExit(f"lab: several are up, say which: --lab {' | '.join(lab.id for lab in labs)}")
    return labs[0]


def _status(labs: list[Lab]) -> None:
    for lab in labs:
        print(
            f"lab {lab.id}  guests: {lab.virt}  shared stores: {' '.join(map(str, lab.stores))}  {lab.folder}"
        )
        for node in lab.nodes:
            print(f"  {node.name:4} {node.ip:15} {'up   pid ' + str(node.pid) if node.up else 'down'}")


def _exec(lab: Lab, target: str, words: list[str]) -> int:
    user, _, name = target.rpartition("@")
    try:
        node: Node = lab.node(name)
    except KeyError:
        raise SystemExit(f"lab: no node {name}; `lab status` lists them") from None
    # In our own session, so that a shell in the node has the terminal.
    process = node.popen(words or ["bash"], user=user or layout.USER, start_new_session=False)
    return subprocess.Popen.wait(process)


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="lab", description="A front-end and hosts on this machine.")
    parser.add_argument("--lab", default="", metavar="ID", help="one of several labs")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="put up a lab that stays")
    up.add_argument("hosts", nargs="?", type=int, default=2, metavar="N", help=f"hosts, 1 to {MOST_HOSTS}")
    up.add_argument("--stores", type=int, nargs="+", default=[100], metavar="ID", help="shared image stores")
    more = "a Ceph cluster on a node of its own, with so many OSDs (1)"
    up.add_argument("--ceph", nargs="?", type=int, default=0, const=1, metavar="OSDS", help=more)
    commands.add_parser("down", help="take down what `up` put up")
    commands.add_parser("status", help="show the standing labs")
    commands.add_parser("install", help="install the checkout's drivers")
    commands.add_parser("prepare", help="fill the caches of labs")
    root = commands.add_parser("root", help="make roots of other Debian releases")
    words = "11, 13, mixed, ceph18; 13+ceph18 is both"
    root.add_argument("platforms", nargs="+", metavar="PLATFORM", help=words)
    inside = commands.add_parser("exec", help="run a command in a node")
    inside.add_argument("node")
    inside.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.command == "up":
        try:
            lab = Lab.up(given.hosts, given.stores, stay=True, ceph=given.ceph)
        except (ValueError, PermissionError, RuntimeError) as error:
            raise SystemExit(f"lab: {error}") from None
        _status([lab])
    elif given.command == "down":
        for lab in _labs(given.lab):
            lab.down()
            print(f"lab {lab.id} is down")
        state.sweep()
    elif given.command == "status":
        _status(_labs(given.lab))
    elif given.command == "install":
        _one(given.lab).install()
    elif given.command == "prepare":
        linux.disk_image()
        metal.disk_image()
        with Cloud.up(hosts=1, forks=True):
            pass
    elif given.command == "root":
        try:
            for release in sorted({n for name in given.platforms for n in roots.platform(name, 2).values()}):
                print(f"lab: the root of Debian {release} is {roots.make(release)}")
        except (ValueError, RuntimeError) as error:
            raise SystemExit(f"lab: {error}") from None
    else:
        return _exec(_one(given.lab), given.node, given.words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
