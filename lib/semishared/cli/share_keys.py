# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared share` that gives and takes back keys of Ceph for a share; what it prints is
secret.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from ..model import steps_share as s
from ..model.shares import Tree
from ..opennebula.xml import Image
from ..plan.client_access import SHUT_OUT, told
from .share_rows import Row


def credentials(
    tree: Tree, image: Image, vm: Optional[int], *, readonly: bool, revoke: bool, ask: Callable[[Any], Any]
) -> Row:
    """Return the key of who is no VM, made if need be, or the one that a VM has; raise MissingImage if it has
    none. Or take it back: both that an operator may have, of who writes and of who reads.
    """
    holder = -1 if vm is None else vm
    if revoke:
        taken = ask(s.TakeKeys(tree, image.id, holder))["taken"]
        whose = "the operator's key" if vm is None else f"the key of VM {vm}"
        said = (
            f"mounts nothing any more, and who has the share itself mounted by it is shut out; {SHUT_OUT}"
            if taken
            else "is not there"
        )
        return {"image": image.id, "taken": taken, "said": f"{whose} for image {image.id} {said}"}
    where = tree, image.id, image.source
    answer = ask(s.GiveKey(*where, holder, readonly) if vm is None else s.ShowKey(*where, vm))
    found = {name.lower(): value for name, value in told(answer)}
    return {"image": image.id, "credentials": found, "said": _lines(image.id, vm, found)}


def _lines(image: int, vm: Optional[int], one: dict[str, str]) -> str:
    does = "reads" if one["access"] == "ro" else "reads and writes"
    revoke = f"semishared share credentials {image}{'' if vm is None else f' --vm {vm}'} --revoke"
    mount = (
        f"mount -t ceph {one['monitors']}:{one['path']} /mnt -o "
        f"name={one['user']},fs={one['fs']},secretfile=FILE"
    )
    rows = [
        f"secret: who has this key {does} image {image}, until `{revoke}`",
        *(f"{name} {value}" for name, value in one.items()),
    ]
    return "\n".join([*rows, mount])
