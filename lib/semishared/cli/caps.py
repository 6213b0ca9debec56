# SPDX-License-Identifier: Apache-2.0
"""Print the commands with which the admin of a Ceph cluster makes the keys of an image datastore.

Nothing is run, and no key is read or shown. Names come from the attributes of a DATASTORE (id or name) that exists, or
from the options, for one that is still to be made.

exit codes: 0 printed; 2 a name is missing or none
"""

from __future__ import annotations

import argparse
import json

from ..errors import BadArguments
from ..model import stores
from ..plan.ceph_caps import Key, keys

WHERE = {
    "bridge": "on the front-end (or the BRIDGE_LIST hosts): makes, clones and removes images",
    "hosts": "on the hosts, and in their libvirt secret: reads and writes the disks of guests",
    "bases": "on the hosts: reads images to keep local bases, writes nothing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("datastore", nargs="?", metavar="DATASTORE", help="an image datastore with DISK_TYPE = RBD")
    parser.add_argument("--user", default="", metavar="NAME", help="CEPH_USER, without `client.`")
    parser.add_argument("--reader", default="", metavar="NAME", help="SEMISHARED_CEPH_READER; default: CEPH_USER")
    parser.add_argument("--bridge-user", default="", metavar="NAME", help="SEMISHARED_CEPH_BRIDGE_USER; default: CEPH_USER")
    parser.add_argument("--pool", default="", metavar="NAME", help=f"POOL_NAME ({stores.DEFAULT_POOL})")
    parser.add_argument("--data-pool", default="", metavar="NAME", help="EC_POOL_NAME, if images keep their data there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of commands")


def run(arguments: argparse.Namespace) -> int:
    """Print what is needed."""
    if arguments.datastore and any(getattr(arguments, name) for name in ("user", "reader", "bridge_user", "pool", "data_pool")):
        raise BadArguments("a datastore's own attributes name its users and pools: options are for one that is still to be made")
    wanted = _of_datastore(arguments.datastore) if arguments.datastore else _of_options(arguments)
    if arguments.json:
        print(json.dumps({"keys": [{"user": key.user, "roles": key.roles, "caps": dict(key.caps)} for key in wanted]}))
        return 0
    for key in wanted:
        for role in key.roles:
            print(f"# {WHERE[role]}")
        print(key.command())
    return 0


def _of_options(arguments: argparse.Namespace) -> list[Key]:
    if not arguments.user:
        raise BadArguments("name a datastore, or a user with --user")
    return keys(arguments.user, arguments.pool or stores.DEFAULT_POOL, arguments.reader, arguments.bridge_user, arguments.data_pool)


def _of_datastore(word: str) -> list[Key]:
    from ..opennebula.oned import Oned

    found = [datastore for datastore in Oned().datastores() if word in (str(datastore.id), datastore.name)]
    if not found:
        raise BadArguments(f"no datastore {word!r} in OpenNebula")
    access = stores.access(found[0])
    if not access.can.has_bridge:
        raise BadArguments(f"datastore {word} is not on Ceph (DISK_TYPE = RBD)")
    return keys(access.user, stores.pool(found[0]), access.reader, access.bridge_user, access.data_pool)
