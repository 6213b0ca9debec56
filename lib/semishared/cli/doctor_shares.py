# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that looks after directories for guests: only where a datastore has
them.
"""

from __future__ import annotations

from typing import Any

from ..config import Config
from ..errors import SemisharedError
from ..model import shares, stores
from ..model.steps_share import LookAtRoot, LookAtShareHost
from ..opennebula.xml import Datastore, Host
from ..plan.diagnosis import Cloud, Finding
from ..plan.diagnosis_machines import Answers
from ..plan.diagnosis_shares import Made, of_hosts, of_roots, ways
from ..tools.this_machine import are_one, is_here
from ..wire.session import Session
from . import hosts as on


def findings(cloud: Cloud, answers: Answers, config: Config, front_end: str) -> list[Finding]:
    """Return what is wrong."""
    made = [
        one
        for store in cloud.datastores
        if stores.is_shares(store)
        for one in _made(store, cloud, config, front_end)
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


def _made(store: Datastore, cloud: Cloud, config: Config, front_end: str) -> list[Made]:
    """Return what the machine says that makes the shares of a datastore, nothing if its attributes, a finding
    of their own, are wrong.
    """
    try:
        tree, machine = shares.tree(store), shares.bridge(store)
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
