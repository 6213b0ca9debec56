# SPDX-License-Identifier: Apache-2.0
"""Migration and recovery."""

from __future__ import annotations

import base64
from typing import Optional, Union

from .disks import DiskOps
from .drivers import ActionFailed, Refused
from .objects import Datastore, History, Vm, now
from .states import RETRY, Act, Lcm
from .states import Vm as State
from .template import scalar
from .transfer import is_directory

_MOVES = {
    State.POWEROFF: Lcm.PROLOG_MIGRATE_POWEROFF,
    State.SUSPENDED: Lcm.PROLOG_MIGRATE_SUSPEND,
    State.ACTIVE: Lcm.PROLOG_MIGRATE_UNKNOWN,
}
"""What a cold migration is called, by the state it begins in; an active VM with which it begins is one that
is not seen.
"""


class MoveOps(DiskOps):
    """From host to host, from datastore to datastore, and out of failures."""

    def vm_migrate(
        self, vm_id: int, host: Union[int, str], datastore_id: Optional[int] = None, how: str = "save"
    ) -> None:
        """Migrate: `save`, `poweroff`, `poweroff-hard` or `live`; a stopped VM just moves its files."""
        with self._operate(vm_id) as vm:
            unseen = (vm.state, vm.lcm) == (State.ACTIVE, Lcm.UNKNOWN)
            if not unseen:
                self._need(vm, State.ACTIVE, State.POWEROFF, State.SUSPENDED)
            with self.data:
                target = self.host(host)
                ds = self.datastore(vm.last.ds_id if datastore_id is None else datastore_id)
                old = vm.last
                if target.id == old.host.id and ds.id == old.ds_id:
                    raise Refused("VM is already running on the specified host and datastore")
                if ds.tm_mad != old.tm_mad:
                    raise Refused("Cannot migrate to a system datastore of another transfer driver")
                if how == "live" and any(map(is_directory, vm.disks)):
                    raise Refused("VM with FILESYSTEM disks cannot be live-migrated")
                if how == "live" and target.id != old.host.id and ds.id != old.ds_id:
                    raise Refused("Cannot live migrate to another host and datastore at once")
                if ds.id != old.ds_id:
                    self._allow_change(ds, how)
                self._require_system(vm)
            if vm.state != State.ACTIVE or unseen:
                self._migrate_files(vm, self._add_history(vm, target, ds), vm.state)
            elif how == "live":
                self._act(old, Act.LIVE_MIGRATE)
                self._migrate_live(vm, old, self._add_history(vm, target, ds))
            else:
                self._migrate_running(vm, old, self._add_history(vm, target, ds), how)

    @staticmethod
    def _allow_change(ds: Datastore, how: str) -> None:
        """Ask the datastore that a VM is to move to whether its driver can do that
        (src/rm/api/VirtualMachineAPI.cc).
        """
        if ds.template["DS_MIGRATE"] != "YES":
            raise Refused("System datastore migration not supported by driver")
        if how == "live" and ds.template["DS_LIVE_MIGRATE"] != "YES":
            raise Refused("Live system datastore migration not supported by driver")

    def vm_recover(self, vm_id: int, how: str) -> None:
        """Recover: `retry`, `success`, `failure`, `delete` or `recreate`."""
        with self._operate(vm_id) as vm:
            if how == "delete":
                self._delete(vm)
            elif how == "recreate":
                self._recreate(vm)
            elif vm.state != State.ACTIVE:
                raise Refused(f"Wrong state {vm.state} to recover VM {vm_id}")
            elif how == "retry":
                self._retry(vm)
            elif how == "success":
                self._proceed(vm)
            elif how == "failure":
                self._give_up(vm)
            else:
                raise Refused(f"Unknown recovery {how}")

    # -- migration ------------------------------------------------------------------------------

    def _migrate_files(self, vm: Vm, new: History, back: int) -> None:
        with self.data:
            old, moment = vm.history[-2], now()
            old.etime = old.retime = moment
            new.pstime = moment
            self._act(new, Act.MIGRATE)
            vm.resched = False
            if back == State.ACTIVE:
                self._act(old, Act.MIGRATE)
            self._enter(vm, _MOVES[back])
        self._move_files(vm)

    def _move_files(self, vm: Vm) -> None:
        """Run the moves of a cold migration, then go on as the state says."""
        self._transfer(vm, "migrate", self._lines(vm).move(vm.history[-2], vm.last))
        self._moved(vm)

    def _moved(self, vm: Vm) -> None:
        backs = {Lcm.PROLOG_MIGRATE_POWEROFF: State.POWEROFF, Lcm.PROLOG_MIGRATE_SUSPEND: State.SUSPENDED}
        if vm.lcm in backs:
            with self.data:
                vm.last.petime = vm.last.retime = now()
                self._enter(vm, Lcm.INIT, backs[vm.lcm])
        else:
            saved = vm.last.action == Act.MIGRATE and vm.lcm != Lcm.PROLOG_MIGRATE_UNKNOWN
            self._boot(vm, Lcm.BOOT_MIGRATE if saved else Lcm.BOOT)

    def vm_lose(self, vm_id: int) -> None:
        """Let monitoring not see a running VM any more, as when its host is lost."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE)
            self._enter(vm, Lcm.UNKNOWN)

    def vm_find_off(self, vm_id: int) -> None:
        """Let monitoring find a VM off that oned has for running or lost, as when its host was started again
        (monitor_poweroff_action).
        """
        with self._operate(vm_id) as vm:
            if (vm.state, vm.lcm) not in ((State.ACTIVE, Lcm.RUNNING), (State.ACTIVE, Lcm.UNKNOWN)):
                raise Refused(
                    f"VM {vm_id} is not one that monitoring looks for, in state {vm.state}/{vm.lcm}."
                )
            self._enter(vm, Lcm.INIT, State.POWEROFF)

    def vm_resched(self, vm_id: int) -> None:
        """Ask for another host."""
        with self._operate(vm_id) as vm, self.data:
            if (vm.state, vm.lcm) not in (
                (State.POWEROFF, Lcm.INIT),
                (State.ACTIVE, Lcm.RUNNING),
                (State.ACTIVE, Lcm.UNKNOWN),
            ):
                raise Refused(
                    f"Could not set rescheduling flag for VM {vm_id}, wrong state {vm.state}/{vm.lcm}."
                )
            vm.resched = True

    def _migrate_running(self, vm: Vm, old: History, new: History, how: str) -> None:
        action = {"save": Act.MIGRATE, "poweroff": Act.POFF_MIGRATE, "poweroff-hard": Act.POFF_HARD_MIGRATE}[
            how
        ]
        with self.data:
            self._act(old, action)
            self._act(new, action)
            self._enter(vm, Lcm.SAVE_MIGRATE)
        if how == "save":
            try:
                self._check_saved(vm)
            except Refused:
                self._step_back(vm, old, new)
                raise
        directory = self._lines(vm).directory(old)
        checkpoint = f"{directory}/checkpoint" if how == "save" else ""
        message = self._message(vm, record=old, checkpoint=checkpoint)
        host = old.host.name
        try:
            if how == "save":
                self.drivers.vmm(host, "save", [vm.deploy_id, checkpoint, host], vm.id, message)
            else:
                script = "cancel" if how == "poweroff-hard" else "shutdown"
                self.drivers.vmm(host, script, [vm.deploy_id, host], vm.id, message)
        except ActionFailed as failure:
            self._fail(vm, "SAVE" if how == "save" else "CANCEL", failure)
            self._step_back(vm, old, new)
            raise
        with self.data:
            moment = now()
            old.etime = old.retime = new.pstime = moment
            self._enter(vm, Lcm.PROLOG_MIGRATE)
        self._move_files(vm)

    def _migrate_live(self, vm: Vm, old: History, new: History) -> None:
        self._enter(vm, Lcm.MIGRATE)
        words = self._lines(vm).migrate(old, new)
        with self.data:
            stdin = base64.b64encode(vm.to_xml(only_last=True).encode()).decode()
        message = self._message(vm, old, new.host.name, command=words, target=self._lines(vm).directory(new))
        argv = [vm.deploy_id, new.host.name, old.host.name]
        try:
            self.drivers.tm(f"PRE{words}".split(), stdin, any_driver=True)
            self.drivers.vmm(old.host.name, "migrate", argv, vm.id, message)
        except ActionFailed as failure:
            try:
                self.drivers.tm(f"FAIL{words}".split(), stdin, any_driver=True)
            except ActionFailed:
                pass  # no_fail in one_vmm_exec
            self._fail(vm, "MIGRATE", failure)
            self._step_back(vm, old, new)
            raise
        try:
            self.drivers.tm(f"POST{words}".split(), stdin, any_driver=True)
        except ActionFailed:
            pass  # no_fail: the VM runs on the new host already
        with self.data:
            old.etime = old.retime = new.rstime = now()
            self._enter(vm, Lcm.RUNNING)

    def _step_back(self, vm: Vm, old: History, new: History) -> None:
        """Return a VM to its former host after a migration that did not happen."""
        with self.data:
            moment = now()
            old.etime = old.retime = new.etime = moment
            record = self._add_history(vm, old.host, self.datastore(old.ds_id))
            record.rstime = moment
            self._enter(vm, Lcm.RUNNING)

    # -- recovery -------------------------------------------------------------------------------

    def _retry(self, vm: Vm) -> None:
        # One that is under way is begun once more too: its driver may be lost with another leader.
        step = RETRY.get(vm.lcm, vm.lcm)
        if step not in RETRY.values():
            raise Refused(f"LCM state {vm.lcm} cannot be retried")
        self._enter(vm, step)
        if step == Lcm.PROLOG:
            self._prolog(vm)
        elif step in (Lcm.PROLOG_MIGRATE, *_MOVES.values()):
            self._move_files(vm)
        elif step in (Lcm.PROLOG_RESUME, Lcm.PROLOG_UNDEPLOY):
            self._resume_files(vm, step)
        elif step == Lcm.EPILOG:
            self._epilog(vm)
        elif step in (Lcm.EPILOG_STOP, Lcm.EPILOG_UNDEPLOY):
            self._files_home(vm, step)
        else:
            self._boot(vm, step)

    def _proceed(self, vm: Vm) -> None:
        """Take the failed step for done."""
        step = RETRY.get(vm.lcm)
        if step == Lcm.PROLOG:
            self._boot(vm, Lcm.BOOT)
        elif step in (Lcm.PROLOG_MIGRATE, *_MOVES.values()):
            self._enter(vm, step)
            self._moved(vm)
        elif step == Lcm.EPILOG:
            with self.data:
                vm.last.etime = vm.last.eetime = now()
            self._done(vm)
        elif step == Lcm.PROLOG_RESUME:
            self._boot(vm, Lcm.BOOT_STOPPED)
        elif step == Lcm.PROLOG_UNDEPLOY:
            self._boot(vm, Lcm.BOOT_UNDEPLOY)
        elif step in (Lcm.EPILOG_STOP, Lcm.EPILOG_UNDEPLOY):
            self._enter(vm, Lcm.INIT, State.STOPPED if step == Lcm.EPILOG_STOP else State.UNDEPLOYED)
        else:
            raise Refused(f"LCM state {vm.lcm} cannot be recovered with success")

    def _give_up(self, vm: Vm) -> None:
        """Return a failed cold migration to its former host, calling no driver."""
        step = RETRY.get(vm.lcm)
        backs = {Lcm.PROLOG_MIGRATE_POWEROFF: State.POWEROFF, Lcm.PROLOG_MIGRATE_SUSPEND: State.SUSPENDED}
        if step in backs:
            with self.data:
                old, new, moment = vm.history[-2], vm.last, now()
                new.etime = new.petime = moment
                record = self._add_history(vm, old.host, self.datastore(old.ds_id))
                record.pstime = record.petime = record.retime = moment
                self._enter(vm, Lcm.INIT, backs[step])
        elif step in (Lcm.PROLOG_MIGRATE, Lcm.PROLOG_MIGRATE_UNKNOWN):
            with self.data:
                old, new, moment = vm.history[-2], vm.last, now()
                new.etime = new.petime = moment
                record = self._add_history(vm, old.host, self.datastore(old.ds_id))
                record.pstime = record.petime = record.rstime = moment
            saved = new.action == Act.MIGRATE and step == Lcm.PROLOG_MIGRATE
            self._boot(vm, Lcm.BOOT_MIGRATE if saved else Lcm.BOOT)
        # Everything else keeps its failure state, as real oned does after PROLOG_FAILURE.

    def _delete(self, vm: Vm) -> None:
        """Throw a VM away: DONE at once, deletes afterwards, saving nothing, results ignored."""
        if vm.state == State.DONE:
            raise Refused("VM is done")
        active = vm.state == State.ACTIVE
        lcm, record = vm.lcm, vm.last if vm.history else None
        with self.data:
            if record is not None:
                self._act(record, Act.DELETE)
                record.etime = now()
                if record.pstime and not record.petime:
                    record.petime = record.etime
                elif not record.retime:
                    record.retime = record.etime
            self._done(vm, broken=active)
        if record is not None:
            self._clean(vm, lcm, "delete")

    def _recreate(self, vm: Vm) -> None:
        """Clean the host, then wait in PENDING for a deploy with the same ids."""
        lcm = vm.lcm
        with self.data:
            self._act(vm.last, Act.DELETE_RECREATE)
            vm.last.etime = now()
            vm.last.petime = vm.last.petime or vm.last.etime
            self._enter(vm, Lcm.CLEANUP_RESUBMIT)
        self._clean(vm, lcm, "delete")
        with self.data:
            vm.deploy_id = ""
            self._enter(vm, Lcm.INIT, State.PENDING)

    def _clean(self, vm: Vm, lcm: int, operation: str) -> None:
        """Delete every disk, on both hosts when the VM was under way between them."""
        lines = self._lines(vm)
        moving = RETRY.get(lcm, lcm) in (Lcm.PROLOG_MIGRATE, *_MOVES.values())
        commands = lines.delete(vm.last) + (lines.delete(vm.history[-2]) if moving else [])
        booted = lcm in (Lcm.RUNNING, Lcm.HOTPLUG, Lcm.UNKNOWN) or RETRY.get(lcm) in (
            Lcm.BOOT,
            Lcm.BOOT_MIGRATE,
            Lcm.BOOT_UNDEPLOY,
            Lcm.BOOT_STOPPED,
        )
        if booted:
            if vm.deploy_id:
                message = self._message(vm, command="\n".join(commands))
                host = vm.last.host.name
                try:
                    self.drivers.vmm(host, "cancel", [vm.deploy_id, host], vm.id, message)
                except ActionFailed:
                    pass  # no_fail: the domain may be gone already
            for line in commands:
                self._quietly(line)
            return
        path = f"{self.settings.vms}/{vm.id}/transfer.{vm.last.seq}.{operation}"
        self.runner.write(path, "".join(f"{line}\n" for line in commands))
        try:
            self.drivers.transfer(path)
        except ActionFailed:
            pass  # result ignored: the VM is gone for oned

    def transfer_mode(self, vm_id: int) -> str:
        """Return the system transfer driver a VM is stamped with."""
        return scalar(self.vm(vm_id).template, "TM_MAD_SYSTEM")
