# SPDX-License-Identifier: Apache-2.0
"""One live migration through libvirt's binding: begun, watched, limited, and what it took."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any, Dict

from ..errors import NotSupported, SemisharedError
from ..guest import domain, libvirtd
from ..guest.job_events import LOOK_S, next_said
from ..model.steps_live import MigrateOptions

COUNTED_S = 1.0
"""How long to wait for the statistics of a migration that has succeeded; they come before its end, or with it."""


def migrate(name: str, target: str, options: MigrateOptions) -> str:
    """Move a running domain to the libvirtd `target`; return what that took. It may take as long as the guest keeps writing."""
    flags, values = _of_libvirt(options)
    with ExitStack() as stack:
        counted = stack.enter_context(domain.hearing(name, "JOB_COMPLETED"))
        rounds = stack.enter_context(domain.hearing(name, "MIGRATION_ITERATION")) if options.after_precopy else None
        cut_off = threading.Event()
        call = libvirtd.Call(f"migrate {name}", lambda here: _moved(here, name, target, values, flags, cut_off))
        began, is_due = time.monotonic(), bool(options.limit_s)
        while not call.is_over(LOOK_S if not (is_due or rounds) else 0.2):
            if cut_off.is_set():
                # QEMU would wait for the other one for as long as TCP does, a quarter of an hour.
                cut_off.clear()
                _act(name, "abort")
            said = next_said(rounds, 0) if rounds else None
            if said and said[0] > 1:
                rounds = None
                _act(name, "postcopy")
            if is_due and time.monotonic() - began > options.limit_s:
                is_due = False
                _act(name, options.at_limit)
        call.answer(0)
        said = next_said(counted, COUNTED_S)
    return _told(said[0]) if said else ""


def _of_libvirt(options: MigrateOptions) -> tuple[int, Dict[str, Any]]:
    """Return flags and parameters for the libvirt of this host; raise NotSupported for what it does not know."""
    libvirt, flags, values = libvirtd.binding(), 0, {}
    try:
        for word in options.flags:
            flags |= getattr(libvirt, f"VIR_MIGRATE_{word}")
        for word, value in options.values.items():
            values[getattr(libvirt, f"VIR_MIGRATE_PARAM_{word}")] = value
    except AttributeError as e:
        raise NotSupported(f"MIGRATE_OPTIONS of kvmrc: this host's libvirt is too old: {e}") from None
    return flags, values


def _moved(here: Any, name: str, target: str, values: Dict[str, Any], flags: int, cut_off: threading.Event) -> None:
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


def _act(name: str, what: str) -> None:
    """Suspend a guest that does not come to an end with its memory, let it go on over there without all of it, or give it up."""
    try:
        if what == "abort":
            domain.ask(name, "domjobabort", lambda guest: guest.abortJob())
            return
        if what == "postcopy":
            domain.ask(name, "migrate-postcopy", lambda guest: guest.migrateStartPostCopy(0))
        else:
            domain.ask(name, "suspend", lambda guest: guest.suspend())
    except SemisharedError:
        pass  # it has just arrived, or goes on as it did


def _told(job: Dict[str, Any]) -> str:
    """Return libvirt's statistics of a migration as a sentence."""
    memory, seconds = int(job.get("memory_processed", 0)), int(job.get("time_elapsed", 0)) / 1000
    still = f", the guest stood still for {job['downtime']} ms" if "downtime" in job else ""
    return f"{memory / (1 << 20):.0f} MiB of memory in {seconds:.1f} s{still}"
