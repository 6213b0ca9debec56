# SPDX-License-Identifier: Apache-2.0
"""Put up a lab by hand and look around in it.

python3 -m lab up [N]            a front-end and N hosts (2) that stay until `down`
python3 -m lab install           the checkout's drivers into it
python3 -m lab status            what is up, and where its files are
python3 -m lab exec NODE CMD...  a command in a node, as oneadmin; `root@NODE` as root
python3 -m lab down              take all standing labs away, and what dead test runs left
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from lab import layout, state
from lab.hosts import MOST_HOSTS, Lab
from lab.node import Node


def _one() -> Lab:
    labs = Lab.standing()
    if not labs:
        raise SystemExit("lab: none is up; `lab up 2` puts one up")
    return labs[-1]


def _status() -> None:
    for lab in Lab.standing():
        print(f"lab {lab.id}  guests: {lab.virt}  shared stores: {' '.join(map(str, lab.stores))}  {lab.folder}")
        for node in [lab.fe, *lab.hosts]:
            print(f"  {node.name:4} {node.ip:15} {'up   pid ' + str(node.pid) if node.up else 'down'}")


def _exec(target: str, words: list[str]) -> int:
    user, _, name = target.rpartition("@")
    lab = _one()
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
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="put up a lab that stays")
    up.add_argument("hosts", nargs="?", type=int, default=2, metavar="N", help=f"hosts, 1 to {MOST_HOSTS}")
    up.add_argument("--stores", type=int, nargs="+", default=[100], metavar="ID", help="shared image stores")
    commands.add_parser("down", help="take down what `up` put up")
    commands.add_parser("status", help="show the standing labs")
    commands.add_parser("install", help="install the checkout's drivers")
    inside = commands.add_parser("exec", help="run a command in a node")
    inside.add_argument("node")
    inside.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.command == "up":
        try:
            Lab.up(given.hosts, given.stores, stay=True)
        except (ValueError, PermissionError, RuntimeError) as error:
            raise SystemExit(f"lab: {error}") from None
        _status()
    elif given.command == "down":
        for lab in Lab.standing():
            lab.down()
            print(f"lab {lab.id} is down")
        state.sweep()
    elif given.command == "status":
        _status()
    elif given.command == "install":
        _one().install()
    else:
        return _exec(given.node, given.words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
