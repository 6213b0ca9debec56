# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an installation, and the command that mends it: by what oned and the front-end said.

It asks nothing. It judges the means of fencing too, and hosts that were fenced and are back.
"""

from __future__ import annotations

import re
from typing import Any, Container, Iterable, Mapping, Sequence, Union

from ... import NAME as DRIVER
from ...errors import SemisharedError
from ...named import NamedTuple
from ...opennebula.args import absolute
from ...opennebula.states import DatastoreType
from ...opennebula.xml import Datastore, Host, Image, View
from ..image import attributes
from .fence import BEGUN, Mark

OK, WARNING, BROKEN = 0, 1, 2
WORDS = ("ok", "warning", "broken")
TM_CONF = (
    ("LN_TARGET", "NONE", True),
    ("CLONE_TARGET", "SYSTEM", True),
    ("SHARED", "NO", True),
    ("DS_MIGRATE", "YES", False),
    ("DS_LIVE_MIGRATE", "YES", False),
    ("DS_MIGRATE_SNAP", "YES", False),
    ("ALLOW_ORPHANS", "YES", True),
)
"""What oned.conf says of the driver (docs/explanation/contract.md): key, value, and whether it must have that
value; else an administrator's other choice stays.
"""


class Finding(NamedTuple):
    """One thing that is not as it should be."""

    severity: int
    machine: str
    what: str
    mend: str
    """The command that mends it, or what to do."""


class Site(NamedTuple):
    """What the front-end knows of itself."""

    front_end: str
    changes: tuple[str, ...] = ()
    """What install.sh would still change in oned.conf and vmm_execrc."""
    unreadable: str = ""
    """Why the configuration cannot be judged."""
    restart_due: bool = False
    forwarders: tuple[str, ...] = ()
    """Hypervisor actions of OpenNebula that have no forwarder, and forwarders whose action is gone."""
    conf: str = ""
    """What is wrong with semishared.conf."""
    oned: str = ""
    """Why oned could not be asked."""
    lost_name: str = ""
    """What oned calls the front-end (HOSTNAME of oned.conf), if that does not lead there."""


class Cloud(NamedTuple):
    """What oned knows of ours."""

    datastores: Sequence[Datastore] = ()
    images: Sequence[Image] = ()
    hosts: Sequence[Host] = ()
    hooks: Sequence[View] = ()


def of_site(site: Site) -> list[Finding]:
    """Judge the front-end's own state."""
    install = "as root: ./install.sh"
    found = [
        Finding(BROKEN, site.front_end, f"configuration: {change}: missing", install)
        for change in site.changes
    ]
    if site.unreadable:
        found.append(Finding(WARNING, site.front_end, site.unreadable, "run this as oneadmin, or as root"))
    if site.restart_due:
        found.append(
            Finding(
                WARNING,
                site.front_end,
                "oned.conf is newer than the running oned",
                "as root: systemctl restart opennebula",
            )
        )
    for action in site.forwarders:
        found.append(
            Finding(
                BROKEN,
                site.front_end,
                f"vmm/{DRIVER}: {action}",
                f"{install}; as oneadmin: onehost sync --force",
            )
        )
    if site.conf:
        found.append(
            Finding(
                BROKEN,
                site.front_end,
                site.conf,
                f"edit etc/{DRIVER}.conf; as oneadmin: onehost sync --force",
            )
        )
    if site.lost_name:
        what = (
            f"HOSTNAME of oned.conf is {site.lost_name}, which does not lead here: no VM can be "
            f"stopped or undeployed"
        )
        found.append(
            Finding(
                BROKEN,
                site.front_end,
                what,
                f"as root: let {site.lost_name} lead here (/etc/hosts), or mend HOSTNAME",
            )
        )
    if site.oned:
        found.append(Finding(BROKEN, site.front_end, site.oned, "as root: systemctl start opennebula"))
    return found


def of_cloud(cloud: Cloud, front_end: str) -> list[Finding]:
    """Judge datastores, images and hosts by their attributes in OpenNebula."""
    found = []
    kinds = {store.type for store in cloud.datastores if store.driver == DRIVER}
    for number, kind in ((DatastoreType.IMAGE_DS, "image"), (DatastoreType.SYSTEM_DS, "system")):
        if number not in kinds:
            found.append(
                Finding(
                    WARNING, front_end, f"there is no {kind} datastore of {DRIVER}", f"{DRIVER} setup --apply"
                )
            )
    for store in cloud.datastores:
        update = f"onedatastore update {store.id}"
        name = f"datastore {store.id} ({store.name})"
        holder = "system datastore" if store.is_system else "image datastore"
        found += [
            Finding(BROKEN, front_end, f"{name}: {text}", update)
            for text in attributes.problems(holder, _template(store))
        ]
        if not store.is_system and (store.driver, store.store_driver) != (DRIVER, DRIVER):
            found.append(
                Finding(
                    BROKEN,
                    front_end,
                    f"{name}: TM_MAD is {store.driver}, DS_MAD {store.store_driver}, not both {DRIVER}",
                    f"{update}: both are {DRIVER}, or none",
                )
            )
        for key, value, must in TM_CONF:
            applies = () if store.is_system else ("LN_TARGET", "CLONE_TARGET", "ALLOW_ORPHANS")
            there = store.attribute(key).upper()
            if must and key in applies and there not in ("", value):
                found.append(
                    Finding(
                        WARNING,
                        front_end,
                        f"{name}: {key} is {there}, oned.conf says {value}",
                        f"{update}: save it unchanged, and oned copies what oned.conf says",
                    )
                )
    for image in cloud.images:
        for text in attributes.problems("image", _template(image)):
            found.append(
                Finding(
                    BROKEN,
                    front_end,
                    f"image {image.id} ({image.name}): {text}",
                    f"oneimage update {image.id}",
                )
            )
    for host in cloud.hosts:
        for text in attributes.problems("host", _template(host)):
            found.append(Finding(BROKEN, host.name, text, f"onehost update {host.name}"))
    return [*found, *_of_host_failures(cloud, front_end)]


def _of_host_failures(cloud: Cloud, front_end: str) -> list[Finding]:
    """Judge what is to happen when a host is lost, and what OpenNebula keeps from happening."""
    page, found = "docs/how-to/dead-host.md", []
    commands = [hook.text("TEMPLATE/COMMAND") for hook in cloud.hooks]
    arguments = [
        hook.text("TEMPLATE/ARGUMENTS").split()
        for hook in cloud.hooks
        if "host_error" in hook.text("TEMPLATE/COMMAND")
    ]
    is_ours = any(f"{DRIVER} failover" in command for command in commands)
    if any({"-r", "--recreate", "-d", "--delete"} & set(words) for words in arguments):
        found.append(
            Finding(
                WARNING,
                front_end,
                f"OpenNebula's hook for lost hosts removes VMs, disks of {DRIVER} too",
                page,
            )
        )
    elif arguments and not is_ours:
        found.append(
            Finding(
                WARNING, front_end, f"OpenNebula's hook for lost hosts passes over all VMs of {DRIVER}", page
            )
        )
    for image in cloud.images:
        if image.attribute("PERSISTENT_TYPE").upper() == "SHAREABLE":
            what = (
                f"image {image.id} ({image.name}) is SHAREABLE: the scheduler gives its VMs no system "
                f"datastore of {DRIVER}"
            )
            found.append(
                Finding(WARNING, front_end, what, "deploy and migrate them by hand: onevm deploy VM HOST")
            )
    return found


def of_stock_images(found: Sequence[Image], front_end: str) -> list[Finding]:
    """Judge images whose content is in layers of a stock driver."""
    mend = "docs/how-to/stock-images.md"
    return [
        Finding(
            BROKEN,
            front_end,
            f"image {image.id} ({image.name}) has snapshots of OpenNebula's own drivers, and cannot be used",
            mend,
        )
        for image in found
    ]


def of_leftovers(count: int, size: str, front_end: str) -> list[Finding]:
    """Judge what gc has found."""
    if not count:
        return []
    return [
        Finding(
            WARNING,
            front_end,
            f"{count} leftovers of killed actions ({size})",
            f"{DRIVER} gc --dry-run; then {DRIVER} gc",
        )
    ]


def of_damaged(found: Iterable[tuple[str, str]]) -> list[Finding]:
    """Judge what cannot be read of disks: machine, and what and why."""
    mend = f"nothing that it is of is removed, or it is kept: copy what there is, and see `{DRIVER} status`"
    return [Finding(BROKEN, machine, text, mend) for machine, text in found]


def of_unseen(
    errors: Sequence[Mapping[str, str]], reached: Container[str], others: Sequence[Finding]
) -> list[Finding]:
    """Judge what gc could not look at on machines that were reached; where something is broken that is why,
    or comes first.
    """
    broken = {item.machine for item in others if item.severity == BROKEN}
    return [
        Finding(
            WARNING,
            error["machine"],
            f"cannot be searched for leftovers: {error['error']}",
            f"mend that; then {DRIVER} gc --dry-run",
        )
        for error in errors
        if error["machine"] in reached and error["machine"] not in broken
    ]


def _template(view: Datastore | Image | Host) -> dict[str, str]:
    element = view.element.find("TEMPLATE")
    return (
        {}
        if element is None
        else {child.tag: (child.text or "").strip() for child in element if len(child) == 0}
    )


def path_of(store: Datastore) -> str:
    """Return the directory of a datastore, '' if it is none."""
    try:
        return absolute(store.base_path, "BASE_PATH")
    except SemisharedError:
        return ""


NETWORK = r"(nfs4?|ceph|lustre|gpfs|beegfs|glusterfs|gfs2|ocfs2|9p|virtiofs|fuse\..*)\Z"
"""Types of file systems that several machines may have."""


def of_fenced(marks: Mapping[str, Mark], boots: Mapping[str, str]) -> list[Finding]:
    """Judge the marks of hosts; `boots`: the boot ids of those that answer."""
    found = []
    for host, mark in marks.items():
        boot = boots.get(host, "")
        if mark.strange:
            found.append(Finding(BROKEN, host, mark.strange, "docs/how-to/dead-host.md"))
        if not mark.stands:
            continue
        if mark.state == BEGUN and (mark.shut_nothing_out or not boot):
            mend = f"{DRIVER} fence {host}" + (
                f"; if it lives, {DRIVER} fence --lift {host}" if mark.shut_nothing_out else ""
            )
            found.append(
                Finding(BROKEN, host, "its fencing was begun and did not end: it may still write", mend)
            )
        elif boot and boot == mark.boot:
            mend = f"restart {host}; then {DRIVER} fence --lift {host}"
            found.append(
                Finding(
                    BROKEN,
                    host,
                    "it was fenced, and runs on with the guests of then: none of them can write",
                    mend,
                )
            )
        elif boot:
            mend = f"{DRIVER} fence --lift {host}"
            found.append(
                Finding(
                    WARNING,
                    host,
                    "it was fenced, and is back: until it is let in, it has no images on Ceph",
                    mend,
                )
            )
    return found


def of_means(command: str, keys: Mapping[str, str], front_end: str) -> list[Finding]:
    """Judge the means: why the fencing command cannot be run, '' if it can or there is none; per datastore
    why the key is not good.
    """
    found = []
    if command:
        found.append(
            Finding(
                BROKEN,
                front_end,
                f"[fence] command: {command}",
                f"edit etc/{DRIVER}.conf: hosts cannot be switched off",
            )
        )
    for name, why in keys.items():
        if why:
            mend = (
                f"{DRIVER} caps --role fence {name}: for the cluster's admin, and its keyring on "
                f"each front-end"
            )
            found.append(
                Finding(BROKEN, front_end, f"datastore {name}: a dead host cannot be shut out: {why}", mend)
            )
    return found


def of_keys(answers: Mapping[str, Union[Mapping[str, Any], str]], front_end: str, path: str) -> list[Finding]:
    """Judge the keys of front-ends: what each says of its own, or why it says nothing."""
    found, here = [], answers.get(front_end, {})
    own = "" if isinstance(here, str) else here.get("code", "")
    for machine, said in answers.items():
        if isinstance(said, str):
            what = f"{path}: nobody knows whether this front-end has the same as {front_end}: {said}"
            found.append(Finding(WARNING, machine, what, f"as oneadmin on {front_end}: ssh {machine} true"))
            continue
        mend = f"as oneadmin on {front_end}: scp -p {path} {machine}:{path}"
        if machine == front_end:
            mend = f"if it is there: chown oneadmin: and chmod 600; else as oneadmin: {DRIVER} setup --key"
        if said.get("why_not"):
            found.append(
                Finding(BROKEN, machine, f"{path} {said['why_not']}: hosts cannot be fenced from here", mend)
            )
        elif own and said.get("code") != own:
            what = f"{path} is another than that of {front_end}: neither believes the other's marks of fences"
            found.append(Finding(BROKEN, machine, what, mend))
        if re.match(NETWORK, str(said.get("on"))):
            what = f"{path} lies on a file system that other machines may have too ({said.get('on')})"
            found.append(
                Finding(
                    WARNING, machine, what, "have it on a disk of the front-end's own: hosts must not read it"
                )
            )
    return found
