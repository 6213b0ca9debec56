# SPDX-License-Identifier: Apache-2.0
"""What actions do with a local disk of a persistent image on Ceph, as their plans have it: host and bridge
are this machine.

    SEMISHARED_KILL_AT=3 python3 -m cephfaults.diff_flows JOB      exit code 0: done; 1: an error, which is
    printed

Host and bridge are one process of the host side, so that its points are counted through all that the action
does.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.disk import commit_steps as c
from semishared.model.disk import names as disk_names
from semishared.model.exchange import AskOned, Exchange, On, Part, drive
from semishared.opennebula.args import DiskPlace, VmPlace
from semishared.opennebula.xml import Datastore, Image, Vm, parse
from semishared.plan.disk import commits
from semishared.plan.store import commit_turns
from semishared.wire.session import Session
from tools.world import OVERLAY_OPTIONS

HERE = "localhost"
VM = Vm(parse("<VM><ID>5</ID><STATE>8</STATE></VM>", "VM"))


class Job(NamedTuple):
    """An action on one disk."""

    flow: str
    image: s.ImageRef
    disk: s.DiskRef
    datastore: str
    """Its XML."""

    def carry_out(self, session: Session) -> Any:
        """Do it."""
        datastore = Datastore(parse(self.datastore, "DATASTORE"))
        where = f"<DATASTORE_ID>{self.image.store}</DATASTORE_ID><SOURCE>{self.image.source}</SOURCE>"
        it = f"<ID>{self.image.id}</ID>{where}<FORMAT>raw</FORMAT><PERSISTENT>1</PERSISTENT>"
        image = Image.parse(f"<IMAGE>{it}</IMAGE>")

        def do(wanted: Exchange) -> Any:
            if isinstance(wanted, On):
                return session.run(list(wanted.steps)) if wanted.steps else []
            return (
                {"vm": VM, "image": image, "datastore": datastore}[wanted.what]
                if isinstance(wanted, AskOned)
                else None
            )

        return drive(FLOWS[self.flow](self), do)


@contextmanager
def session() -> Iterator[Session]:
    """Begin a conversation with that host side."""
    with Session(HERE, "test", Config()) as begun:
        begun.seq = 0
        yield begun


def attached(job: Job) -> Part[Any]:
    """As tm/ln."""
    root = disk_names.base_store_of(job.disk.vm_dir)
    image = yield from commit_turns.claimable(HERE, HERE, job.image, root)
    create = c.CreateDiff(job.disk, image, 0, OVERLAY_OPTIONS)
    yield On(HERE, (s.StageBase(root, image), s.PrepareVm(job.disk.vm, job.disk.vm_dir), create))


def committed(job: Job) -> Part[Any]:
    """As `semishared commit`, of a VM that is off."""
    place = DiskPlace(
        VmPlace(HERE, job.disk.vm_dir, job.disk.vm), disk_names.disk_name(job.disk.disk), job.disk.disk
    )
    return (yield from commits.commit(place, VM, "", "NONE"))


def ended(job: Job) -> Part[Any]:
    """As tm/mvds."""
    (answer,) = yield On(HERE, (s.EndSession(job.disk),))
    if answer.commits:
        yield from commit_turns.settled(HERE, c.FinishDisk(job.disk))


def renewed(job: Job) -> Part[Any]:
    """As tm/mv to the front-end, before it sends anything."""
    return (yield from commit_turns.settled(HERE, c.RenewVm(job.disk.vm, job.disk.vm_dir, True)))


FLOWS: Dict[str, Callable[[Job], Part[Any]]] = {
    flow.__name__: flow for flow in (attached, committed, ended, renewed)
}

if __name__ == "__main__":
    try:
        with session() as begun:
            pickle.loads(Path(sys.argv[1]).read_bytes()).carry_out(begun)
    except SemisharedError as e:
        sys.exit(e.line())
