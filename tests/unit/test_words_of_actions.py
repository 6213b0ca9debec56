# SPDX-License-Identifier: Apache-2.0
"""The VM that the words of each transfer action name: a note of what is to be shown is left on it."""

from __future__ import annotations

from typing import List

import pytest

from semishared import table
from semishared.opennebula import args

VM_DIR = "h1:/var/lib/one/datastores/101/7"
DISK, STORED = f"{VM_DIR}/disk.1", "/var/lib/one/datastores/100/image"


def words(action: str) -> List[str]:
    """Return words of an action on VM 7."""
    last = ["7", "101"]
    if action.endswith("migrate"):
        return ["h1", "h2", VM_DIR.partition(":")[2], *last]
    if "backup" in action:
        return [VM_DIR, "0:1", "one-7", "-", *last]
    return {
        "context": ["/x/context.sh", DISK],
        "cpds": [DISK, STORED, "-1"],
        "delete": [VM_DIR],
        "mkimage": ["1", "raw", DISK],
        "mkswap": ["1", DISK],
        "mv": [VM_DIR, VM_DIR],
        "mvds": [DISK, STORED],
        "restore": [VM_DIR, "7", "3", "-1"],
    }.get(action, [f"fe:{STORED}", DISK] if action in ("clone", "ln") else [DISK, "1"]) + (
        ["1"] if action == "restore" else last
    )


@pytest.mark.parametrize("action", table.ACTIONS)
def test_every_action_names_its_vm(action: str) -> None:
    shape, _, parse = table.ACTIONS[action][0].partition(".")
    assert args.of_words(getattr(getattr(args, shape), parse)(words(action))).vm == 7
