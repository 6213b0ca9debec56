# SPDX-License-Identifier: Apache-2.0
"""An image datastore's template: of which kind its store is, and how machines reach it.

The kind of a datastore is its DISK_TYPE, OpenNebula's own attribute: RBD is `rbd`, anything else `dir`. oned
keeps it beside the template too, where no update of the template reaches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import BadAttribute
from .. import attributes as a
from .access import HERE, KINDS, MOUNTED, Access, Kind

if TYPE_CHECKING:
    from typing import Mapping, Protocol

    from ..attributes import Attribute, Holder

    class Datastore(Holder, Protocol):
        """An image datastore of OpenNebula's."""

        @property
        def disk_type(self) -> int: ...


ADMIN = "admin"
NUMBERS = {3: "RBD", 10: "FILESYSTEM"}
"""DISK_TYPE as oned keeps it beside the template (Image::DiskType); of any other the store is mounted."""
OF_CEPH = ("CEPH_USER", "CEPH_SECRET", "CEPH_HOST", "CEPH_CONF", "POOL_NAME", "EC_POOL_NAME")


def is_whole(datastore: Datastore) -> bool:
    """Tell whether the template has its DISK_TYPE, which oned writes into each (lost.py)."""
    return bool(datastore.attribute("DISK_TYPE"))


def disk_type(datastore: Datastore) -> str:
    """Return DISK_TYPE: of the template, else what oned keeps beside it, '' for neither."""
    return datastore.attribute("DISK_TYPE").upper() or NUMBERS.get(datastore.disk_type, "")


def kind(datastore: Datastore) -> Kind:
    """Return the kind of the store of `datastore`."""
    said = disk_type(datastore)
    return next((one for one in KINDS.values() if one.disk_type == said), KINDS["dir"])


def is_shares(datastore: Datastore) -> bool:
    """Tell whether the images of a datastore are shares (model/share/share.py), and no disks."""
    return disk_type(datastore) == "FILESYSTEM"


def access(datastore: Datastore) -> Access:
    """Return how the store of `datastore` is reached; raise BadAttribute."""
    return WAYS[kind(datastore).name](datastore, a.CLOUD.of_store(datastore))


def _mounted(datastore: Datastore, cloud: str) -> Access:
    words = [name for name in OF_CEPH if datastore.attribute(name)]
    if words and not is_shares(datastore):
        raise BadAttribute(
            f"datastore {datastore.id} has {words[0]} of a store on Ceph, and DISK_TYPE "
            f"{disk_type(datastore) or 'FILE'}: onedatastore update {datastore.id}, DISK_TYPE = RBD"
        )
    return MOUNTED._replace(marker=a.STORE.of_store(datastore), cloud=cloud)


def _ceph(datastore: Datastore, cloud: str) -> Access:
    user, hosts = ceph_user(datastore), a.CEPH_HOST.words(datastore)
    return Access(
        "rbd",
        user,
        _user(datastore, a.CEPH_READER) or user,
        _user(datastore, a.CEPH_BRIDGE_USER) or user,
        a.CEPH_CONF.of_store(datastore),
        hosts,
        a.CEPH_SECRET.of_store(datastore),
        a.EC_POOL_NAME.of_store(datastore),
        cloud=cloud,
        **_remote(datastore),
    )


WAYS = {"dir": _mounted, "rbd": _ceph}


def ceph_user(datastore: Holder) -> str:
    """Return CEPH_USER; raise BadAttribute if there is none, or a key beside it."""
    user = _user(datastore, a.CEPH_USER)
    if not user:
        raise BadAttribute(
            f"datastore {datastore.id} has no CEPH_USER: without one Ceph takes client.admin, "
            f"which nothing here runs as"
        )
    if datastore.attribute("CEPH_KEY"):
        raise BadAttribute(
            f"CEPH_KEY of datastore {datastore.id}: put the key into a keyring that CEPH_CONF "
            f"names, and remove this"
        )
    return user


def _remote(datastore: Datastore) -> dict[str, str]:
    user, secret = _user(datastore, a.CEPH_REMOTE), a.CEPH_REMOTE_SECRET.of_store(datastore)
    if bool(user) != bool(secret):
        raise BadAttribute(
            f"datastore {datastore.id} names only one of SEMISHARED_CEPH_REMOTE and "
            f"SEMISHARED_CEPH_REMOTE_SECRET: a user and libvirt's secret with the key of that user"
        )
    return {"remote": user, "remote_secret": secret}


def refuse_stock(of: str, holder: Holder, template: Mapping[str, str]) -> None:
    """Raise BadAttribute for an attribute of OpenNebula's own drivers that cannot work here.

    `of` is what `holder` is, in the words of model/stock.py.
    """
    if template.get("DISK_TYPE", "") not in a.DISK_TYPES or not a.REFUSABLE.isdisjoint(template):
        from .. import stock

        stock.refuse(of, f"{of} {holder.id}", template)


def unmarked(datastore: Datastore) -> str:
    """Return what to say of a datastore whose store should have a marker and has none, '' of any other."""
    if not kind(datastore).is_in_doubt(a.STORE.text(datastore)):
        return ""
    return (
        f"datastore {datastore.id} has no SEMISHARED_STORE: that its store is not mounted would not be "
        "noticed; `semishared setup --apply` marks it"
    )


def _user(datastore: Holder, attribute: Attribute) -> str:
    user = attribute.of_store(datastore)
    if user == ADMIN or user.startswith("client."):
        raise BadAttribute(
            f"{attribute.name} of datastore {datastore.id} is {user!r}: name a user of its own, without "
            f"`client.`, and not admin"
        )
    return user


def fence_user(datastore: Datastore) -> str:
    """Return the Ceph user that shuts dead hosts out of an rbd datastore's cluster, '' for none.

    Raise BadAttribute.
    """
    user = _user(datastore, a.CEPH_FENCE_USER)
    others = (a.CEPH_USER, a.CEPH_READER, a.CEPH_BRIDGE_USER)
    if user and user in [other.text(datastore) for other in others]:
        raise BadAttribute(
            f"SEMISHARED_CEPH_FENCE_USER of datastore {datastore.id} is {user!r}, who has another "
            f"role: name one of its own"
        )
    return user


def pool(datastore: Datastore) -> str:
    """Return the pool of an rbd datastore; raise BadAttribute for a name that no pool should have."""
    return a.POOL_NAME.of_store(datastore)


def is_trashed(datastore: Datastore) -> bool:
    """Tell whether removed images go to the trash of their pool; words as stock's scripts read them."""
    return datastore.attribute("CEPH_TRASH") in ("yes", "YES", "true", "TRUE")


def bridges(datastore: Holder) -> list[str]:
    """Return the hosts of BRIDGE_LIST, empty for the front-end; raise BadAttribute."""
    return list(a.BRIDGE_LIST.words(datastore))


def changers(datastore: Datastore, number: int) -> list[str]:
    """Return the machines that make, change and remove image `number` of a datastore, HERE for this one.

    The first one does it; if that does not answer, the next can. A mounted store too may have bridges: then
    the front-end need not mount it.
    """
    found = bridges(datastore)
    at = number % len(found) if found else 0
    return [*found[at:], *found[:at]] or [kind(datastore).machine]


def machine(datastore: Datastore, number: int, host: str = HERE) -> str:
    """Return the machine that changes images of a datastore for object `number` (by its id), for a VM's disk.

    That is its bridge, or `host`, which does the action; of a mounted store always `host`, which mounts it.
    """
    return (changers(datastore, number)[0] if kind(datastore).machine else HERE) or host
