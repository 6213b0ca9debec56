# SPDX-License-Identifier: Apache-2.0
"""Deploy, power, stop, undeploy, terminate."""

from __future__ import annotations

import os.path
import threading
from typing import Union

from .create import CreateOps
from .domain import domain_xml
from .drivers import ActionFailed, Refused, Step
from .objects import Vm, now
from .states import STATE_NAMES, Act, Lcm
from .states import Vm as State
from .template import scalar, vectors
from .transfer import is_directory, is_volatile

_DEPLOYED_FROM = (State.PENDING, State.HOLD, State.STOPPED, State.UNDEPLOYED)


class LifeOps(CreateOps):
    """The life of a VM on one host."""

    def vm_deploy(
        self, vm_id: int, host: Union[int, str], datastore_id: int, by_scheduler: bool = False
    ) -> None:
        """Bring a VM to RUNNING on a host: prolog or resume, then boot or restore."""
        with self._operate(vm_id) as vm:
            if vm.state not in _DEPLOYED_FROM:
                raise Refused(f"Wrong state {vm.state} to deploy VM {vm_id}")
            with self.data:
                target, ds = self.host(host), self.datastore(datastore_id)
                self._check_transfer_mode(vm, ds.tm_mad)
                # A stopped VM waits in PENDING like a new one; only its checkpoint tells it apart.
                stopped = bool(vm.history) and vm.state != State.UNDEPLOYED and vm.last.action == Act.STOP
                undeployed = vm.state == State.UNDEPLOYED
                record = self._add_history(vm, target, ds)
                record.pstime = now()
                if by_scheduler:
                    record.placed_by_scheduler()
            if undeployed:
                self._resume_files(vm, Lcm.PROLOG_UNDEPLOY)
            elif stopped:
                self._resume_files(vm, Lcm.PROLOG_RESUME)
            else:
                self._prolog(vm)

    def vm_begin_to_deploy(self, vm_id: int, host: int, datastore_id: int) -> None:
        """Answer as one.vm.deploy does: at once, with what is refused."""
        vm = self.vm(vm_id)
        if vm.state not in _DEPLOYED_FROM:
            raise Refused(f"Deploy action is not available for state {STATE_NAMES[vm.state]}")
        self._check_transfer_mode(vm, self.datastore(datastore_id).tm_mad)

        def work() -> None:
            try:
                self.vm_deploy(vm_id, host, datastore_id)
            except (ActionFailed, Refused):
                pass  # noted in the VM

        threading.Thread(target=work, daemon=True).start()

    def vm_hold(self, vm_id: int) -> None:
        """Hold a pending VM."""
        self._enter(self.vm(vm_id), Lcm.INIT, State.HOLD)

    def vm_release(self, vm_id: int) -> None:
        """Have a VM on hold wait for the scheduler; its requirements are written anew."""
        vm = self.vm(vm_id)
        if vm.state != State.HOLD:
            raise Refused(f"Wrong state {vm.state} to release VM {vm_id}")
        self._require_system(vm)
        self._enter(vm, Lcm.INIT, State.PENDING)

    def vm_terminate(self, vm_id: int, hard: bool = False) -> None:
        """End a VM, saving its persistent disks."""
        with self._operate(vm_id) as vm:
            if vm.state in (State.PENDING, State.HOLD) and not vm.history:
                self._done(vm)
            elif vm.state == State.ACTIVE and vm.lcm == Lcm.RUNNING:
                self._act(vm.last, Act.TERMINATE_HARD if hard else Act.TERMINATE)
                self._power_down(vm, Lcm.SHUTDOWN, hard, "CANCEL" if hard else "SHUTDOWN")
                self._epilog(vm)
            elif vm.state in (State.POWEROFF, State.SUSPENDED, State.STOPPED, State.UNDEPLOYED):
                front_end = vm.state in (State.STOPPED, State.UNDEPLOYED)
                self._act(vm.last, Act.TERMINATE)
                self._epilog(vm, front_end)
            else:
                raise Refused(f"Wrong state {vm.state}/{vm.lcm} to terminate VM {vm_id}")

    def vm_poweroff(self, vm_id: int, hard: bool = False) -> None:
        """Switch a VM off, leaving its disks on the host."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE)
            self._act(vm.last, Act.POWEROFF_HARD if hard else Act.POWEROFF)
            self._power_down(vm, Lcm.SHUTDOWN_POWEROFF, hard, "CANCEL" if hard else "SHUTDOWN")
            self._enter(vm, Lcm.INIT, State.POWEROFF)

    def vm_reboot(self, vm_id: int, hard: bool = False) -> None:
        """Reboot or reset a running VM."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE)
            action = "reset" if hard else "reboot"
            self._vmm(vm, action, [vm.deploy_id, vm.last.host.name], self._message(vm), action.upper())

    def vm_suspend(self, vm_id: int) -> None:
        """Save a VM's memory beside its disks."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE)
            self._act(vm.last, Act.SUSPEND)
            self._save(vm, Lcm.SAVE_SUSPEND)
            self._enter(vm, Lcm.INIT, State.SUSPENDED)

    def vm_stop(self, vm_id: int) -> None:
        """Save a VM and bring its files to the front-end."""
        with self._operate(vm_id) as vm:
            if vm.state == State.SUSPENDED:
                self._act(vm.last, Act.STOP)
            else:
                self._need(vm, State.ACTIVE)
                self._act(vm.last, Act.STOP)
                self._save(vm, Lcm.SAVE_STOP)
            self._files_home(vm, Lcm.EPILOG_STOP)

    def vm_undeploy(self, vm_id: int, hard: bool = False) -> None:
        """Shut a VM down and bring its files to the front-end."""
        with self._operate(vm_id) as vm:
            if vm.state == State.POWEROFF:
                self._act(vm.last, Act.UNDEPLOY)
            else:
                self._need(vm, State.ACTIVE)
                self._act(vm.last, Act.UNDEPLOY_HARD if hard else Act.UNDEPLOY)
                self._power_down(vm, Lcm.SHUTDOWN_UNDEPLOY, hard, "CANCEL" if hard else "SHUTDOWN")
            self._files_home(vm, Lcm.EPILOG_UNDEPLOY)

    def vm_resume(self, vm_id: int) -> None:
        """Start a powered-off or suspended VM again; a stopped one only becomes schedulable."""
        with self._operate(vm_id) as vm:
            if vm.state in (State.STOPPED, State.UNDEPLOYED):
                self._require_system(vm)
                self._enter(vm, Lcm.INIT, State.PENDING if vm.state == State.STOPPED else vm.state)
                return
            if vm.state not in (State.POWEROFF, State.SUSPENDED):
                raise Refused(f"Wrong state {vm.state} to resume VM {vm_id}")
            suspended = vm.state == State.SUSPENDED
            with self.data:
                vm.last.etime = now()
                record = self._add_history(vm, vm.last.host, self.datastore(vm.last.ds_id))
                record.rstime = now()
                self._act(record, Act.RESUME)
            back = vm.state
            try:
                self._boot(vm, Lcm.BOOT_SUSPENDED if suspended else Lcm.BOOT_POWEROFF)
            except ActionFailed:
                # As oned has it (LifeCycleManager::trigger_deploy_failure): off, or suspended, as it was.
                self._enter(vm, Lcm.INIT, back)
                raise

    def vm_begin_to_resume(self, vm_id: int) -> None:
        """Answer as one.vm.action does: at once, with what is refused; how it goes on the VM's state says."""
        if self.vm(vm_id).state not in (State.POWEROFF, State.SUSPENDED, State.STOPPED, State.UNDEPLOYED):
            raise Refused(f"This action is not available for state {STATE_NAMES[self.vm(vm_id).state]}")

        def work() -> None:
            try:
                self.vm_resume(vm_id)
            except (ActionFailed, Refused):
                pass  # noted in the VM, as for everybody who looks at it

        threading.Thread(target=work, daemon=True).start()

    # -- steps ----------------------------------------------------------------------------------

    def _check_transfer_mode(self, vm: Vm, system: str) -> None:
        """Stamp the VM with the system transfer driver; mixed modes need the image DS to agree."""
        if scalar(vm.template, "TM_MAD_SYSTEM"):
            return
        for disk in vm.disks:
            if is_volatile(disk) or is_directory(disk) or disk["TM_MAD"] == system:
                continue
            template = self.datastore(int(disk["DATASTORE_ID"])).template
            names = ("CLONE_TARGET", "LN_TARGET", "DISK_TYPE")
            values = {name: scalar(template, f"{name}_{system.upper()}") for name in names}
            if not all(values.values()):
                raise Refused(f"Image Datastore does not support transfer mode: {system}")
            disk.update(values, TM_MAD_SYSTEM=system)
        vm.template["TM_MAD_SYSTEM"] = system

    def _prolog(self, vm: Vm) -> None:
        self._enter(vm, Lcm.PROLOG)
        self._transfer(vm, "prolog", self._lines(vm).prolog())
        self._boot(vm, Lcm.BOOT)

    def _resume_files(self, vm: Vm, lcm: int) -> None:
        self._enter(vm, lcm)
        lines = self._lines(vm).move(vm.history[-2], vm.last, returning=True)
        self._transfer(vm, "resume", lines)
        self._boot(vm, Lcm.BOOT_UNDEPLOY if lcm == Lcm.PROLOG_UNDEPLOY else Lcm.BOOT_STOPPED)

    def _boot(self, vm: Vm, lcm: int) -> None:
        """Start the domain, or restore it, where the VM now is."""
        record, moment = vm.last, now()
        with self.data:
            vm.state, vm.lcm = State.ACTIVE, lcm
            if record.pstime and not record.petime:
                record.petime = record.rstime = moment
        context = vm.template.get("CONTEXT")
        if isinstance(context, dict):
            rows = "".join(f"{k}='" + v.replace("'", r"'\''") + "'\n" for k, v in sorted(context.items()))
            text = f"# Context variables generated by OpenNebula\n{rows}"
            self.runner.write(f"{self.settings.vms}/{vm.id}/context.sh", text)
        if lcm in (Lcm.BOOT_SUSPENDED, Lcm.BOOT_STOPPED, Lcm.BOOT_MIGRATE):
            self._restore(vm)
        else:
            self._start(vm)
        with self.data:
            vm.state, vm.lcm = State.ACTIVE, Lcm.RUNNING
            self._unact(record)

    def _start(self, vm: Vm) -> None:
        lines, record = self._lines(vm), vm.last
        directory = lines.directory(record)
        with self.data:
            domain = domain_xml(self.settings, vm, self.clusters[vm.last.host.cluster])
        self.runner.write(f"{self.settings.vms}/{vm.id}/deployment.{record.seq}", domain)
        before = [
            Step(("/bin/mkdir", "-p", directory)),
            Step(("/bin/cat", "-"), vm.to_xml(only_last=True), f"{directory}/vm.xml"),
            Step(("/bin/cat", "-"), self.datastore(record.ds_id).to_xml(), f"{directory}/ds.xml"),
        ]
        try:
            if lines.context():
                self.drivers.tm(lines.context().split(), any_driver=True)
            remote = f"{directory}/deployment.{record.seq}"
            host = record.host.name
            answer = self.drivers.vmm(host, "deploy", [remote, host], vm.id, domain, before)
        except ActionFailed as failure:
            record.retime = now()
            self._fail(vm, "DEPLOY", failure)
            raise
        with self.data:
            vm.deploy_id = answer.strip()

    def _restore(self, vm: Vm) -> None:
        lines, record = self._lines(vm), vm.last
        checkpoint = f"{lines.directory(record)}/checkpoint"
        context = vm.template.get("CONTEXT")
        target = f"{lines.directory(record)}/disk.{context['DISK_ID']}" if isinstance(context, dict) else ""
        message = self._message(vm, checkpoint=checkpoint, command=lines.context(), target=target)
        try:
            if lines.context():
                self.drivers.tm(lines.context().split(), any_driver=True)
            host = record.host.name
            self.drivers.vmm(host, "restore", [checkpoint, host, vm.deploy_id], vm.id, message)
        except ActionFailed as failure:
            self._fail(vm, "RESTORE", failure)
            raise

    def _vmm(
        self, vm: Vm, action: str, argv: list[str], message: str, prefix: str, back: int = Lcm.RUNNING
    ) -> None:
        """Run a hypervisor action on the VM's host; a failure leaves the VM as it was."""
        try:
            self.drivers.vmm(vm.last.host.name, action, argv, vm.id, message)
        except ActionFailed as failure:
            self._fail(vm, prefix, failure)
            self._enter(vm, back)
            raise

    def _power_down(self, vm: Vm, lcm: int, hard: bool, prefix: str) -> None:
        self._enter(vm, lcm)
        action = "cancel" if hard else "shutdown"
        self._vmm(vm, action, [vm.deploy_id, vm.last.host.name], self._message(vm), prefix)
        with self.data:
            vm.last.retime = now()

    def _check_saved(self, vm: Vm) -> None:
        """Let a VM with a directory run on: oned asks no driver (VirtualMachineManager::trigger_save,
        trigger_save_failure).
        """
        if any(map(is_directory, vm.disks)):
            self._enter(vm, Lcm.RUNNING)
            raise Refused("save_action, Filesystem disks are not supported")

    def _save(self, vm: Vm, lcm: int) -> None:
        self._check_saved(vm)
        self._enter(vm, lcm)
        checkpoint = f"{self._lines(vm).directory(vm.last)}/checkpoint"
        message = self._message(vm, checkpoint=checkpoint)
        self._vmm(vm, "save", [vm.deploy_id, checkpoint, vm.last.host.name], message, "SAVE")
        with self.data:
            vm.last.retime = now()

    def _files_home(self, vm: Vm, lcm: int) -> None:
        self._enter(vm, lcm)
        with self.data:
            vm.last.estime = now()
        self._transfer(vm, "stop", self._lines(vm).move(vm.last, vm.last, leaving=True))
        with self.data:
            vm.last.etime = vm.last.eetime = now()
            vm.state = State.STOPPED if lcm == Lcm.EPILOG_STOP else State.UNDEPLOYED
            vm.lcm = Lcm.INIT

    def _epilog(self, vm: Vm, front_end: bool = False) -> None:
        self._enter(vm, Lcm.EPILOG)
        with self.data:
            vm.last.estime = now()
        self._transfer(vm, "epilog", self._lines(vm).epilog(front_end))
        with self.data:
            vm.last.etime = vm.last.eetime = now()
        self._done(vm)

    def _done(self, vm: Vm, broken: bool = False) -> None:
        with self.data:
            vm.state, vm.lcm, vm.etime = State.DONE, Lcm.INIT, now()
            for disk in vectors(vm.template, "DISK"):
                self._release(vm, disk, broken)

    def checkpoint(self, vm_id: int) -> str:
        """Return where the memory of a suspended VM lies on its host."""
        vm = self.vm(vm_id)
        return os.path.normpath(f"{self._lines(vm).directory(vm.last)}/checkpoint")
