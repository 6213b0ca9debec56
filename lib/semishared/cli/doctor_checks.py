# SPDX-License-Identifier: Apache-2.0
"""Checks of `semishared doctor`: mounted stores on the front-end, pools, shares, fencing, leftovers.

A store that hangs holds up no check. Pools, shares and fencing are checked only where they were set up.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Iterator, Sequence

from ..config import Config
from ..errors import SemisharedError
from ..front import fence_facts
from ..front.fence_marks import Marks
from ..front.stores import is_stock
from ..install.preflight import limited
from ..model.attributes import HOST_POOL
from ..model.device.steps import ListDevices
from ..model.disk import names as disk_names
from ..model.share import share
from ..model.share.steps import LookAtRoot, LookAtShareHost
from ..model.store import template
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host, Image
from ..plan.care.diagnosis import BROKEN, WARNING, Cloud, Finding, of_fenced, of_means
from ..plan.care.diagnosis_machines import Answers
from ..plan.care.diagnosis_shares import Made, of_hosts, of_roots, ways
from ..plan.care.fence import Mark
from ..plan.care.gc import find
from ..plan.device import choose
from ..tools.files import unlink
from ..tools.hung_store import unless_it_hangs
from ..tools.this_machine import are_one, is_here
from ..units import human
from ..wire.session import Session
from . import command as on
from . import gc, setup
from .command import AT_ONCE
from .pool import declaration


@contextlib.contextmanager
def tokens(directories: Sequence[str]) -> Iterator[str]:
    """Put a file of one new name into each store, to see which hosts have the same store; yield its name."""
    token = disk_names.staged("doctor", os.urandom(6).hex())
    paths = [f"{directory}/{token}" for directory in directories]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        are_made = list(pool.map(lambda path: unless_it_hangs(partial(_made, path), False), paths))
    try:
        yield token
    finally:
        for path in (path for path, is_made in zip(paths, are_made) if is_made):
            unless_it_hangs(partial(unlink, path), None)


def _made(path: str) -> bool:
    """Make a file; the front-end's own examination says what is wrong where that fails."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    return True


def stock_images(cloud: Cloud) -> list[Image]:
    """Return the images in mounted stores whose content is in layers of a stock driver; none if the store
    hangs.
    """
    found: list[Image] = []

    def look() -> None:
        for image in cloud.images:
            with contextlib.suppress(OSError, SemisharedError):  # of what is not readable others speak
                if is_stock(image):
                    found.append(image)

    limited(look)
    return list(found)


WATCH = "semishared-ram.sh enable SIZE KIND TIMES, once more (docs/how-to/pool.md)"


def pool_findings(cloud: Cloud, config: Config) -> list[Finding]:
    """Return what is wrong with the pools of hosts, compared with what declares them."""
    wanted = [host for host in cloud.hosts if HOST_POOL.text(host) or config.pool_devices != "none"]
    if not wanted:
        return []
    roots = on.roots(on.ours(Oned()))

    def one(session: Session, host: Host) -> list[choose.Wrong]:
        rows: list[dict[str, object]] = []
        for root in roots:
            (listed,) = session.run([ListDevices(root)])
            rows += listed["devices"] if isinstance(listed, dict) else []
        return choose.differences(_declared(host, config), rows) + choose.unreserved(
            rows, host.reserved_memory
        )

    # A host that does not answer is a finding of others.
    answers = on.Survey().ask(wanted, "doctor", config, one)
    return [_finding(host, wrong) for host, found in answers.items() for wrong in found]


def _finding(host: str, wrong: choose.Wrong) -> Finding:
    check = f"as oneadmin: semishared pool check {host}"
    severity, mend = {
        choose.ABSENT: (BROKEN, check),
        choose.CHANGED: (WARNING, check),
        choose.LOST: (WARNING, "onevm recover --recreate VM"),
        choose.UNRESERVED: (WARNING, f"onehost update {host}"),
        choose.UNWATCHED: (WARNING, f"as root on {host}: {WATCH}"),
        choose.LIMITED: (
            WARNING,
            f"as root on {host}: echo 0 >/sys/block/zram0/mem_limit, or whichever it is",
        ),
        choose.OLD: (WARNING, f"as oneadmin: semishared pool add {host}"),
        choose.UNSAFE: (
            BROKEN,
            f"as root on {host}: {WATCH}; then, when no disk is there, stop and start it",
        ),
    }[wrong.kind]
    return Finding(severity, host, f"pool: {wrong.text}", mend)


def _declared(host: Host, config: Config) -> tuple[choose.Declared, ...]:
    try:
        return declaration(host, config.pool_devices)
    except SemisharedError:
        return ()  # its attributes are a finding of their own


def share_findings(cloud: Cloud, answers: Answers, config: Config, front_end: str) -> list[Finding]:
    """Return what is wrong with shares, where a datastore has any."""
    made = [
        one
        for store in cloud.datastores
        if template.is_shares(store)
        for one in _made_shares(store, cloud, config, front_end)
    ]
    roots = tuple(sorted({one.tree.root for one in made if one.tree.marker and one.by_hosts}))
    if not roots:
        return of_roots(made, front_end)

    def one(session: Session, _: Host) -> Any:
        return session.run([LookAtShareHost(roots)])[0]

    # A host that does not answer is a finding of others.
    seen = on.Survey().ask([host for host in cloud.hosts if not host.is_offline], "doctor", config, one)
    libvirts = {
        machine: answer.get("libvirt", {}) for machine, answer in answers.items() if isinstance(answer, dict)
    }
    return [*of_roots(made, front_end), *of_hosts(made, seen, libvirts)]


def _made_shares(store: Datastore, cloud: Cloud, config: Config, front_end: str) -> list[Made]:
    """Return what the machine says that makes the shares of a datastore, nothing if its attributes, a finding
    of their own, are wrong.
    """
    try:
        tree, machine = share.tree(store), share.bridge(store)
    except SemisharedError:
        return []
    machine = front_end if is_here(machine) else _named(machine, cloud)
    if not tree.marker:
        return [Made(store, tree, machine)]
    by_hosts, by_clients = ways(store, cloud.images)
    images = [image for image in cloud.images if image.store_id == store.id]
    try:
        with Session(machine, "doctor", config) as session:
            answer: Any = session.run([LookAtRoot(tree, by_clients, tuple(image.id for image in images))])[0]
        found = Made(
            store, tree, machine, answer["lacking"], by_hosts=by_hosts, has_cloud=bool(answer["cloud"])
        )
        return [
            found._replace(
                images=images, lapsed=answer["lapsed"], promised=answer["promised"], pools=answer["pools"]
            )
        ]
    except SemisharedError as e:
        return [Made(store, tree, machine, (), e.detail, e.remedy, by_hosts)]


def _named(machine: str, cloud: Cloud) -> str:
    """Return what OpenNebula calls a machine of BRIDGE_LIST, if it is a host there."""
    names = [host.name for host in cloud.hosts]
    return machine if machine in names else next((name for name in names if are_one(name, machine)), machine)


def fence_findings(cloud: Cloud, answers: Answers, config: Config, front_end: str) -> list[Finding]:
    """Return what is wrong with fencing, where a key or a command was set up."""
    boots = {
        machine: str(answer.get("boot", ""))
        for machine, answer in answers.items()
        if isinstance(answer, dict)
    }
    pools = [store for store in cloud.datastores if not store.is_system and _names_key(store)]
    keys = {str(group[0].id): _why_not(group) for group in fence_facts.clusters(pools)}
    own = setup.key_findings(front_end, config.hosts_connect_timeout_s)
    return [*own, *of_fenced(_marks(cloud), boots), *of_means(_not_run(config), keys, front_end)]


def _marks(cloud: Cloud) -> dict[str, Mark]:
    """Return the marks of hosts, by their names; none where oned, or the key, is a finding of its own."""
    try:
        return Marks(Oned()).of_all(cloud.hosts)
    except SemisharedError:
        return {}


def _names_key(store: Datastore) -> bool:
    try:
        return template.kind(store).has_bridge and bool(template.fence_user(store))
    except SemisharedError:
        return False  # its attributes are a finding of their own


def _why_not(datastores: Sequence[Datastore]) -> str:
    try:
        fence_facts.try_key(datastores)
    except SemisharedError as e:
        return e.detail
    return ""


def _not_run(config: Config) -> str:
    """Return why the fencing command cannot be run, '' if it can, or there is none."""
    words = config.fencing
    return (
        "" if not words or os.access(words[0], os.X_OK) else f"{words[0]} is not there, or not to be executed"
    )


OLD_S = 3600
"""What is younger may belong to an action that is under way."""


def leftovers_found(
    config: Config, no_oned: bool
) -> tuple[int, str, list[dict[str, str]], list[tuple[str, str]]]:
    """Return how many things gc would remove, their size, what it could not look at: machine and error, and
    the same of what is damaged.
    """
    if no_oned:
        return 0, "", [], []
    try:
        survey = gc.survey_cloud(Oned(), config)
    except SemisharedError:
        return 0, "", [], []
    left = find(survey.machines, survey.known, OLD_S, not survey.errors)
    left += gc.elsewhere(survey, OLD_S, config)
    left = [item for item in left if not item.keep]
    damaged = [
        (machine.name, text) for machine in survey.machines for text in machine.facts.get("unreadable", ())
    ]
    return len(left), human(sum(item.bytes for item in left)), survey.errors, damaged
