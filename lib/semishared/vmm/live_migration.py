# SPDX-License-Identifier: Apache-2.0
"""A live migration: begun through libvirt's binding, watched, limited, measured; and the other libvirtd.

Also what is asked and done on both hosts before and after it (model/vm/live_steps.py).
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any, Callable, Dict, Optional

from ..config import load
from ..errors import (
    MigrationTimeout,
    NotSupported,
    Overtaken,
    SemisharedError,
    ToolFailed,
    ToolTimeout,
)
from ..guest import domain, libvirtd
from ..guest.job_events import LOOK_S, next_said
from ..guest.virsh import site
from ..model.disk import names as disk_names
from ..model.vm.live_steps import (
    CopyDeltas,
    MigrateDomain,
    MigrateOptions,
    RemoveArrival,
    SeeDomain,
    SeenDomain,
    SeeState,
    Site,
    SyncTime,
)
from ..opennebula.report import Progress
from ..plan.vm.live_migration import arriving
from ..tools import jobs, progress
from ..tools.run import run

COUNTED_S = 1.0
"""Seconds to wait for the statistics of a migration that has succeeded; libvirt sends them by its end."""
RETURNS_S = 120.0
"""Seconds until a call must return whose migration was aborted, its other host being out of reach. It asks
that host once more to end its part: seen to wait for ever, with libvirt 9.0.
"""
SOON_S = 0.2
"""Seconds between two looks while the migration may need a change."""
MIB = 1 << 20


def migrate(name: str, target: str, options: MigrateOptions, say: Callable[[str], None]) -> str:
    """Migrate a running domain to the libvirtd `target`; return its statistics as a sentence.

    Without a limit it takes as long as the guest keeps writing. Raise MigrationTimeout if it is given up.
    """
    flags, values = _of_libvirt(options)
    if options.downtime_ms:
        most_ms = options.downtime_ms
        domain.ask(name, "migrate-setmaxdowntime", lambda guest: guest.migrateSetMaxDowntime(most_ms))
    with ExitStack() as stack:
        counted = stack.enter_context(domain.hearing(name, "JOB_COMPLETED"))
        rounds, cut_off = None, threading.Event()
        if options.after_precopy:
            rounds = stack.enter_context(domain.hearing(name, "MIGRATION_ITERATION"))
        what = (name, target, values, flags, cut_off)
        call = libvirtd.Call(f"migrate {name}", lambda here: _moved(here, *what))
        job, over_by = _Job(name, options, rounds, say), float("inf")
        while not call.is_over(SOON_S if job.is_due else LOOK_S):
            job.look()
            # QEMU itself would wait for the other host for TCP's time limit, 15 minutes.
            if cut_off.is_set() and job.abort():
                cut_off.clear()
                over_by = time.monotonic() + RETURNS_S
            if time.monotonic() > over_by:
                raise ToolTimeout(f"libvirt has aborted the migration of {name} and does not return from it")
        try:
            call.answer(0)
        except ToolFailed:
            if not job.given_up:
                raise
            raise MigrationTimeout(
                f"the migration of {name} was given up after {options.limit_s} s: {job.how_far()}"
            ) from None
        said = next_said(counted, COUNTED_S)
    return job.told(said[0]) if said else ""


def _of_libvirt(options: MigrateOptions) -> tuple[int, Dict[str, Any]]:
    """Return flags and parameters for this host's libvirt; raise NotSupported if it is too old for one."""
    libvirt, flags, values = libvirtd.binding(), 0, {}
    try:
        for word in options.flags:
            flags |= getattr(libvirt, f"VIR_MIGRATE_{word}")
        for word, value in options.values.items():
            values[getattr(libvirt, f"VIR_MIGRATE_PARAM_{word}")] = value
    except AttributeError as e:
        raise NotSupported(f"MIGRATE_OPTIONS of kvmrc: this host's libvirt is too old: {e}") from None
    return flags, values


def _moved(
    here: Any, name: str, target: str, values: Dict[str, Any], flags: int, cut_off: threading.Event
) -> None:
    guest = domain.lookup(here, name)
    if flags & libvirtd.binding().VIR_MIGRATE_PEER2PEER:
        guest.migrateToURI3(target, values, flags)
    else:
        with libvirtd.connected(target) as there:
            there.registerCloseCallback(lambda *_: cut_off.set(), None)
            try:
                guest.migrate3(there, values, flags)
            finally:
                there.unregisterCloseCallback()


class _Job:
    """A migration in progress: reports it, and changes it where the options say so."""

    def __init__(
        self, name: str, options: MigrateOptions, rounds: Optional[libvirtd.Heard], say: Callable[[str], None]
    ) -> None:
        self._name, self._rounds, self._say = name, rounds, say
        self._progress = Progress(say)
        self._limit_s, self._at_limit = options.limit_s, options.at_limit
        self._memory_mib_s = options.memory_mib_s if "MIGRATE_DISKS" in options.values else 0
        self._stats: Dict[str, Any] = {}
        self.given_up = self._is_late = self._is_copied_once = False

    @property
    def is_due(self) -> bool:
        """Return True if a change may be needed soon."""
        return bool(self._limit_s or self._rounds or self._memory_mib_s)

    def look(self) -> None:
        """Report progress and make the changes due; each look retries them, as libvirtd may be busy."""
        with suppress(SemisharedError):  # libvirtd is busy, or the guest has just left
            self._stats = domain.job(self._name) or self._stats
        processed, left = (int(self._stats.get(f"data_{name}", 0)) for name in ("processed", "remaining"))
        progress.reached(processed, processed + left)
        self._progress.tell(self.how_far())
        if self._memory_mib_s and self._stats.get("memory_processed"):
            speed = self._memory_mib_s
            if self._do("migrate-setspeed", lambda guest: guest.migrateSetMaxSpeed(speed)):
                self._memory_mib_s = 0
        said = next_said(self._rounds, 0) if self._rounds else None
        self._is_copied_once |= bool(said and said[0] > 1)
        if self._rounds and self._is_copied_once and self._act("postcopy"):
            self._rounds = None
        if self._limit_s and self._progress.seconds > self._limit_s:
            if not self._is_late:
                self._is_late = True
                so_far = f"not there after {self._progress.seconds:.0f} s"
                self._say(f"{so_far}: {self._at_limit} ({self.how_far()})")
            if self._act(self._at_limit):
                self._limit_s = 0

    def how_far(self) -> str:
        """Return how much was sent and how much is left, for a message."""
        stats = self._stats
        total, left = int(stats.get("data_total", 0)), int(stats.get("data_remaining", 0))
        throttle = stats.get("auto_converge_throttle")
        slowed = f", guest slowed down by {throttle} %" if throttle else ""
        rounds = f", round {stats['memory_iteration']}" if stats.get("memory_iteration") else ""
        percent = 100 - 100 * left // total if total else 0
        sent = f"{int(stats.get('data_processed', 0)) / MIB:.0f} MiB sent"
        more = f"({percent} % there{rounds}{slowed})"
        return f"{sent}, {left / MIB:.0f} of {total / MIB:.0f} MiB left {more}"

    def told(self, job: Dict[str, Any]) -> str:
        """Return libvirt's statistics of a completed migration, and the disks' bytes, as a sentence."""
        memory, seconds = int(job.get("memory_processed", 0)), int(job.get("time_elapsed", 0)) / 1000
        disks = max(int(one.get("disk_processed", 0)) for one in (job, self._stats))
        own = f" and {disks / MIB:.0f} MiB of disks" if disks else ""
        still = f", the guest stood still for {job['downtime']} ms" if "downtime" in job else ""
        prepared = f" ({job['setup_time']} ms of them to set up)" if "setup_time" in job else ""
        return f"{memory / MIB:.0f} MiB of memory{own} in {seconds:.1f} s{prepared}{still}"

    def _act(self, what: str) -> bool:
        """Suspend the guest, switch to postcopy, or give up, as `what` says; return True if that is done."""
        if what == "postcopy":
            return self._do("migrate-postcopy", lambda guest: guest.migrateStartPostCopy(0))
        if what == "abort":
            self.given_up = self.abort()
            return self.given_up
        return self._do("suspend", lambda guest: guest.suspend())

    def abort(self) -> bool:
        """Abort the migration; return True if libvirt accepts that."""
        return self._do("domjobabort", lambda guest: guest.abortJob())

    def _do(self, verb: str, do: Callable[[Any], Any]) -> bool:
        try:
            domain.ask(self._name, verb, do)
        except SemisharedError:
            return False  # the guest has just arrived, or the migration goes on unchanged
        return True


NEVER_RAN = {"destroy": "paused", "undefine": "off"}
"""State of a domain that a migration has left unfinished, by how it is removed.

A domain in another state may have arrived by another migration since.
"""


def see_domain(step: SeeDomain) -> SeenDomain:
    """Return what a migration has to know of a running guest."""
    return SeenDomain(
        domain.dumpxml(step.domain).decode(),
        domain.snapshots(step.domain),
        domain.is_persistent(step.domain),
    )


def look_at_proof(vm_dir: str) -> object:
    """Return the proof that premigrate wrote, None without one."""
    try:
        with open(disk_names.migration_note(vm_dir), "rb") as file:
            proof: object = json.loads(file.read(disk_names.JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return proof


def take_proof(vm_dir: str) -> object:
    """Return that proof, and remove it."""
    proof = look_at_proof(vm_dir)
    if proof is not None:
        try:
            os.unlink(disk_names.migration_note(vm_dir))
        except OSError:
            return None
    return proof


def read_site(host: str) -> Site:
    """Return this host's settings for a migration to another host."""
    return Site(site().uri_of(host), load().migration, *site()[2:])


def see_state(step: SeeState) -> str:
    """Return the state of a domain, from this or another host's libvirtd."""
    return domain.state(step.domain, site().uri_of(step.host)) if step.host else domain.state(step.domain)


def migrate_domain(step: MigrateDomain, say: Callable[[str], None]) -> str:
    """Migrate a running guest to another host; return its statistics as a sentence."""
    options = step.options
    if step.chains:
        xml = arriving(domain.migratable(step.domain), step.chains)
        options = options._replace(values={**options.values, "DEST_XML": xml.decode()})
    with jobs.noted("migrate", "migrate", vm=_id(step.domain)):
        progress.expect(target=step.host)
        return migrate(step.domain, site().uri_of(step.host), options, say)


def _id(name: str) -> int:
    """Return the id of a VM by its domain's name, -1 for a name that is not OpenNebula's."""
    number = name.rpartition("-")[2]
    return int(number) if disk_names.is_number(number) else -1


def copy_deltas(step: CopyDeltas) -> None:
    """Have QEMU mirror the guest's deltas into the copy of its VM directory."""
    from ..guest import go_over, job_lock

    job_lock.take(step.vm, step.vm_dir)
    with jobs.noted("migrate", "copy", vm=step.vm):
        go_over.mirror_into_copy(step.vm_dir, step.origin, step.domain)


def wait(seconds: int) -> None:
    time.sleep(seconds)


def remove_arrival(step: RemoveArrival) -> None:
    """Remove from another host a domain that never ran there; raise Overtaken if it has run."""

    def remove(left: Any) -> None:
        state = domain.state_of(left)
        if state != NEVER_RAN[step.how]:
            raise Overtaken(f"{step.domain} on {step.host} is {state} by now: it is left as it is")
        getattr(left, step.how)()

    domain.ask(step.domain, step.how, remove, uri=site().uri_of(step.host), timeout_s=60)


def sync_time(step: SyncTime) -> None:
    """Have the guest's agent set its clock; errors are ignored."""
    sync, uri = libvirtd.binding().VIR_DOMAIN_TIME_SYNC, site().uri_of(step.host)
    with suppress(SemisharedError):
        # libvirt ignores `seconds` then.
        domain.ask(step.domain, "domtime --sync", lambda one: one.setTime({"seconds": 0}, sync), uri=uri)


def compact_memory() -> None:
    """Have the kernel drop caches and compact this host's memory; errors are ignored."""
    with suppress(SemisharedError):
        run(["sudo", "-n", "sysctl", "vm.drop_caches=3", "vm.compact_memory=1"], timeout_s=20)
