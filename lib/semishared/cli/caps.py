# SPDX-License-Identifier: Apache-2.0
"""Print the commands with which the admin of a Ceph cluster makes the keys of an image datastore.

Nothing is run, and no key is read or shown. Names come from the attributes of a DATASTORE (id or name) that
exists, or from the options, for one that is still to be made.

exit codes: 0 printed; 2 a name is missing or none
"""

from __future__ import annotations

import argparse

from ..errors import BadArguments
from ..model.attributes import POOL_NAME
from ..model.store import template
from ..opennebula.oned import Oned
from ..plan.store.ceph_caps import Key, fence, keys
from .command import argument, called, flag, put, put_json

WHERE = {
    "bridge": "on the front-end (or the BRIDGE_LIST hosts): makes, clones and removes images",
    "hosts": "on the hosts, and in their libvirt secret: reads and writes the disks of guests",
    "bases": "on the hosts: reads images to keep local bases, writes nothing",
    "remote": "on the hosts, and in their libvirt secret: reads what remote-first disks lie over, "
    "writes no data",
    "fence": "on each front-end, nowhere else: shuts a dead host out (`semishared fence`), writes nothing",
}
FENCE_USER = "semishared-fence"
"""The user of the printed key for a datastore that names none."""


ARGUMENTS = (
    argument("datastore", nargs="?", metavar="DATASTORE", help="an image datastore with DISK_TYPE = RBD"),
    *(
        argument(f"--{option}", default="", metavar="NAME", help=text)
        for option, text in (
            ("user", "CEPH_USER, without `client.`"),
            ("reader", "SEMISHARED_CEPH_READER; default: CEPH_USER"),
            ("bridge-user", "SEMISHARED_CEPH_BRIDGE_USER; default: CEPH_USER"),
            ("remote", "SEMISHARED_CEPH_REMOTE; default: CEPH_USER does that too"),
            ("fence-user", "SEMISHARED_CEPH_FENCE_USER; default: no such key"),
        )
    ),
    argument("--role", choices=list(WHERE), help="only the key of this role"),
    argument("--pool", default="", metavar="NAME", help=f"POOL_NAME ({POOL_NAME.default})"),
    argument("--data-pool", default="", metavar="NAME", help="EC_POOL_NAME, if images keep their data there"),
    flag("--json", "one JSON object on stdout instead of commands"),
)
OPTIONS = ("user", "reader", "bridge_user", "remote", "fence_user", "pool", "data_pool")


def run(arguments: argparse.Namespace) -> int:
    """Print what is needed."""
    if arguments.datastore and any(getattr(arguments, name) for name in OPTIONS):
        own = "a datastore's own attributes name its users and pools"
        raise BadArguments(f"{own}: options are for one that is still to be made")
    word, role = arguments.datastore, arguments.role
    wanted = _of_datastore(word, role) if word else _of_options(arguments)
    wanted = [key for key in wanted if role in (None, *key.roles)]
    if arguments.json:
        rows = [{"user": key.user, "roles": key.roles, "caps": dict(key.caps)} for key in wanted]
        put_json({"keys": rows}, None)
        return 0
    for key in wanted:
        for role in key.roles:
            put(f"# {WHERE[role]}")
        put(key.command())
    return 0


def _of_options(arguments: argparse.Namespace) -> list[Key]:
    pool = arguments.pool or POOL_NAME.default
    shuts_out = arguments.fence_user or (FENCE_USER if arguments.role == "fence" else "")
    fencing = [fence(shuts_out, [pool])] if shuts_out else []
    if not arguments.user and not fencing:
        raise BadArguments("name a datastore, or a user with --user")
    if shuts_out in (arguments.user, arguments.reader, arguments.bridge_user, arguments.remote) and shuts_out:
        raise BadArguments(f"{shuts_out} has another role: the key that shuts hosts out is one of its own")
    if not arguments.user:
        return fencing
    others = (arguments.reader, arguments.bridge_user, arguments.data_pool, arguments.remote)
    return [*keys(arguments.user, pool, *others), *fencing]


def _of_datastore(word: str, role: str | None) -> list[Key]:
    known = Oned().datastores()
    datastore = called(known, word, "datastore")[0]
    access = template.access(datastore)
    if not access.user:
        raise BadArguments(f"datastore {word} is not on Ceph (DISK_TYPE = RBD)")
    pool = template.pool(datastore)
    made = keys(access.user, pool, access.reader, access.bridge_user, access.data_pool, access.remote)
    user = template.fence_user(datastore) or (FENCE_USER if role == "fence" else "")
    if not user:
        return made
    # `ceph auth get-or-create` refuses a user with other capabilities: one key for all pools of a cluster,
    # as far as CEPH_CONF tells that.
    beside = [one for one in known if one.attribute("CEPH_CONF") == datastore.attribute("CEPH_CONF")]
    stores = (datastore, *(one for one in beside if template.fence_user(one) == user))
    return [*made, fence(user, [template.pool(store) for store in stores])]
