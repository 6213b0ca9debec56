# SPDX-License-Identifier: Apache-2.0
"""A simulated oned, as small as drivers allow: state, XML-RPC, and calls of the installed scripts.

    with Oned.in_lab(lab) as oned:
        oned.datastore_create(IMAGE_DS, 100); oned.datastore_create(SYSTEM_DS, 101)
        image = oned.image_create(100, "data", path="/var/tmp/data.img", persistent=True)
        vm = oned.vm_create({"NAME": "a", "DISK": [{"IMAGE_ID": str(image)}], ...})
        oned.vm_deploy(vm, "h1", 101)

Operations return when the driver is done. They raise ActionFailed when a driver failed (the objects
are then in the state real oned leaves them in), Refused when oned would not even start, CrashTrap when
a driver printed what can crash oned. Different VMs may be operated from different threads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Sequence, Type

from .drivers import ActionFailed, Call, CrashTrap, Done, Refused, Runner, Step
from .rpc import Rpc
from .runners import LabRunner, TreeRunner
from .scheduler import SchedulerOps
from .settings import DRIVER_ENVIRONMENT, Settings
from .states import Act, Img, Lcm, Vm

__all__ = [
    "ActionFailed",
    "Act",
    "Call",
    "CrashTrap",
    "DRIVER_ENVIRONMENT",
    "Done",
    "IMAGE_DS",
    "Img",
    "LabRunner",
    "Lcm",
    "Oned",
    "Refused",
    "Rpc",
    "Runner",
    "SYSTEM_DS",
    "Settings",
    "Step",
    "TreeRunner",
    "Vm",
]

IMAGE_DS = 'NAME="semi_img" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared"'
SYSTEM_DS = 'NAME="semi_sys" TYPE="SYSTEM_DS" TM_MAD="semishared"'


class Oned(SchedulerOps):
    """A simulated oned with its XML-RPC server; use it as a context manager."""

    rpc: Optional[Rpc] = None

    @classmethod
    def in_lab(cls, lab: Any, settings: Optional[Settings] = None) -> Oned:
        """Serve a lab: XML-RPC on the front-end's loopback, scripts on its nodes, its hosts registered."""
        settings = settings or Settings(front_end=lab.fe.name)
        oned = cls(LabRunner(lab.fe, settings.environment, settings.timeout), settings)
        for host in lab.hosts:
            oned.host_create(host.name)
        oned.rpc = Rpc(oned, lab.fe.pid)
        oned.rpc.allocate_datastore = oned.datastore_create
        oned.rpc.update_datastore = oned.datastore_update
        oned.rpc.update_image = oned.image_update
        oned.rpc.actions = {"resched": oned.vm_resched, "resume": oned.vm_begin_to_resume}
        oned.rpc.deploy = oned.vm_begin_to_deploy
        return oned

    def group(self, front_ends: Sequence[str]) -> None:
        """Have a zone of several front-ends, as they are called on the network."""
        assert self.rpc
        servers = "".join(
            f"<SERVER><ENDPOINT>http://{name}:2633/RPC2</ENDPOINT></SERVER>" for name in front_ends
        )
        pool = f"<SERVER_POOL>{servers}</SERVER_POOL>"
        self.rpc.zones = f"<ZONE><ID>0</ID><NAME>OpenNebula</NAME>{pool}</ZONE>"

    def lead(self, node: Any) -> None:
        """Start drivers on another front-end of the group from now on, and name that one to them.

        State is one for all, as Raft has it. What an action of the old one is at goes on there.
        """
        assert self.rpc and isinstance(self.runner, LabRunner)
        self.settings = self.drivers.settings = replace(self.settings, front_end=node.name)
        self.runner.front_end = node
        self.rpc.serve(node.pid)

    @classmethod
    def in_tree(cls, root: Path, settings: Settings) -> Oned:
        """Serve a directory tree of recorders from a free port of this process's own loopback."""
        runner = TreeRunner(root, settings.front_end)
        oned = cls(runner, settings)
        oned.rpc = Rpc(oned, None, 0)
        oned.rpc.allocate_datastore = oned.datastore_create
        oned.rpc.update_datastore = oned.datastore_update
        oned.rpc.update_image = oned.image_update
        oned.rpc.actions = {"resched": oned.vm_resched, "resume": oned.vm_begin_to_resume}
        oned.rpc.deploy = oned.vm_begin_to_deploy
        runner.extra = {"ONE_XMLRPC": oned.rpc.url}
        return oned

    @property
    def calls(self) -> list[Call]:
        """All driver calls so far."""
        return self.drivers.calls

    def forget_fences(self) -> None:
        """Remove the marks of all hosts."""
        if self.rpc is not None:
            self.rpc.notes.clear()

    def close(self) -> None:
        """Stop the XML-RPC server."""
        if self.rpc is not None:
            self.rpc.close()
            self.rpc = None

    def __enter__(self) -> Oned:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()
