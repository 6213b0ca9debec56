# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared gc` that removes directories of VMs from machines where they do not belong."""

from __future__ import annotations

from ..config import Config
from ..errors import SemisharedError
from ..model import steps as s
from ..model import steps_commit as c
from ..opennebula.oned import Oned
from ..plan import gc, gc_places
from ..plan.disks import running_domain
from ..wire.session import Session
from . import gc_known
from .gc_pools import Failed


def remove(session: Session, item: gc.Finding, place: gc_places.Place, config: Config, failed: Failed) -> str:
    """Remove a stray directory on the machine of `session`; return why it is kept, '' if it is gone.

    Looked at once more: whether it is another directory than the one where the VM belongs, whether that is
    whole, and whether oned still has the VM there and is not at work on it. The removal itself looks for the
    domain and for changes. If the machine where the VM belongs cannot be asked any more, `failed` is told so.
    """
    location = item.path.rsplit("/", 2)[0]
    home = f"{location}/{place.system}/{item.vm}"
    (found,) = session.run([s.MarkVm(item.vm, item.path)])
    assert isinstance(found, dict)
    token, seen = str(found["token"]), str(found["seen"])
    try:
        with Session(place.machine, "gc", config) as other:
            (looked,) = other.run([s.LookForVm(item.vm, home, token, seen)])
    except SemisharedError as e:
        failed(place.machine, e)
        return f"{place.machine}, where VM {item.vm} belongs, cannot be asked: {e.detail}"
    finally:
        session.run([s.UnmarkVm(item.vm, item.path, token)])
    assert isinstance(looked, dict)
    if looked["same"]:
        return (
            f"it is the directory of {place.machine}: the system datastore is shared, which none of "
            f"ours may be"
        )
    if not looked["whole"] or (found["disks"] and not looked["disks"]):
        return f"there is no whole directory of VM {item.vm} on {place.machine}"
    if found["seq"] > looked["seq"]:
        return f"it is of SEQ {found['seq']} of the VM's history, what is on {place.machine} is older"
    oned = Oned()
    now = gc_known.place(oned, item.vm)
    if now is None or (now.machine, now.system) != (place.machine, place.system):
        return "oned is at work on the VM"
    domain = running_domain(oned.vm(item.vm)) if item.libvirt else ""
    (stale,) = session.run([c.KeepStale(item.vm, item.path, seen)])
    assert isinstance(stale, dict)
    (done,) = session.run([s.ReleaseVm(item.vm, item.path, domain, str(stale["seen"]))])
    return str(done.get("kept", "")) if isinstance(done, dict) else ""
