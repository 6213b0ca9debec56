# SPDX-License-Identifier: Apache-2.0
"""Each transfer action through real ssh, held up on its host, its front-end driver killed (for the kill
suite).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Callable, Dict, List

from .cloud import STORE, SYSTEM, Cloud
from .rig import image_bytes

CONTENT = image_bytes("driver kills")
VM_XML = """<VM><ID>7</ID><LCM_STATE>3</LCM_STATE><TEMPLATE><DISK><DISK_ID>0</DISK_ID><IMAGE_ID>4</IMAGE_ID>
<TM_MAD>semishared</TM_MAD></DISK></TEMPLATE><HISTORY_RECORDS><HISTORY><DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS></VM>"""
Words = Callable[[str], List[str]]
TARGET = f"h1:{SYSTEM}/7/disk.0"


@dataclass(frozen=True)
class Held:
    """An action, the image its disk is from, and the lock for which its host side waits."""

    action: str
    words: Words
    image: int = 1
    before: Dict[str, Words] = field(default_factory=dict)
    lock: str = "vm-7"
    host: str = "h1"
    stdin: bytes = b""


def from_image(source: str) -> List[str]:
    return [f"fe:{source}", TARGET, "7", "100"]


LN: Dict[str, Words] = {"ln": from_image}
CLONE: Dict[str, Words] = {"clone": from_image}


def snapshot(_: str) -> List[str]:
    return [TARGET, "0", "7", "100"]


def backup(_: str) -> List[str]:
    return [f"h1:{SYSTEM}/7", "0", "one-7", "-", "7", "101"]


SNAPSHOT: Dict[str, Words] = {**CLONE, "snap_create": snapshot}
HELD = {
    "clone overlay": Held("clone", from_image, lock="base-100-1"),
    "clone copy": Held("clone", from_image, 2),
    "clone on store": Held("clone", from_image, 3),
    "clone kernel": Held("clone", lambda source: [f"fe:{source}", f"h1:{SYSTEM}/7/kernel", "7", "100"]),
    "ln": Held("ln", from_image, 4),
    "mkimage": Held("mkimage", lambda source: ["8", "qcow2", TARGET, "7", "101"], -1),
    "mkswap": Held("mkswap", lambda source: ["8", TARGET, "7", "101"], -1),
    "context": Held("context", lambda source: ["/etc/hostname:name", TARGET, "7", "101"], -1),
    "mvds": Held("mvds", lambda source: [TARGET, source, "7", "100"], 4, LN),
    "delete disk": Held("delete", lambda source: [TARGET, "7", "100"], 1, CLONE),
    "delete vm": Held("delete", lambda source: [f"h1:{SYSTEM}/7", "7", "101"], 1, CLONE),
    "mv, target held": Held(
        "mv", lambda source: [f"h1:{SYSTEM}/7", f"h2:{SYSTEM}/7", "7", "101"], 1, CLONE, host="h2"
    ),
    "mv, source held": Held("mv", lambda source: [f"h1:{SYSTEM}/7", f"h2:{SYSTEM}/7", "7", "101"], 1, CLONE),
    "premigrate": Held(
        "premigrate",
        lambda source: ["h1", "h2", f"{SYSTEM}/7", "7", "101"],
        4,
        LN,
        host="h2",
        stdin=base64.b64encode(VM_XML.encode()),
    ),
    "snap_create": Held("snap_create", snapshot, 1, CLONE, "vm-7-disks"),
    "snap_delete": Held("snap_delete", snapshot, 1, SNAPSHOT, "vm-7-disks"),
    "snap_revert": Held("snap_revert", snapshot, 1, SNAPSHOT, "vm-7-disks"),
    "prebackup": Held("prebackup", backup, 1, CLONE, "vm-7-disks", stdin=VM_XML.encode()),
    "postbackup": Held(
        "postbackup", backup, 1, {**CLONE, "prebackup": backup}, "vm-7-disks", stdin=VM_XML.encode()
    ),
}
IMAGES = {
    1: "",
    2: "<SEMISHARED_LOCAL>copy</SEMISHARED_LOCAL>",
    3: "<SEMISHARED_PLACE>shared</SEMISHARED_PLACE>",
}


def prepare(cloud: Cloud) -> str:
    """Upload the image all are made of; return its SOURCE."""
    for number, attributes in IMAGES.items():
        cloud.image(number, attributes=attributes)
    cloud.image(4, persistent=True)
    return cloud.upload(CONTENT)


def listing(cloud: Cloud) -> List[str]:
    """Return what there is of VM 7 and of its bases, with the content hashes of what is no qcow2 and not
    random.
    """
    found = []
    for node in (cloud.h1, cloud.h2):
        words = [
            "find",
            SYSTEM,
            "/var/lib/one/datastores/.semishared",
            f"{STORE}/.semishared",
            "-not",
            "-path",
            "*/locks*",
            "-not",
            "-path",
            "*/.uploads*",
            "-not",
            "-name",
            "staging",
            "-printf",
            "%p %y %m %l %s\\n",
        ]
        lines = node.run(words, check=False).stdout.decode().splitlines()
        found += [f"{node.name} {line}" for line in lines if " d " not in line]
    return sorted(found)
