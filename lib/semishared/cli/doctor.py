# SPDX-License-Identifier: Apache-2.0
"""Look at the whole installation and say what is wrong, each with the command that mends it.

It looks at oned.conf and vmm_execrc, the forwarders, datastores and attributes in OpenNebula, and asks the
front-end and all hosts at once: programs and their versions, whether they are synced, libvirt, whether each
reaches each store with the right rights, the local disk, what shares need; and what killed actions left over.
It changes nothing. A dead host costs seconds.

exit codes: 0 all is well, 1 there are warnings, 2 something is broken
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator

from .. import NAME
from ..config import Config, load
from ..errors import CannotInstall, HostUnreachable, SemisharedError
from ..guest.virsh import Site as Libvirt
from ..install import edits, examine
from ..install.front_end import FrontEnd, locate
from ..install.preflight import Question, encoded
from ..install.tree import forwarder
from ..model.store import template
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..plan.care import diagnosis as plan
from ..plan.care.diagnosis_machines import Answers, of_machines
from ..tools.this_machine import is_here
from . import command as on
from . import doctor_checks
from .command import AT_ONCE, Waiting, argument, put, put_json, refuse_root, table

ARGUMENTS = (
    on.JSON,
    argument("--root", metavar="DIR", default="", help="an OpenNebula whose files are below this directory"),
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared doctor`."""
    refuse_root(": what root can reach says nothing of the drivers")
    place = located(arguments.root)
    config, wrong = _config()
    cloud, no_oned = _cloud()
    front_end = on.front_end_of(cloud.hosts)
    site = look_at_site(place, front_end)._replace(
        conf=wrong or _scripts(place, config), oned=no_oned, lost_name=_lost_name(place)
    )
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(doctor_checks.leftovers_found, config, bool(no_oned))
        answers = ask_all(place, cloud, front_end, config)
        count, size, unseen, damaged = left.result()
    findings = [
        *plan.of_site(site),
        *(plan.of_cloud(cloud, front_end) if not no_oned else []),
        *of_machines(answers, site, cloud, (config.bases_size_limit, config.bases_free_floor)),
        *plan.of_stock_images(doctor_checks.stock_images(cloud), front_end),
        *plan.of_leftovers(count, size, front_end),
        *plan.of_damaged(damaged),
        *doctor_checks.fence_findings(cloud, answers, config, front_end),
        *doctor_checks.pool_findings(cloud, config),
        *doctor_checks.share_findings(cloud, answers, config, front_end),
    ]
    findings += plan.of_unseen(
        unseen, {machine for machine, answer in answers.items() if isinstance(answer, dict)}, findings
    )
    findings.sort(key=lambda item: (-item.severity, item.machine != front_end, item.machine))
    if arguments.json:
        put_json(as_json(findings, answers))
    else:
        show(findings, answers)
    return max((item.severity for item in findings), default=plan.OK)


def located(root: str) -> FrontEnd:
    """Return where OpenNebula is: around the package that runs, if it is installed."""
    remotes = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    is_installed = os.path.isfile(f"{remotes}/vmm/kvm/deploy") and not root
    return locate(remotes if is_installed else None, None, root, True, os.environ)


def _config() -> tuple[Config, str]:
    try:
        return load(), ""
    except SemisharedError as e:
        return Config(), e.detail


def _scripts(place: FrontEnd, config: Config) -> str:
    """Return what is wrong with scripts_dir."""
    wanted = _of_oned_conf(place, edits.scripts_dir)
    if wanted in ("", config.hosts_scripts_dir):
        return ""
    return (
        f"semishared.conf: scripts_dir = {config.hosts_scripts_dir}, but hosts have OpenNebula's "
        f"scripts in {wanted} (oned.conf)"
    )


def _lost_name(place: FrontEnd) -> str:
    """Return HOSTNAME of oned.conf if it does not lead to this machine."""
    name = _of_oned_conf(place, edits.hostname)
    return "" if not name or is_here(name) else name


def _of_oned_conf(place: FrontEnd, said: Callable[[str, str], str]) -> str:
    """Return what oned.conf says, '' where it cannot be read: a finding of its own."""
    if place.etc is None:
        return ""
    try:
        return said(edits.read(place.oned_conf), place.oned_conf)
    except SemisharedError:
        return ""


def _cloud() -> tuple[plan.Cloud, str]:
    try:
        oned = Oned()
        datastores = on.ours(oned)
        numbers = {store.id for store in datastores}
        images = [image for image in oned.images() if image.store_id in numbers]
        hosts = [host for host in oned.hosts() if not host.is_offline and host.is_near(datastores)]
        return plan.Cloud(datastores, images, hosts, oned.hooks()), ""
    except SemisharedError as e:
        return plan.Cloud(), e.detail


def look_at_site(place: FrontEnd, front_end: str) -> plan.Site:
    """Return what the front-end's files say."""
    site = plan.Site(front_end, forwarders=tuple(_forwarders(place)))
    if place.etc is None:
        return site._replace(unreadable="there is no oned.conf beside this remotes directory")
    ours = f"{place.remotes}/vmm/{NAME}"
    own = [name for name in _names(ours) if name not in edits.NO_ACTIONS and not _is_forwarder(ours, name)]
    try:
        changes = [
            f"{item.path}: {change}"
            for item in edits.to_install(place, own)
            for change in item.changed.changes
        ]
    except CannotInstall as e:
        return site._replace(unreadable=e.detail)
    except SemisharedError as e:
        return site._replace(changes=(e.detail,))
    return site._replace(changes=tuple(changes), restart_due=_restart_due(place))


def _restart_due(place: FrontEnd) -> bool:
    """Tell whether oned.conf is newer than what oned has noted of it at its start."""
    try:
        return (
            os.stat(place.oned_conf).st_mtime > os.stat(f"{os.path.dirname(place.remotes)}/config").st_mtime
        )
    except OSError:
        return False


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _is_forwarder(directory: str, name: str) -> bool:
    try:
        with open(f"{directory}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096) == forwarder(name)
    except OSError:
        return False


def _forwarders(place: FrontEnd) -> Iterator[str]:
    """Yield what does not fit between our hypervisor directory and OpenNebula's."""
    ours, stock = f"{place.remotes}/vmm/{NAME}", f"{place.remotes}/vmm/kvm"
    there = set(_names(ours))
    for name in _names(stock):
        if name not in there and os.path.isfile(f"{stock}/{name}") and os.access(f"{stock}/{name}", os.X_OK):
            yield f"{name} of this OpenNebula is not handed over to"
    for name in sorted(there - set(_names(stock))):
        if _is_forwarder(ours, name):
            yield f"{name} hands over to a script that OpenNebula does not have"


def ask_all(place: FrontEnd, cloud: plan.Cloud, front_end: str, config: Config) -> Answers:
    """Ask the front-end and all hosts at once."""
    mounted, ceph, bridged = [], [], []
    for store in cloud.datastores:
        try:
            if template.is_shares(store):
                continue
            access = template.access(store)
            if not store.is_system and not access.can.has_bridge:
                mounted.append(absolute(store.base_path, "BASE_PATH"))
            elif not store.is_system:
                ceph.append((template.pool(store), access.reader, access.conf, access.secret))
                if not template.bridges(store):
                    bridged.append((template.pool(store), access.bridge_user, access.conf, ""))
        except SemisharedError:
            # Its attributes are a finding of their own.
            continue
    systems = tuple(
        path for path in map(plan.path_of, (store for store in cloud.datastores if store.is_system)) if path
    )
    location = next(map(on.location, cloud.datastores), "")
    libvirt = Libvirt.read(f"{place.remotes}/etc/vmm/kvm/kvmrc").uri
    hosts = [host.name for host in cloud.hosts]
    with doctor_checks.tokens(mounted) as token:
        base = Question(
            ("host",),
            config.hosts_scripts_dir,
            location,
            tuple(mounted),
            token,
            libvirt,
            tuple(ceph),
            systems,
            True,
        )

        def one(machine: str) -> dict[str, Any] | str:
            question = base
            if machine == front_end:
                roles = ("front-end", "host") if machine in hosts else ("front-end",)
                question = base._replace(roles=roles, scripts=place.remotes, ceph=tuple(bridged))
                if machine not in hosts:
                    question = question._replace(libvirt="")
            try:
                return examine.examine(machine, encoded(question), config.hosts_connect_timeout_s)
            except HostUnreachable as e:
                return f"does not answer: {e.detail}"
            except SemisharedError as e:
                return e.detail
            finally:
                waiting.done()

        machines = list(dict.fromkeys([front_end, *hosts]))
        with Waiting("doctor: machines", len(machines)) as waiting, ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(machines, pool.map(one, machines)))


def machine_row(answer: dict[str, Any] | str) -> dict[str, str]:
    """Return the versions of a machine."""
    if isinstance(answer, str):
        return {}
    programs = answer["programs"]
    return {
        NAME: answer.get("tree", {}).get("version", ""),
        "qemu": programs.get("qemu-img") or "",
        "libvirt": answer.get("libvirt", {}).get("libvirt") or programs.get("virsh") or "",
        "python3": ".".join(map(str, answer["python"])),
        "zstd": programs.get("zstd") or "",
        "lzop": programs.get("lzop") or "",
        "udpcast": "yes" if programs.get("udp-receiver") is not None else "",
    }


def as_json(findings: list[plan.Finding], answers: Answers) -> dict[str, object]:
    """Return everything as JSON data."""
    rows = [{**item._asdict(), "severity": plan.WORDS[item.severity]} for item in findings]
    worst = plan.WORDS[max((item.severity for item in findings), default=plan.OK)]
    return {
        "result": worst,
        "findings": rows,
        "machines": {machine: machine_row(answer) for machine, answer in answers.items()},
    }


def show(findings: list[plan.Finding], answers: Answers) -> None:
    """Print a table of versions, and the findings with what mends them."""
    rows = [(machine, machine_row(answer)) for machine, answer in answers.items()]
    names = list(next((row for _, row in rows if row), {}))
    lines = [[machine, *(row.get(name) or "-" for name in names)] for machine, row in rows]
    table("|".join(["", *names]), lines)
    put()
    for item in findings:
        put(f"{plan.WORDS[item.severity]:8}{item.machine}: {item.what}")
        put(f"{'':8}-> {item.mend}")
    counts = [sum(item.severity == level for item in findings) for level in (plan.BROKEN, plan.WARNING)]
    put(
        f"{len(answers)} machines: {counts[0]} broken, {counts[1]} warnings"
        if findings
        else f"{len(answers)} machines: all is well"
    )
