# SPDX-License-Identifier: Apache-2.0
"""Judge an installation by what oned and the front-end report (checks.py has the rows).

Also the means of fencing, and hosts that were fenced and are back.
"""

from __future__ import annotations

import re
from typing import Any, Container, Iterable, Mapping, Sequence, Union

from ... import NAME as DRIVER
from ...errors import SemisharedError
from ...model import bulk_network
from ...model.attributes import TM_CONF
from ...model.store import lost as rows
from ...model.store import template
from ...model.store.access import NETWORK
from ...named import NamedTuple
from ...opennebula.args import absolute
from ...opennebula.xml import Datastore, Host, Image, Object, View
from ..device import choose
from ..image import attributes
from . import compatible
from .checks import BROKEN, OK, WARNING, WORDS, Finding, Judge, judged
from .fence import BEGUN, Mark

__all__ = ["BROKEN", "OK", "WARNING", "WORDS", "Finding"]


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
    """The HOSTNAME of oned.conf, if that name does not lead to the front-end."""


class Cloud(NamedTuple):
    """oned's datastores, images and hosts of this driver."""

    datastores: Sequence[Datastore] = ()
    images: Sequence[Image] = ()
    hosts: Sequence[Host] = ()
    hooks: Sequence[View] = ()
    others: Sequence[Datastore] = ()
    """Datastores of other drivers."""
    moves: Mapping[str, str] = {}
    """What oned.conf says of moves to system datastores of ours, none if that is unknown."""


BULK: dict[str, Judge] = {"bulk": lambda why: why}


def of_bulk(hosts: Sequence[Host], bulk: str) -> list[Finding]:
    """Name the hosts that bulk data does not go to by the network for it, '' for none such."""
    told = {host.name: host.told_addresses for host in hosts if bulk}
    whys = {name: bulk_network.why_none(bulk, name, told) for name in told}
    return [found for name, why in whys.items() for found in judged("bulk", BULK, why, name, bulk=bulk)]


SITE: dict[str, Judge] = {
    "installed": lambda site: list(site.changes),
    "readable": lambda site: site.unreadable,
    "restarted": lambda site: site.restart_due,
    "forwarders": lambda site: list(site.forwarders),
    "conf": lambda site: site.conf,
    "hostname": lambda site: site.lost_name,
    "oned": lambda site: site.oned,
}


def of_site(site: Site) -> list[Finding]:
    """Judge the front-end's own state."""
    return judged("site", SITE, site, site.front_end)


def _problems(holder: str, view: Object) -> list[str]:
    return list(attributes.problems(holder, view.attributes()))


def _datastore_problems(store: Datastore) -> list[str]:
    said = store.attributes()
    if template.disk_type(store):
        said.setdefault("DISK_TYPE", template.disk_type(store))
    return list(attributes.problems("system datastore" if store.is_system else "image datastore", said))


def _kinds_lacking(cloud: Cloud) -> list[str]:
    kinds = {store.type for store in cloud.datastores if store.driver == DRIVER}
    return [kind for number, kind in ((0, "image"), (1, "system")) if number not in kinds]


def _half_ours(store: Datastore) -> object:
    drivers = (store.driver, store.store_driver)
    return not store.is_system and drivers != (DRIVER, DRIVER) and {"tm": drivers[0], "ds": drivers[1]}


def _old_copies(store: Datastore) -> list[dict[str, str]]:
    """Return the values of TM_MAD_CONF that a datastore has and oned.conf does not."""
    applies = () if store.is_system else ("LN_TARGET", "CLONE_TARGET", "ALLOW_ORPHANS")
    found = []
    for key, value, must in TM_CONF:
        there = store.attribute(key).upper()
        if must and key in applies and there not in ("", value):
            found.append({"key": key, "there": there, "wanted": value})
    return found


MOVED = {
    "DS_MIGRATE": "moves to it from another datastore",
    "DS_LIVE_MIGRATE": "moves to it of VMs that run",
    "DS_MIGRATE_SNAP": "moves to it of VMs with disk snapshots",
}


class Moves(NamedTuple):
    """A datastore, and what oned.conf says of moves to system datastores of ours."""

    store: Datastore
    conf: Mapping[str, str]

    def differing(self) -> list[dict[str, str]]:
        """Return what differs; an oned that does not know an attribute has written none."""
        found = []
        for key, wanted in self.conf.items():
            there = self.store.attribute(key).upper() if self.store.is_system else ""
            if there not in ("", wanted):
                found.append({"key": key, "there": there, "wanted": wanted, "what": MOVED[key]})
        return found


def _host_error(hooks: Sequence[View]) -> str:
    """Return what is wrong with OpenNebula's own hook for lost hosts."""
    commands = [hook.text("TEMPLATE/COMMAND") for hook in hooks]
    stock = [hook for hook, command in zip(hooks, commands) if "host_error" in command]
    arguments = [hook.text("TEMPLATE/ARGUMENTS").split() for hook in stock]
    if any({"-r", "--recreate", "-d", "--delete"} & set(words) for words in arguments):
        return f"removes VMs, disks of {DRIVER} too"
    is_ours = any(f"{DRIVER} failover" in command for command in commands)
    return f"passes over all VMs of {DRIVER}" if arguments and not is_ours else ""


class Hooks(NamedTuple):
    """The hooks that are registered, and whether the process runs that starts them."""

    hooks: Sequence[View]
    has_manager: bool

    def never(self) -> str:
        """Return the names of ours that nothing starts, as words."""
        ours = [hook for hook in self.hooks if DRIVER in hook.text("TEMPLATE/COMMAND")]
        return "" if self.has_manager else ", ".join(hook.text("NAME") or hook.text("ID") for hook in ours)


class Published(NamedTuple):
    """The timer that publishes where disks are, and for how many seconds VMs wait for it."""

    timer: str
    """Its name."""
    is_there: bool
    stopped: bool
    """Whether systemd says that it does not run."""
    late: Sequence[float]

    def waiting(self) -> dict[str, object]:
        why, mend = "there is no timer that publishes", "as root: ./install.sh --detach-timer"
        if self.is_there:
            why, mend = (
                "its timer does not run, or fails",
                f"as root: journalctl -u {self.timer}, or cron's log",
            )
        found = {"count": len(self.late), "minutes": int(max(self.late, default=0)) // 60}
        return {**found, "it": why, "mend": mend} if self.late else {}


CLOUD: dict[str, Judge] = {
    "hook-manager": lambda hooks: hooks.never(),
    "timer-started": lambda published: published.stopped and {"timer": published.timer},
    "timer-runs": lambda published: published.waiting(),
    "datastores": _kinds_lacking,
    "datastore-attributes": _datastore_problems,
    "drivers": _half_ours,
    "tm-conf": _old_copies,
    "ds-moves": lambda moves: moves.differing(),
    "image-attributes": lambda image: _problems("image", image),
    "host-attributes": lambda host: _problems("host", host),
    "host-error": _host_error,
    "shareable": lambda image: image.attribute("PERSISTENT_TYPE").upper() == "SHAREABLE",
    "stock-images": lambda images: [{"id": image.id, "name": image.name} for image in images],
    "stock-conf-refused": lambda said: list(said.refused),
    "stock-conf-vain": lambda said: list(said.in_vain),
    "leftovers": lambda left: left[0] and {"count": left[0], "size": left[1]},
    "damaged": lambda damaged: [{"machine": machine, "it": text} for machine, text in damaged],
    "unseen": lambda errors: [{"machine": error["machine"], "it": error["error"]} for error in errors],
}


def _are_near(system: Datastore, image: Image, cloud: Cloud) -> bool:
    """Tell whether VMs with an image may come to a system datastore of ours."""
    return any(store.id == image.store_id and compatible.is_sent(store, system) for store in cloud.datastores)


def of_cloud(cloud: Cloud, front_end: str) -> list[Finding]:
    """Judge datastores, images, hosts by their attributes in OpenNebula, and the hook for lost hosts."""
    found = judged("cloud", CLOUD, cloud, front_end)
    for store in cloud.datastores:
        name, update = f"datastore {store.id} ({store.name})", f"onedatastore update {store.id}"
        found += judged("datastore", CLOUD, store, front_end, name=name, update=update)
        found += judged("moves", CLOUD, Moves(store, cloud.moves), front_end, name=name, update=update)
    names = {image.id: f"image {image.id} ({image.name})" for image in cloud.images}
    for image in cloud.images:
        found += judged("image", CLOUD, image, front_end, name=names[image.id], id=image.id)
    for host in cloud.hosts:
        found += judged("host", CLOUD, host, host.name)
    found += judged("hooks", CLOUD, cloud.hooks, front_end)
    for image in cloud.images:
        # Without a datastore oned takes the default one of the cluster.
        near = {store.id for store in cloud.datastores if store.is_system and _are_near(store, image, cloud)}
        system = min(near, default="DATASTORE")
        found += judged("scheduled", CLOUD, image, front_end, name=names[image.id], system=system)
    return found


def of_hooks(hooks: Sequence[View], has_manager: bool, front_end: str) -> list[Finding]:
    """Judge whether hooks of ours are started, which oned itself does not do."""
    return judged("started", CLOUD, Hooks(hooks, has_manager), front_end)


def of_published(published: Published, front_end: str) -> list[Finding]:
    """Judge whether a timer publishes what has changed."""
    return judged("published!", CLOUD, published, front_end)


class Lost(NamedTuple):
    """Attributes that a datastore has lost."""

    names: frozenset[str]

    def which(self, decide: bool) -> str:
        """Return those that decide which store it is, or the others, as words."""
        return ", ".join(sorted(name for name in self.names if (name in rows.WHICH) == decide))


LOST: dict[str, Judge] = {
    "lost-store": lambda lost: lost.which(True),
    "lost-words": lambda lost: lost.which(False),
}


def of_lost(found: Iterable[tuple[Datastore, Mapping[str, str]]], front_end: str) -> list[Finding]:
    """Judge datastores by the attributes that they have lost (front/noted_datastores.py)."""
    findings: list[Finding] = []
    for store, lost in found:
        facts, name = Lost(frozenset(lost)), f"datastore {store.id} ({store.name})"
        findings += judged("lost!", LOST, facts, front_end, name=name)
    return findings


def of_stock_conf(said: object, front_end: str) -> list[Finding]:
    """Judge what the site's files for stock drivers say (front/stock_conf.Doubts)."""
    return judged("stock-conf", CLOUD, said, front_end)


def of_stock_images(found: Sequence[Image], front_end: str) -> list[Finding]:
    """Judge images whose content is in layers of a stock driver."""
    return judged("stock", CLOUD, found, front_end)


def of_leftovers(count: int, size: str, front_end: str) -> list[Finding]:
    """Judge what gc has found."""
    return judged("leftovers", CLOUD, (count, size), front_end)


def of_damaged(found: Iterable[tuple[str, str]]) -> list[Finding]:
    """Judge unreadable parts of disks: machine, and which and why."""
    return judged("damaged", CLOUD, found, "")


def of_unseen(
    errors: Sequence[Mapping[str, str]], reached: Container[str], others: Sequence[Finding]
) -> list[Finding]:
    """Judge what gc could not read on machines that were reached and have no finding among `others`."""
    broken = {item.machine for item in others if item.severity == BROKEN}
    known = [error for error in errors if error["machine"] in reached and error["machine"] not in broken]
    return judged("unseen", CLOUD, known, "")


def path_of(store: Datastore) -> str:
    """Return the directory of a datastore, '' if it is none."""
    try:
        return absolute(store.base_path, "BASE_PATH")
    except SemisharedError:
        return ""


class Fenced(NamedTuple):
    """The mark of a host, and its boot id if it answers."""

    mark: Mark
    boot: str = ""


class OwnKey(NamedTuple):
    """A front-end's answer about its key for marks of fences, or why there is none; and our own."""

    said: Union[Mapping[str, Any], str]
    own: str = ""

    def get(self, name: str) -> Any:
        """Return what it says of this."""
        return "" if isinstance(self.said, str) else self.said.get(name)


FENCE: dict[str, Judge] = {
    "mark": lambda it: it.mark.strange,
    "fence-unproved": lambda it: it.mark.state == BEGUN and not it.boot and not it.mark.shut_nothing_out,
    "fence-void": lambda it: it.mark.state == BEGUN and it.mark.shut_nothing_out,
    "fenced-runs": lambda it: it.boot and it.boot == it.mark.boot,
    "fenced-back": lambda it: it.boot,
    "fence-command": lambda why: why,
    "fence-key": lambda why: why,
    "key-said": lambda it: isinstance(it.said, str) and it.said,
    "key-there": lambda it: it.get("why_not"),
    "key-same": lambda it: not isinstance(it.said, str) and it.own and it.get("code") != it.own,
    "key-place": lambda it: re.match(NETWORK, str(it.get("on"))) and str(it.get("on")),
}


def of_fenced(marks: Mapping[str, Mark], boots: Mapping[str, str]) -> list[Finding]:
    """Judge the marks of hosts; `boots`: the boot ids of hosts that answer."""
    found = []
    for host, mark in marks.items():
        facts = Fenced(mark, boots.get(host, ""))
        found += judged("mark", FENCE, facts, host)
        found += judged("fenced!", FENCE, facts, host) if mark.stands else []
    return found


def of_means(command: str, keys: Mapping[str, str], front_end: str) -> list[Finding]:
    """Judge the means of fencing.

    `command`: why the fencing command cannot be run, '' if it can or there is none; `keys`: why the key of a
    datastore is not good.
    """
    found = judged("means", FENCE, command, front_end)
    for name, why in keys.items():
        found += judged("shutting-out", FENCE, why, front_end, name=name)
    return found


def of_keys(answers: Mapping[str, Union[Mapping[str, Any], str]], front_end: str, path: str) -> list[Finding]:
    """Judge the keys of front-ends: each one's answer about its own, or why there is none."""
    found, here = [], answers.get(front_end, {})
    own = "" if isinstance(here, str) else here.get("code", "")
    for machine, said in answers.items():
        mend = f"as oneadmin on {front_end}: scp -p {path} {machine}:{path}"
        if machine == front_end:
            mend = f"if it is there: chown oneadmin: and chmod 600; else as oneadmin: {DRIVER} setup --key"
        for of in ("key!", "key-place"):
            facts = OwnKey(said, own)
            found += judged(of, FENCE, facts, machine, path=path, front_end=front_end, mend=mend)
    return found


POOL: dict[str, Judge] = {
    f"pool-{kind}": lambda wrong, kind=kind: wrong.kind == kind and wrong.text  # type: ignore[misc]
    for kind in choose.KINDS
}


def of_pool(wrong: Iterable[choose.Wrong], host: str) -> list[Finding]:
    """Judge a host's pool by the differences found in it."""
    return [finding for one in wrong for finding in judged("pool", POOL, one, host)]
