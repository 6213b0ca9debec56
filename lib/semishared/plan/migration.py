# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM whose disks are all in place.

                   source                          target
premigrate         records are read                VM directory, links, context ISO
                   every store is probed  ----->   and seen to be the same
                                                   disks on the network are seen to be within reach
(vmm/migrate)      libvirt moves the guest; no disk of ours is copied
postmigrate        directory removed               -
failmigrate        -                               directory removed
each removal only where the domain is known not to run.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple, Sequence

from ..errors import MigrationRefused, SemisharedError
from ..model import layout
from ..model import steps as s
from ..model.exchange import Feed, Fetch, On, Plan, agree, warn
from ..opennebula.args import Migrate, VmPlace
from ..opennebula.xml import Vm
from .disks import running_domain

if TYPE_CHECKING:
    # Every action imports the plans of all; only this one reads records.
    from ..model.record import Record


class InPlace(NamedTuple):
    """What travels with the guest: links to make, stores to probe, disks that QEMU opens over the network."""

    links: tuple[s.LinkInPlace, ...]
    stores: tuple[str, ...]
    network: tuple[s.TakeNetworkDisk, ...] = ()


def premigrate(asked: Migrate, vm: Vm, token: str) -> Plan:
    """Plan premigrate: make everything ready at the target, or refuse. `token`: what nobody else would write into a store."""
    from ..model.record import described

    place, here = asked.target, asked.source_host
    left = vm.system_datastores[-1] if vm.system_datastores else -1
    source_dir = f"{place.datastore_location}/{left}/{place.vm}"
    yield agree(place.host)
    (found,) = yield On(here, (s.DescribeVm(place.vm, source_dir),))
    plan = check(asked, vm, described(found), left)
    if plan.stores:
        yield from _same_stores(here, place.host, plan.stores, token)
    yield On(place.host, (s.PrepareVm(place.vm, place.path), *plan.links, *plan.network))
    if vm.context_disk >= 0:
        path = layout.disk(source_dir, vm.context_disk)
        (sent,), file = yield Fetch(On(here, (s.SendFile(path),)))
        if sent["sha256"] != file.sha256:
            raise MigrationRefused(f"{path} could not be read whole")
        receive = s.ReceiveFile(layout.disk(place.path, vm.context_disk), place.vm, sent["size"], file.sha256)
        yield Feed(On(place.host, (receive,)), file)
    yield On(here, (s.AllowMigration(place.vm, source_dir, place.host, plan.stores),))


def _same_stores(source: str, target: str, stores: tuple[str, ...], token: str) -> Plan:
    """See that both hosts have the same `stores`: each reads what the other has written."""
    ask, answer = f"{token} {source}", f"{token} {target}"
    written = yield On(source, tuple(s.WriteProbe(store, ask) for store in stores))
    probes = [(store, str(found["name"])) for store, found in zip(stores, written)]
    yield On(target, tuple(s.AnswerProbe(store, name, ask, answer) for store, name in probes))
    yield On(source, tuple(s.CheckProbe(store, name, answer) for store, name in probes))


def postmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan postmigrate: remove what is left at the source."""
    yield from _clear(asked.source_host, asked.target.host, asked.target, vm)


def failmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan failmigrate: remove what was made at the target."""
    if asked.source_host != asked.target.host:
        yield from _clear(asked.target.host, asked.source_host, asked.target, vm)


def _clear(host: str, other: str, place: VmPlace, vm: Vm) -> Plan:
    """Remove the VM's directory on `host`, unless the VM runs there, or has that very directory on the `other` host."""
    not_running = s.CheckNotRunning(running_domain(vm))
    _, found = yield On(host, (not_running, s.LookAtVm(vm.id, place.path)))
    ends: tuple[s.Step, ...] = (not_running, s.RemoveVm(vm.id, place.path))
    if found["present"] and host != other:
        yield agree(other)
        (marked,) = yield On(host, (s.MarkVm(vm.id, place.path),))
        unmark = s.UnmarkVm(vm.id, place.path, str(marked["token"]))
        try:
            (looked,) = yield On(other, (s.LookForVm(vm.id, place.path, unmark.token, str(marked["seen"])),))
        except SemisharedError:
            yield On(host, (unmark,))
            raise
        if looked["same"]:
            yield On(host, (unmark,))
            yield warn(f"{place.path} is one directory on {host} and {other}: nothing was removed")
            return
        ends = (unmark, *ends)
    yield On(host, ends)


def check(request: Migrate, vm: Vm, records: Sequence[Record], datastore: int) -> InPlace:
    """Return what to make at the target; raise MigrationRefused, naming the disk, if any disk would be left behind.

    `records` are those of the source host, `datastore` the system datastore that the VM is leaving.
    """
    if request.source_host == request.target.host:
        raise MigrationRefused(f"VM {vm.id} cannot change its system datastore while it runs (not supported yet)")
    if int(request.target.path.split("/")[-2]) != datastore:
        raise MigrationRefused(f"VM {vm.id} cannot change host and system datastore at once")
    known = {record.disk: record for record in records}
    links, network = [], []
    for disk in vm.disks:
        if disk.id not in known:
            raise MigrationRefused(f"disk {disk.id} of VM {vm.id} is none of ours (driver {disk.driver or 'unknown'})")
    for number, record in sorted(known.items()):
        if record.is_local or record.image is None:
            raise MigrationRefused(
                f"disk {number} of VM {vm.id} is local to {request.source_host} ({record.how}): live migration of local disks "
                "is not supported yet"
            )
        ref = s.DiskRef(vm.id, number, request.target.path)
        if record.network:
            network.append(s.TakeNetworkDisk(ref, record.to_data()))
        elif record.place.moves_live != "nothing":
            raise MigrationRefused(f"disk {number} of VM {vm.id} ({record.how}) cannot migrate live yet")
        else:
            links.append(s.LinkInPlace(ref, record.image, record.readonly, session=False))
    stores = sorted({posixpath.dirname(link.image.source) for link in links})
    return InPlace(tuple(links), tuple(stores), tuple(network))
