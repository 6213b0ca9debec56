# SPDX-License-Identifier: Apache-2.0
"""Facts of oned, Ceph and ssh about a host to shut out: its stores, its guests, signs of life.

And the marks of fences: documents in oned, each signed by the front-ends' key (tools/key.py).
"""

from __future__ import annotations

import os
from typing import Iterator, Sequence, Tuple

from .. import NAME
from ..errors import BadArguments, BadAttribute, NoKey, ToolFailed, ToolTimeout
from ..model.attributes import CLOUD
from ..model.steps import Access
from ..model.store import dir_names, rbd_names, template
from ..model.store.access import is_path
from ..model.store.rbd_names import Ceph, Opener
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.states import LcmState
from ..opennebula.xml import Datastore, Disk, Host, Image, View, Vm
from ..plan.care import fence as plan
from ..plan.care.fence import ATTRIBUTE, Mark, mark_of
from ..plan.vm import moves
from ..store.rbd.blocklist import Fencer
from ..tools import key
from ..tools.hung_store import unless_it_hangs
from ..tools.run import run
from ..tools.this_machine import addresses, are_one
from . import front_ends

TURNED_AWAY = ("Permission denied", "Host key verification failed")
"""Words of an ssh that was refused: a machine is there."""


def why_alive(host: Host, connect_s: int, as_monitored: bool = True) -> str:
    """Return a sign that a host is not off, '' if there is none.

    OpenNebula needs minutes to see that a host is gone: `as_monitored` says whether its word counts. Callers
    ask anew wherever they rely on the host being off.
    """
    if as_monitored and host.is_monitored:
        return "OpenNebula monitors it"
    return "it answers over ssh" if answers_ssh(host.name, connect_s) else ""


def answers_ssh(host: str, connect_s: int) -> bool:
    """Tell whether a host answers over ssh, also if it refuses the login."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}"]
    try:
        # Through a shared connection ssh itself has no limit; once more that time for the answer.
        run(["ssh", *options, "--", host, "true"], timeout_s=2 * connect_s, ok=tuple(range(255)))
    except ToolFailed as e:
        return any(words in e.detail for words in TURNED_AWAY)
    except ToolTimeout:
        return False
    return True


NOBODY = "192.0.2.1:0/1"
"""An address for documentation (RFC 5737): its removal from a blocklist lets no client in."""
MOVING = (LcmState.MIGRATE, *moves.UNKNOWN)
"""States in which both hosts may have the VM's guest."""


class Cloud(NamedTuple):
    """oned's facts about a host."""

    host: Host
    hosts: Sequence[Host]
    pools: Sequence[Datastore]
    """Image datastores of ours on Ceph that the host can reach."""
    mounted: Sequence[Datastore]
    """Our other datastores that it can reach; of those with shares, the ones that its guests may write to."""
    disks: tuple[tuple[int, str], ...]
    """Datastore and SOURCE, or clone, of disks that guests of the host may have open for writing."""
    all_pools: Sequence[Datastore]
    """All image datastores of ours on Ceph."""
    odd: tuple[str, ...]
    """Disks that guests may have open in an unknown place, and why."""
    front_ends: frozenset[str] = frozenset()
    """Addresses of the other front-ends."""

    def on(self, datastores: Sequence[Datastore]) -> list[str]:
        """Return the disks in these datastores."""
        numbers = {store.id for store in datastores}
        return [disk for number, disk in self.disks if number in numbers]

    def machines(self) -> plan.Machines:
        """Return which machines have which addresses."""
        told = {host.name: plan.addresses_of(host) for host in self.hosts}
        return plan.Machines(self.host.name, told, self.front_ends.union(addresses()))


def ask(oned: Oned, name: str) -> Cloud:
    """Return oned's facts about a host, by its name; raise BadArguments, OnedUnavailable."""
    hosts = oned.hosts()
    found = [host for host in hosts if host.name == name]
    if not found:
        raise BadArguments(f"no host {name!r} in OpenNebula")
    host = found[0]
    # Several clouds may have a datastore of one name; ids are oned's.
    ours = {
        store.id: store
        for store in oned.datastores()
        if NAME in (store.driver, store.text("DS_MAD")) and not store.is_system
    }
    images = {image.id: image for image in oned.images()}
    disks, odd = list[Tuple[int, str]](), list[str]()
    for vm in _guests(oned, host.id):
        for disk in vm.disks:
            image = images.get(disk.image_id)
            if image is None and disk.image_id >= 0:
                odd.append(f"disk {disk.id} of VM {vm.id}: OpenNebula has no image {disk.image_id}")
            if image is None or image.store_id not in ours or disk.is_readonly or not image.source:
                continue
            try:
                disks += [(image.store_id, where) for where in _places(vm, disk, image, ours[image.store_id])]
            except BadArguments as e:
                odd.append(f"disk {disk.id} of VM {vm.id}: {e.detail}")
    used = {number for number, _ in disks}
    # A share has no lock and no epoch. A daemon of the host, or the guest itself, writes to it: the file
    # system's clients and addresses are unknown to our blocklists. Without a guest that has a share the host
    # writes to none.
    near = [
        store.id
        for store in ours.values()
        if not template.is_shares(store) and host.cluster_id in store.clusters
    ]
    reached = [store for store in ours.values() if store.id in used or store.id in near]
    pools = [store for store in ours.values() if not template.kind(store).is_mounted]
    mounted = [store for store in reached if store not in pools]
    near_pools = [store for store in reached if store in pools]
    return Cloud(
        host,
        hosts,
        near_pools,
        mounted,
        tuple(disks),
        pools,
        tuple(odd),
        front_ends.addresses_but(oned, name),
    )


def clusters(pools: Sequence[Datastore]) -> list[list[Datastore]]:
    """Return datastores on Ceph by how they are reached, which is once for each cluster."""
    found: dict[str, list[Datastore]] = {}
    for store in pools:
        found.setdefault(store.attribute("CEPH_CONF"), []).append(store)
    return list(found.values())


def _guests(oned: Oned, host: int) -> list[Vm]:
    """Return the VMs that may have a guest on a host, or are leaving it; by its id, as names change."""
    active = [vm for vm in oned.vms() if vm.is_active]
    near = [vm.id for vm in active if host in vm.host_ids[-1:] or vm.lcm_state in MOVING]
    return [vm for vm in map(oned.vm, near) if host in vm.host_ids[-2 if vm.lcm_state in MOVING else -1 :]]


def _places(vm: Vm, disk: Disk, image: Image, store: Datastore) -> Iterator[str]:
    """Yield where a guest may write of a disk: its clone, if any, or the image; raise BadArguments."""
    if image.is_persistent or template.is_shares(store):
        yield image.source
    elif not is_path(image.source):
        yield rbd_names.clone(image.source, vm.id, disk.id)
    else:
        directory, _, name = absolute(image.source, "SOURCE").rpartition("/")
        clone = dir_names.clone(f"{directory}/{dir_names.side(name)}", vm.id, disk.id, CLOUD.text(store))
        # Else its disk is on the host.
        if unless_it_hangs(lambda: os.path.lexists(clone), True):
            yield clone


def reached(datastores: Sequence[Datastore]) -> tuple[Access, str]:
    """Return how the front-end reaches their cluster to block a host; raise BadAttribute, SemisharedError."""
    users = sorted({template.fence_user(store) for store in datastores} - {""})
    numbers = ", ".join(str(store.id) for store in datastores)
    if not users:
        raise BadAttribute(
            f"datastore {numbers} has no SEMISHARED_CEPH_FENCE_USER (`semishared caps --role "
            f"fence {datastores[0].id}`)"
        )
    return template.access(datastores[0]), users[0]


def look(cloud: Cloud, datastores: Sequence[Datastore]) -> tuple[Fencer, Ceph]:
    """Ask a cluster; raise SemisharedError."""
    fencer = Fencer(*reached(datastores))
    images: list[str] = []
    openers: list[Opener] = []
    for pool in sorted({template.pool(store) for store in datastores}):
        names, found = fencer.openers(pool)
        images += names
        openers += found
    _, daemons = fencer.look()
    bridges = {name for store in datastores for name in template.bridges(store)}
    # BRIDGE_LIST may name a host differently from OpenNebula.
    own = {cloud.host.name} if any(are_one(name, cloud.host.name) for name in bridges) else set()
    return fencer, Ceph(fencer.fsid, tuple(openers), daemons, frozenset(images), frozenset(bridges | own))


def try_key(datastores: Sequence[Datastore]) -> None:
    """Raise SemisharedError unless the front-end may block hosts in their cluster and see clients."""
    fencer = Fencer(*reached(datastores))
    fencer.look()
    fencer.unblock([NOBODY])
    for pool in {template.pool(store) for store in datastores}:
        fencer.see(pool)


# Marks of fences: documents in oned, which all front-ends see, each signed by the front-ends' key.
#
# A host's template is no place for them: oned merges the output of the host's probe into it
# (Host::update_info), so a host could write its own mark, put an older one back, or remove it by an empty
# attribute. Monitoring writes to no document. Users may make documents (oned's first ACL rule), which are not
# of oneadmin's group. Other users may manage all documents by a rule, as OneFlow's admins: they do not have
# the key.


TYPE = 5315
"""The type of our documents; OpenNebula's own types have three digits, from 100 on."""


class _Noted(NamedTuple):
    """A document of ours."""

    id: int
    mark: Mark
    is_right: bool
    """Whether its code is right."""


class Marks:
    """The marks that one front-end reads and writes; raise NoKey without a key, OnedUnavailable."""

    def __init__(self, oned: Oned) -> None:
        self._oned = oned
        self._key, why = key.look(oned.key)
        if why:
            raise NoKey(f"{oned.key} {why}")

    def of(self, host: Host) -> Mark:
        """Return the mark of a host: an empty one if there is none, or none that is believed (`strange`)."""
        return self.of_all([host])[host.name]

    def of_all(self, hosts: Sequence[Host]) -> dict[str, Mark]:
        """Return the marks of hosts, by their names: oned is asked once."""
        documents = self._oned.documents(TYPE)
        return {host.name: self._believed(host, documents) for host in hosts}

    def _believed(self, host: Host, documents: Sequence[View]) -> Mark:
        noted = self._noted(host, documents)
        right = next((one.mark for one in noted if one.is_right), None)
        if right:
            return right
        why = ""
        if noted:
            why = (
                f"the mark of {host.name}'s fence (document {noted[0].id} in OpenNebula) has no code "
                f"by the key of this front-end"
            )
        elif mark_of(host).stands:
            why = (
                f"{host.name} has the mark of a fence in its template, as older versions wrote it and "
                f"its own monitoring can"
            )
        return Mark(
            strange=f"{why}: it says nothing; to have the host shut out: `semishared fence {host.name}`"
            if why
            else ""
        )

    def note(self, host: Host, mark: Mark) -> None:
        """Write a host's mark in the place of its former one."""
        text = mark.template(host.id, key.code(self._key, words(mark, host.id)))
        # If two front-ends have made one each at once, both read the first.
        found = next((one.id for one in self._noted(host, self._oned.documents(TYPE)) if one.is_right), None)
        if found is None:
            self._oned.create_document(f'NAME = "semishared-fence-{host.id}"\n{text}', TYPE)
        else:
            self._oned.update_document(found, text)

    def _noted(self, host: Host, documents: Sequence[View]) -> list[_Noted]:
        """Return the documents of oneadmin's group about a host, the oldest first."""
        found = []
        for document in documents:
            if document.number("GID") == 0 and document.number(f"TEMPLATE/{ATTRIBUTE}/HOST") == host.id:
                found.append(self._read(document, host.id))
        return sorted(found, key=lambda one: one.id)

    def _read(self, document: View, host: int) -> _Noted:
        mark = mark_of(document)
        right = key.is_right(self._key, words(mark, host), document.text(f"TEMPLATE/{ATTRIBUTE}/CODE"))
        return _Noted(document.number("ID"), mark, right)


def words(mark: Mark, host: int) -> list[str]:
    """Return the words that a code is made of."""
    return ["fence", *(word for pair in mark.values(host).items() for word in pair)]
