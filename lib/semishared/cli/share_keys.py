# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared share` that gives and takes back keys of Ceph for a share; what it prints is secret."""

from __future__ import annotations

from typing import Any, Callable, Optional

from ..errors import MissingImage
from ..model import steps_share as s
from ..model.shares import Tree
from ..plan.client_access import told

Row = dict[str, Any]


def credentials(tree: Tree, image: int, vm: Optional[int], *, readonly: bool, revoke: bool, ask: Callable[[Any], Any]) -> Row:
    """Return, or take back, the key of who is no VM, made if need be, or the one that a VM has; raise MissingImage if it has none."""
    holder = -1 if vm is None else vm
    if revoke:
        taken = ask(s.TakeKeys(tree, image, holder))["taken"]
        whose = "the operator's key" if vm is None else f"the key of VM {vm}"
        return {"image": image, "taken": taken, "said": f"{whose} for image {image} is {'good no more' if taken else 'not there'}"}
    if vm is not None:
        known = [key for key in ask(s.ListKeys(tree))["keys"] if (key["image"], key["vm"]) == (image, vm)]
        if not known:
            raise MissingImage(f"VM {vm} has no key for image {image}: it gets one when it boots (SEMISHARED_SHARE_ACCESS = client)")
        readonly = known[0]["readonly"]
    found = {name.lower(): value for name, value in told(ask(s.GiveKey(tree, image, holder, readonly)))}
    return {"image": image, "credentials": found, "said": _lines(image, vm, found)}


def _lines(image: int, vm: Optional[int], one: dict[str, str]) -> str:
    does = "reads" if one["access"] == "ro" else "reads and writes"
    revoke = f"semishared share credentials {image}{'' if vm is None else f' --vm {vm}'} --revoke"
    mount = f"mount -t ceph {one['monitors']}:{one['path']} /mnt -o name={one['user']},fs={one['fs']},secretfile=FILE"
    rows = [f"secret: who has this key {does} image {image}, until `{revoke}`", *(f"{name} {value}" for name, value in one.items())]
    return "\n".join([*rows, mount])
