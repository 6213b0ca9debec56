# SPDX-License-Identifier: Apache-2.0
"""Look at the whole installation and say what is wrong, each with the command that mends it.

It looks at oned.conf and vmm_execrc, the forwarders, datastores and attributes in OpenNebula, and asks the
front-end and all hosts at once: programs and their versions, whether they are synced, libvirt, whether each
reaches each store with the right rights, the local disk, what shares need; and what killed actions left over.
It changes nothing, but with --fix: then it shows the attributes that datastores of ours have lost, as by
Update in Sunstone, and puts them back before it looks. A dead host costs seconds.

What waits for an operator, as `semishared attention` lists it, is among its warnings and in its exit code.

exit codes: 0 all is well, 1 there are warnings, 2 something is broken
"""

from __future__ import annotations

import argparse
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterator, Mapping, Sequence, TypeVar

from .. import NAME
from ..config import NONE, Config, load
from ..errors import BadArguments, CannotInstall, HostUnreachable, SemisharedError
from ..front import fence_facts, noted_datastores, stock_conf, vm_notes
from ..front.action import BY_SIZE
from ..front.fence_facts import Marks
from ..front.stores import is_stock
from ..guest.virsh import Site as Libvirt
from ..install import edits, examine, timer
from ..install.front_end import FrontEnd, locate
from ..install.preflight import Question, encoded, limited
from ..install.tree import forwarder, is_action
from ..model.attributes import HOST_POOL
from ..model.device.steps import ListDevices, PoolDevice
from ..model.share import share
from ..model.share.steps import LookAtRoot, LookAtShareHost, SeenShareHost
from ..model.store import template
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host, Image
from ..plan.care import diagnosis as plan
from ..plan.care.attention import Item
from ..plan.care.diagnosis_front_ends import of_front_ends
from ..plan.care.diagnosis_machines import Answers, of_machines
from ..plan.care.diagnosis_scheduler import of_scheduler
from ..plan.care.diagnosis_shares import Made, of_hosts, of_roots, ways
from ..plan.care.fence import Mark
from ..plan.care.gc import aged, find
from ..plan.device import choose
from ..tools.this_machine import are_one, is_here, runs
from ..units import human
from ..wire.session import Session
from . import attention, doctor_fix, explain, gc, same_directories
from . import command as on
from .command import Row, argument, flag, put, put_json
from .pool import declaration
from .setup import key_findings

ARGUMENTS = (
    on.JSON,
    flag("--fix", "put back the attributes that datastores of ours have lost"),
    flag("--yes", "--fix: do not ask (without a terminal nothing is asked anyway)"),
    flag("--dry-run", "--fix: say what would be put back, and put nothing back"),
    argument("--root", metavar="DIR", default="", help="an OpenNebula whose files are below this directory"),
)


HOOK_MANAGER = "onehem-server.rb"
"""The script of opennebula-hem, which starts hooks when oned tells it of events."""


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared doctor`."""
    on.refuse_root(": what root can reach says nothing of the drivers")
    if (arguments.yes or arguments.dry_run) and not arguments.fix:
        raise BadArguments("--yes and --dry-run are for --fix")
    if arguments.fix:
        doctor_fix.put_back(arguments)
    place = located(arguments.root)
    config, wrong = _config()
    cloud, no_oned = _cloud(_of_oned_conf(place, edits.moves, {}))
    front_end = on.front_end_of(cloud.hosts)
    wrong, name = wrong or _scripts(place, config), _of_oned_conf(place, edits.hostname, "")
    lost_name = "" if not name or is_here(name) else name
    site = look_at_site(place, front_end)._replace(conf=wrong, oned=no_oned, lost_name=lost_name)
    lost, unreadable = _lost(cloud)
    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(leftovers_found, config, bool(no_oned))
        waits = pool.submit(waiting, config, bool(no_oned))
        answers = ask_all(place, cloud, front_end, config)
        count, size, unseen, damaged = left.result()
    findings = [
        *plan.of_site(site),
        *(plan.of_cloud(cloud, front_end) if not no_oned else []),
        *plan.of_hooks(cloud.hooks, runs(HOOK_MANAGER), front_end),
        *plan.of_published(published(arguments.root), front_end),
        *of_scheduler([*cloud.datastores, *cloud.others], front_end),
        *plan.of_lost(lost, front_end),
        *of_machines(answers, site, cloud, (config.bases_size_limit, config.bases_free_floor)),
        *plan.of_bulk(cloud.hosts, "" if config.network_bulk == NONE else config.network_bulk),
        *plan.of_stock_images(stock_images(cloud), front_end),
        *plan.of_stock_conf(stock_doubts(place, cloud, config), front_end),
        *plan.of_leftovers(count, size, front_end),
        *plan.of_damaged([*damaged, *((front_end, why) for why in unreadable)]),
        *fence_findings(cloud, answers, config, front_end),
        *(front_end_findings(place, cloud, answers, config, front_end) if not no_oned else []),
        *pool_findings(cloud, config),
        *share_findings(cloud, answers, config, front_end),
        *waits.result(),
    ]
    findings += plan.of_unseen(unseen, _said(answers), findings)
    findings.sort(key=lambda item: (-item.severity, item.machine != front_end, item.machine))
    worst = max((item.severity for item in findings), default=plan.OK)
    rows = {machine: machine_row(answer) for machine, answer in answers.items()}
    if arguments.json:
        said = [
            {"host": item.machine, **item._asdict(), "severity": plan.WORDS[item.severity]}
            for item in findings
        ]
        put_json({"result": plan.WORDS[worst], "findings": said, "machines": rows})
    else:
        show(findings, rows)
    return worst


def show(findings: list[plan.Finding], rows: dict[str, dict[str, str]]) -> None:
    """Print a table of versions, and the findings with their remedies."""
    names = list(next(filter(None, rows.values()), {}))
    lines = [[machine, *(row.get(name) or "-" for name in names)] for machine, row in rows.items()]
    on.table("|".join(["", *names]), lines)
    put()
    for item in findings:
        put(f"{plan.WORDS[item.severity]:8}{item.machine}: {item.what}")
        put(f"{'':8}-> {item.mend}")
    broken, warnings = (sum(item.severity == it for item in findings) for it in (plan.BROKEN, plan.WARNING))
    if explain.place() and any(explain.PAGE.search(item.mend) for item in findings):
        put(f"pages are in {explain.place()}; `{NAME} explain PAGE` prints one")
    put(f"{len(rows)} machines: {f'{broken} broken, {warnings} warnings' if findings else 'all is well'}")


def waiting(config: Config, no_oned: bool) -> list[plan.Finding]:
    """Return what waits for an operator, but for what other checks find."""
    none: list[Item] = []
    found = none if no_oned else _unless_wrong(lambda: attention.for_doctor(Oned(), config), none)
    return [plan.Finding(item.severity, item.machine, item.what, item.command) for item in found]


def _said(answers: Answers) -> dict[str, Row]:
    """Return the answers of machines that have answered."""
    return {machine: answer for machine, answer in answers.items() if isinstance(answer, dict)}


def located(root: str) -> FrontEnd:
    """Return OpenNebula's place: around the running package, if that is installed."""
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
    wanted = _of_oned_conf(place, edits.scripts_dir, "")
    if wanted in ("", config.hosts_scripts_dir):
        return ""
    said = f"semishared.conf: scripts_dir = {config.hosts_scripts_dir}"
    return f"{said}, but hosts have OpenNebula's scripts in {wanted} (oned.conf)"


def stock_doubts(place: FrontEnd, cloud: plan.Cloud, config: Config) -> stock_conf.Doubts:
    """Return what to say of the files that OpenNebula's own drivers read."""
    tmrc = f"{place.etc}/tmrc" if place.etc and config.overlays_options == BY_SIZE else os.devnull
    return stock_conf.doubts(f"{place.remotes}/etc/datastore", tmrc, cloud.datastores, cloud.others)


Found = TypeVar("Found")


def _unless_wrong(look: Callable[[], Found], otherwise: Found) -> Found:
    """Return what `look` does; `otherwise` if it raises, which is a finding of its own."""
    try:
        return look()
    except SemisharedError:
        return otherwise


def published(root: str) -> plan.Published:
    """Return whether the timer of `publish --due` is there and started, and what waits for it."""
    try:
        late = vm_notes.late()
    except OSError:
        late = []  # they are another user's: what doctor is run as, `refuse_root` has looked at
    return plan.Published(timer.NAMED, timer.publishes(root), timer.is_stopped(root), late)


def _of_oned_conf(place: FrontEnd, said: Callable[[str, str], Found], otherwise: Found) -> Found:
    """Return what oned.conf says, `otherwise` if it is unreadable."""
    if place.etc is None:
        return otherwise
    return _unless_wrong(lambda: said(edits.read(place.oned_conf), place.oned_conf), otherwise)


def _cloud(moves: Mapping[str, str] = {}) -> tuple[plan.Cloud, str]:
    try:
        oned = Oned()
        all_stores = oned.datastores()
        datastores = on.ours(all_stores)
        numbers = {store.id for store in datastores}
        others = [store for store in all_stores if store.id not in numbers]
        images = [image for image in oned.images() if image.store_id in numbers]
        hosts = [host for host in oned.hosts() if not host.is_offline and host.is_near(datastores)]
        return plan.Cloud(datastores, images, hosts, oned.hooks(), others, moves), ""
    except SemisharedError as e:
        return plan.Cloud(), e.detail


def _lost(cloud: plan.Cloud) -> tuple[list[tuple[Datastore, dict[str, str]]], list[str]]:
    """Return what datastores have lost, and why notes of them cannot be read."""
    found, unreadable = [], []
    for store in cloud.datastores:
        try:
            found.append((store, noted_datastores.lost(store)))
        except SemisharedError as e:
            unreadable.append(e.detail)
    return found, unreadable


def look_at_site(place: FrontEnd, front_end: str) -> plan.Site:
    """Return the facts in the front-end's files."""
    site = plan.Site(front_end, forwarders=tuple(_forwarders(place)))
    if place.etc is None:
        return site._replace(unreadable="there is no oned.conf beside this remotes directory")
    ours = f"{place.remotes}/vmm/{NAME}"
    own = [name for name in _names(ours) if name not in edits.NO_ACTIONS and not _is_forwarder(ours, name)]
    try:
        items = edits.to_install(place, own)
        changes = [f"{item.path}: {change}" for item in items for change in item.changed.changes]
    except CannotInstall as e:
        return site._replace(unreadable=e.detail)
    except SemisharedError as e:
        return site._replace(changes=(e.detail,))
    return site._replace(changes=tuple(changes), restart_due=_restart_due(place))


def _restart_due(place: FrontEnd) -> bool:
    """Tell whether oned.conf is newer than oned's note of it at its start."""
    noted = f"{os.path.dirname(place.remotes)}/config"
    try:
        return os.stat(place.oned_conf).st_mtime > os.stat(noted).st_mtime
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
    """Yield forwarders without an action of OpenNebula, and actions without a forwarder."""
    ours, stock = f"{place.remotes}/vmm/{NAME}", f"{place.remotes}/vmm/kvm"
    there = set(_names(ours))
    for name in _names(stock):
        if name not in there and is_action(f"{stock}/{name}"):
            yield f"{name} of this OpenNebula is not handed over to"
    for name in sorted(there - set(_names(stock))):
        if _is_forwarder(ours, name):
            yield f"{name} hands over to a script that OpenNebula does not have"


def ask_all(place: FrontEnd, cloud: plan.Cloud, front_end: str, config: Config) -> Answers:
    """Ask the front-end and all hosts at once."""
    mounted, ceph, own = [], [], []
    for store in cloud.datastores:
        try:
            if template.is_shares(store) or store.is_system:
                continue
            access, machine = template.access(store), template.machine(store, 0)
            if not machine and template.bridges(store):
                continue  # the front-end need not mount it; each action looks for its marker
            if not machine:
                mounted.append(absolute(store.base_path, "BASE_PATH"))
                continue
            pool = template.pool(store)
            ceph.append((pool, access.reader, access.conf, access.secret))
            if is_here(machine):
                own.append((pool, access.bridge_user, access.conf, ""))
        except SemisharedError:
            # Its attributes are a finding of their own.
            continue
    systems = [plan.path_of(store) for store in cloud.datastores if store.is_system]
    location = next(map(on.location, cloud.datastores), "")
    libvirt = Libvirt.read(f"{place.remotes}/etc/vmm/kvm/kvmrc").uri
    hosts, connect_s = [host.name for host in cloud.hosts], config.hosts_connect_timeout_s
    with same_directories.tokens(mounted) as token:
        base = Question(
            ("host",),
            config.hosts_scripts_dir,
            location,
            tuple(mounted),
            token,
            libvirt,
            tuple(ceph),
            tuple(filter(None, systems)),
            True,
        )

        def one(machine: str) -> Row | str:
            question = base
            if machine == front_end:
                question = base._replace(
                    roles=("front-end", "host") if machine in hosts else ("front-end",),
                    scripts=place.remotes,
                    ceph=tuple(own),
                    libvirt=libvirt if machine in hosts else "",
                )
            try:
                return examine.examine(machine, encoded(question), connect_s)
            except HostUnreachable as e:
                return f"does not answer: {e.detail}"

        asked = on.at_once("doctor: machines", list(dict.fromkeys([front_end, *hosts])), one)
        return {name: found.detail if isinstance(found, SemisharedError) else found for name, found in asked}


def machine_row(answer: Row | str) -> dict[str, str]:
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


def stock_images(cloud: plan.Cloud) -> list[Image]:
    """Return images in mounted stores that are in layers of a stock driver; none if the store hangs."""
    found: list[Image] = []

    def look() -> None:
        for image in cloud.images:
            with contextlib.suppress(OSError, SemisharedError):  # of what is not readable others speak
                if is_stock(image):
                    found.append(image)

    limited(look)
    return list(found)


def front_end_findings(
    place: FrontEnd, cloud: plan.Cloud, answers: Answers, config: Config, front_end: str
) -> list[plan.Finding]:
    """Return what the other front-ends of an HA group lack of what each needs that may lead."""
    systems = [store for store in cloud.datastores if store.is_system]
    others: Answers = _unless_wrong(
        lambda: same_directories.of_front_ends(Oned(), systems, config, place.remotes), {}
    )
    own = _said(answers).get(front_end, {}).get("tree", {}).get("parts", {})
    apart = {
        machine: [plan.path_of(store) for store in same_directories.apart(said, systems)]
        for machine, said in _said(others).items()
    }
    return of_front_ends(others, own, apart, front_end)


def pool_findings(cloud: plan.Cloud, config: Config) -> list[plan.Finding]:
    """Return how the pools of hosts differ from their declarations."""
    by_default = config.pool_devices != "none"
    wanted = [host for host in cloud.hosts if by_default or HOST_POOL.text(host)]
    if not wanted:
        return []
    roots = on.roots(on.ours(Oned().datastores()))

    def one(session: Session, host: Host) -> list[choose.Wrong]:
        found: list[PoolDevice] = []
        for root in roots:
            found += session.ask(ListDevices(root)).devices
        unreserved = choose.unreserved(found, host.reserved_memory)
        declared: tuple[choose.Declared, ...] = _unless_wrong(
            lambda: declaration(host, config.pool_devices), ()
        )
        return choose.differences(declared, found) + unreserved

    # A host that does not answer is a finding of others.
    answers = on.Survey().ask(wanted, "doctor", config, one)
    return [finding for host, found in answers.items() for finding in plan.of_pool(found, host)]


def share_findings(cloud: plan.Cloud, answers: Answers, config: Config, front_end: str) -> list[plan.Finding]:
    """Return what is wrong with shares, where a datastore has any."""
    stores, said = filter(template.is_shares, cloud.datastores), _said(answers)
    made = [one for store in stores for one in _made_shares(store, cloud, config, front_end)]
    sudo = {machine: answer["programs"].get("sudo") or "" for machine, answer in said.items()}
    made = [one._replace(sudo=sudo.get(one.machine, "")) for one in made]
    roots = tuple(sorted({one.tree.root for one in made if one.tree.marker and one.by_hosts}))
    if not roots:
        return of_roots(made, front_end)

    def one(session: Session, _: Host) -> SeenShareHost:
        return session.ask(LookAtShareHost(roots))

    # A host that does not answer is a finding of others.
    seen = on.Survey().ask([host for host in cloud.hosts if not host.is_offline], "doctor", config, one)
    return [*of_roots(made, front_end), *of_hosts(made, seen, said)]


def _made_shares(store: Datastore, cloud: plan.Cloud, config: Config, front_end: str) -> list[Made]:
    """Return the facts of the machine that makes a datastore's shares, none if attributes are wrong."""
    try:
        tree, machine = share.tree(store), share.bridge(store)
    except SemisharedError:
        return []
    machine = front_end if is_here(machine) else _named(machine, cloud)
    if not tree.marker:
        return [Made(store, tree, machine)]
    by_hosts, by_clients = ways(store, cloud.images)
    images = [image for image in cloud.images if image.store_id == store.id]
    step = LookAtRoot(tree, by_clients, tuple(image.id for image in images))
    found = Made(store, tree, machine, by_hosts=by_hosts)
    try:
        answer = on.ask(machine, "doctor", config, step)
    except SemisharedError as e:
        return [found._replace(wrong=e.detail, mend=e.remedy)]
    said = {name: value for name, value in answer._asdict().items() if name != "cloud"}
    return [found._replace(has_cloud=bool(answer.cloud), images=images, **said)]


def _named(machine: str, cloud: plan.Cloud) -> str:
    """Return the host name, in OpenNebula, of a machine of BRIDGE_LIST, if it is a host there."""
    names = [host.name for host in cloud.hosts]
    return machine if machine in names else next((name for name in names if are_one(name, machine)), machine)


def fence_findings(cloud: plan.Cloud, answers: Answers, config: Config, front_end: str) -> list[plan.Finding]:
    """Return what is wrong with fencing, where a key or a command was set up."""
    boots = {machine: str(answer.get("boot", "")) for machine, answer in _said(answers).items()}
    pools = [store for store in cloud.datastores if not store.is_system and _names_key(store)]
    keys = {str(group[0].id): _why_not(group) for group in fence_facts.clusters(pools)}
    own = key_findings(front_end, config.hosts_connect_timeout_s)
    marks: dict[str, Mark] = _unless_wrong(lambda: Marks(Oned()).of_all(cloud.hosts), {})
    program = next(iter(config.fencing), "")
    runs = not program or os.access(program, os.X_OK)
    not_run = "" if runs else f"{program} is not there, or not to be executed"
    return [*own, *plan.of_fenced(marks, boots), *plan.of_means(not_run, keys, front_end)]


def _names_key(store: Datastore) -> bool:
    return _unless_wrong(lambda: bool(template.access(store).user and template.fence_user(store)), False)


def _why_not(datastores: Sequence[Datastore]) -> str:
    try:
        fence_facts.try_key(datastores)
    except SemisharedError as e:
        return e.detail
    return ""


OLD_S = 3600
"""Seconds: younger things may belong to an action that is under way."""


Leftovers = tuple[int, str, list[dict[str, str]], list[tuple[str, str]]]


def leftovers_found(config: Config, no_oned: bool) -> Leftovers:
    """Return the count and size of what gc would remove; errors and damage as (machine, what)."""
    survey = None if no_oned else _unless_wrong(lambda: gc.survey_cloud(Oned(), config), None)
    if survey is None:
        return 0, "", [], []
    found = find(survey.machines, survey.known, OLD_S, not survey.errors)
    found += aged(gc.elsewhere(survey, config), OLD_S)[0]
    left = [item.bytes for item in found if not item.keep]
    damaged = [(it.name, text) for it in survey.machines for text in it.facts.unreadable]
    return len(left), human(sum(left)), survey.errors, damaged
