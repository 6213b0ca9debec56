# SPDX-License-Identifier: Apache-2.0
"""The transfer actions around a live migration (vmm/semishared/migrate moves the guest): see plan/migration.py."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..errors import MigrationRefused, NotSupported, SemisharedError
from ..model import steps as s
from ..opennebula import args
from ..opennebula.xml import Vm, decode
from ..plan import migration

if TYPE_CHECKING:
    from .action import Action


def _migrating(action: Action) -> tuple[args.Migrate, Vm]:
    request = args.Migrate.parse(action.argv)
    if request.caller:
        raise NotSupported(f"disks of ours in a system datastore of driver {request.caller}")
    vm = Vm.parse(decode(sys.stdin.buffer.read()))
    action.seq = vm.seq
    return request, vm


def premigrate(action: Action) -> None:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - make everything ready at the target, or refuse."""
    from ..model.record import described

    request, vm = _migrating(action)
    place = request.target
    left = vm.system_datastores[-1] if vm.system_datastores else -1
    source_dir = f"{place.datastore_location}/{left}/{place.vm}"
    with action.session(request.source_host) as source, action.session(place.host) as target:
        target.agree()
        (found,) = source.run([s.DescribeVm(place.vm, source_dir)])
        plan = migration.check(request, vm, described(found), left)
        token = os.urandom(8).hex()
        ask, answer = f"{token} {request.source_host}", f"{token} {place.host}"
        written = source.run([s.WriteProbe(store, ask) for store in plan.stores])
        probes = [(store, str(found["name"])) for store, found in zip(plan.stores, written) if isinstance(found, dict)]
        target.run([s.AnswerProbe(store, name, ask, answer) for store, name in probes])
        source.run([s.CheckProbe(store, name, answer) for store, name in probes])
        target.run([s.PrepareVm(place.vm, place.path), *plan.links, *plan.network])
        if vm.context_disk >= 0:
            _carry_file(source, target, f"{source_dir}/disk.{vm.context_disk}", place, vm.context_disk)
        source.run([s.AllowMigration(place.vm, source_dir, place.host, plan.stores)])


def _carry_file(source: object, target: object, path: str, place: args.VmPlace, disk: int) -> None:
    import hashlib

    source.begin([s.SendFile(path)])  # type: ignore[attr-defined]
    chunks = []
    message = source.read()  # type: ignore[attr-defined]
    while isinstance(message, bytes):
        chunks.append(message)
        message = source.read()  # type: ignore[attr-defined]
    data = b"".join(chunks)
    digest = hashlib.sha256(data).hexdigest()
    if message["results"][0] != {"sha256": digest, "size": len(data)}:
        raise MigrationRefused(f"{path} could not be read whole")
    step = s.ReceiveFile(f"{place.path}/disk.{disk}", place.vm, len(data), digest)
    target.run([step], chunks, digest)  # type: ignore[attr-defined]


def postmigrate(action: Action) -> None:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - remove what is left at the source."""
    request, vm = _migrating(action)
    _clear(action, request.source_host, request.target.host, request.target, vm)


def failmigrate(action: Action) -> None:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - remove what was made at the target."""
    request, vm = _migrating(action)
    if request.source_host != request.target.host:
        _clear(action, request.target.host, request.source_host, request.target, vm)


def _clear(action: Action, host: str, other: str, place: args.VmPlace, vm: Vm) -> None:
    """Remove the VM's directory on `host`, unless the VM runs there, or has that very directory on the `other` host."""
    from ..plan import disks

    domain = disks.running_domain(vm)
    with action.session(host) as session:
        _, found = session.run([s.CheckNotRunning(domain), s.MarkVm(vm.id, place.path)])
        assert isinstance(found, dict)
        token, seen = str(found["token"]), str(found["seen"])
        if found["present"] and host != other:
            try:
                (looked,) = action.on(other, [s.LookForVm(vm.id, place.path, token, seen)])
            except SemisharedError:
                session.run([s.UnmarkVm(vm.id, place.path, token)])
                raise
            if isinstance(looked, dict) and looked["same"]:
                session.run([s.UnmarkVm(vm.id, place.path, token)])
                action.report.warn(f"{place.path} is one directory on {host} and {other}: nothing was removed")
                return
        session.run([s.UnmarkVm(vm.id, place.path, token), s.CheckNotRunning(domain), s.RemoveVm(vm.id, place.path)])
