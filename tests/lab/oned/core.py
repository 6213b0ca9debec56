# SPDX-License-Identifier: Apache-2.0
"""The pools of a simulated oned and what every operation needs."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Tuple, Union

from .drivers import ActionFailed, Drivers, Refused, Runner
from .objects import Datastore, History, Host, Image, Vm, now
from .settings import Settings
from .states import FAILURE, STATE_NAMES, Img, Lcm
from .states import Vm as State
from .template import Template, cdata, merge, parse
from .transfer import Lines, is_volatile

TemplateLike = Union[str, Template]


def as_template(template: TemplateLike) -> Template:
    """Accept template text or a dictionary."""
    return parse(template) if isinstance(template, str) else dict(template)


class Core:
    """State, locks and the steps shared by all operations."""

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self.settings = settings
        self.runner = runner
        self.drivers = Drivers(settings, runner)
        self.data = threading.RLock()  # held only to read or change state, never while a driver runs
        self.vms: Dict[int, Vm] = {}
        self.images: Dict[int, Image] = {}
        self.datastores: Dict[int, Datastore] = {}
        self.hosts: Dict[int, Host] = {}
        self.clusters: Dict[int, Template] = {0: {}}
        """The templates of clusters, by id."""
        self.next_vm = 0
        self.next_image = 0
        self.next_datastore = 100
        self.next_request = 0
        self.tm_mad_conf: Dict[str, str] = {}
        """What oned.conf says of the driver, if a test has one; else it is as in the recordings."""
        self._busy: Dict[int, threading.Lock] = {}

    def host_create(self, name: str) -> int:
        """Add a host."""
        with self.data:
            host = Host(len(self.hosts), name, self.settings.vm_mad)
            self.hosts[host.id] = host
            return host.id

    def host_update(self, host_id: int, attributes: TemplateLike) -> None:
        """Set attributes in a host's template, as what its probes say does; the others stay."""
        with self.data:
            self.host(host_id).template.update(as_template(attributes))

    def vm_update(self, vm_id: int, attributes: TemplateLike, append: bool = True) -> None:
        """Update a VM's user template, in any state: merge what is given, or put it in place of all."""
        new = as_template(attributes)
        with self.data:
            vm = self.vm(vm_id)
            if append:
                merge(vm.user_template, new)
            else:
                vm.user_template = new

    def host(self, which: Union[int, str]) -> Host:
        """Find a host by id or name."""
        for host in self.hosts.values():
            if which in (host.id, host.name):
                return host
        raise Refused(f"Error getting host [{which}].")

    def vm(self, vm_id: int) -> Vm:
        """Find a VM."""
        if vm_id not in self.vms:
            raise Refused(f"Error getting virtual machine [{vm_id}].")
        return self.vms[vm_id]

    def image(self, image_id: int) -> Image:
        """Find an image."""
        if image_id not in self.images:
            raise Refused(f"Error getting image [{image_id}].")
        return self.images[image_id]

    def datastore(self, datastore_id: int) -> Datastore:
        """Find a datastore."""
        if datastore_id not in self.datastores:
            raise Refused(f"Error getting datastore [{datastore_id}].")
        return self.datastores[datastore_id]

    def state(self, vm_id: int) -> Tuple[str, int]:
        """Return the name of STATE and the number of LCM_STATE."""
        vm = self.vm(vm_id)
        return STATE_NAMES.get(vm.state, str(vm.state)), vm.lcm

    def error(self, vm_id: int) -> str:
        """Return USER_TEMPLATE/ERROR without its date; empty when there is none."""
        value = self.vm(vm_id).user_template.get("ERROR", "")
        return value.split(": ", 1)[-1] if isinstance(value, str) else ""

    def forget_actions(self) -> None:
        """Let new operations begin though others are under way, as the oned of another leader does."""
        with self.data:
            self._busy.clear()

    # -- what operations are made of ------------------------------------------------------------

    @contextmanager
    def _operate(self, vm_id: int) -> Iterator[Vm]:
        """Hold one VM for an operation; oned's state machine allows only one at a time."""
        vm = self.vm(vm_id)
        with self.data:
            lock = self._busy.setdefault(vm_id, threading.Lock())
        with lock:
            yield vm

    def _need(self, vm: Vm, *states: int) -> None:
        if vm.state not in states or (vm.state == State.ACTIVE and vm.lcm != Lcm.RUNNING):
            raise Refused(f"Wrong state {STATE_NAMES.get(vm.state)}/{vm.lcm} to perform action on VM {vm.id}")

    def _enter(self, vm: Vm, lcm: int, state: int = State.ACTIVE) -> None:
        with self.data:
            vm.state, vm.lcm = state, lcm

    def _act(self, record: History, action: int) -> None:
        """Note who asked for what in a history record."""
        record.action, record.uid, record.request_id = action, 0, random.randint(1, 9999)

    @staticmethod
    def _unact(record: History) -> None:
        record.action, record.uid, record.request_id = 0, -1, -1

    def _close_history(self, vm: Vm, action: int) -> None:
        """Close the record of a VM for a hot-plug operation and open its copy."""
        with self.data:
            old, moment = vm.last, now()
            not_running = old.retime != 0
            old.retime = old.retime or moment
            old.etime = moment
            before = old.action
            self._act(old, action)
            new = History(vm.id, old.seq + 1, old.host, old.tm_mad, old.ds_id, plan_id=old.plan_id)
            new.action_id = old.action_id
            new.rstime = moment
            new.action = before
            new.retime = moment if not_running else 0
            vm.history.append(new)

    def _add_history(self, vm: Vm, host: Host, ds: Datastore) -> History:
        """Open a record on a host and system datastore; volatile disks follow the datastore."""
        record = History(vm.id, len(vm.history), host, ds.tm_mad, ds.id)
        vm.history.append(record)
        for disk in vm.disks:
            if is_volatile(disk):
                disk.update(self._system_attributes(ds, disk.get("FORMAT") or "raw"))
        return record

    def _system_attributes(self, ds: Datastore, format_: str) -> Dict[str, str]:
        values = {
            "ALLOW_ORPHANS": "YES",
            "CLUSTER_ID": "0",
            "DATASTORE": ds.name,
            "DATASTORE_ID": str(ds.id),
            "DISK_TYPE": "FILE",
            "DRIVER": format_,
            "FORMAT": format_,
            "PERSISTENT_SNAPSHOTS": "YES",
            "TM_MAD": ds.tm_mad,
        }
        for name in ("ALLOW_ORPHANS", "DISK_TYPE", "PERSISTENT_SNAPSHOTS"):
            value = ds.template.get(name)
            if isinstance(value, str):
                values[name] = value
        return values

    def _lines(self, vm: Vm) -> Lines:
        return Lines(self.settings, vm)

    def _transfer(self, vm: Vm, operation: str, lines: List[str]) -> None:
        """Write and run a transfer file; on failure leave the VM where oned leaves it."""
        path = f"{self.settings.vms}/{vm.id}/transfer.{vm.last.seq}.{operation}"
        self.runner.write(path, "".join(f"{line}\n" for line in lines))
        try:
            self.drivers.transfer(path)
        except ActionFailed as failure:
            self._fail(vm, "Error executing image transfer script", failure)
            raise

    def _fail(self, vm: Vm, prefix: str, failure: ActionFailed) -> None:
        text = str(failure)
        with self.data:
            vm.lcm = FAILURE.get(vm.lcm, vm.lcm)
            # A text that starts with a dash means "no information" to oned.
            if text and not text.startswith("-"):
                message = f"{prefix}: {text}"
                if len(message) > 100:
                    message = message[:100] + "... see more details in VM log"
                vm.user_template["ERROR"] = f"{time.strftime('%a %b %d %H:%M:%S %Y')}: {message}"

    def _message(
        self,
        vm: Vm,
        record: Optional[History] = None,
        migrate_to: str = "",
        checkpoint: str = "",
        command: str = "",
        rollback: str = "",
        target: str = "",
    ) -> str:
        """Write the driver message one_vmm_exec gets, and hands to the script on stdin."""
        with self.data:
            at = record or vm.last

            def element(name: str, text: str, wrap: bool = False) -> str:
                return f"<{name}>{cdata(text) if wrap else text}</{name}>" if text else f"<{name}/>"

            return (
                f"<VMM_DRIVER_ACTION_DATA><HOST>{at.host.name}</HOST>{element('MIGR_HOST', migrate_to)}"
                f"{element('DEPLOY_ID', vm.deploy_id)}<LOCAL_DEPLOYMENT_FILE/><REMOTE_DEPLOYMENT_FILE/>"
                f"{element('CHECKPOINT_FILE', checkpoint)}"
                f"{element('TM_COMMAND', command and command + chr(10), True)}"
                f"{element('TM_COMMAND_ROLLBACK', rollback and rollback + chr(10), True)}"
                f"{element('DISK_TARGET_PATH', target)}{vm.to_xml(only_last=True)}"
                f"{self.datastore(at.ds_id).to_xml()}</VMM_DRIVER_ACTION_DATA>"
            )

    def _release(self, vm: Vm, disk: Dict[str, str], broken: bool = False) -> None:
        """Give an image back when its disk leaves the VM."""
        if is_volatile(disk) or "IMAGE_ID" not in disk:
            return
        with self.data:
            image = self.images.get(int(disk["IMAGE_ID"]))
            if image is None:
                return
            if vm.id in image.vms:
                image.vms.remove(vm.id)
            if image.persistent:
                image.set_state(Img.ERROR if broken else Img.READY)
                image.modtime = now()
                image.snapshots = dict(vm.snapshots.get(int(disk["DISK_ID"]), {}))
            elif not image.vms:
                image.set_state(Img.READY)

    def _persistent_image(self, disk: Dict[str, str]) -> Optional[Image]:
        """Return the image that keeps what happens to a disk."""
        image = self.images.get(int(disk.get("IMAGE_ID", "-1")))
        return image if image is not None and image.persistent else None
