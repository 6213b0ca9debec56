# SPDX-License-Identifier: Apache-2.0
"""Make the two datastores of semishared: one for images, of kind dir (a mounted tree) or rbd (Ceph), and a
system datastore.

Without --apply nothing is made: their templates are printed, for `onedatastore create FILE`, and what to
click in Sunstone instead. Attributes are checked first; an unknown SEMISHARED_ one is an error. Run again it
finds what is there already, also under another name, if no other datastore of semishared is of that type; if
there are several, --image and --system say which is meant.

With --apply a mounted store is marked too, once it is in its place: from then on every action refuses a
directory without that marker. It is in its place if oned's images are in it; without any, if something is
mounted there (or --is-store).

So that the scheduler sends VMs only to where oned deploys them, COMPATIBLE_SYS_DS of our image datastores
names our system datastores; with --stock-compatible, that of other drivers' image datastores names those that
take their images. A choice that is there stays.

The key by which front-ends know their own marks of fences is made beside one_auth, if no other front-end of
the zone has one.

It asks all hosts that oned knows then, whether the system datastore is a directory of each machine's own.

exit codes: 0 printed or made, 1 an attribute is wrong, or another datastore has the name, or it might be one
of several, or what was made lies in one directory on several machines, or the key could not be made, 2 oned
could not be asked
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Sequence

from .. import NAME
from ..errors import BadArguments, BadAttribute, NoKey, OnedUnavailable, SemisharedError
from ..front import front_ends, noted_datastores
from ..front.stores import Marked, mark
from ..install import examine
from ..install.oned_conf import quoted
from ..install.preflight import Question, encoded
from ..model.attributes import COMPATIBLE, STORE
from ..model.store import access
from ..model.store import template as store_template
from ..named import NamedTuple
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..opennebula.states import DatastoreType
from ..opennebula.xml import Datastore
from ..plan.care import compatible
from ..plan.care.compatible import Change
from ..plan.care.diagnosis import Finding, of_keys, path_of
from ..plan.care.diagnosis_machines import of_shared
from ..plan.image import attributes as known
from ..tools import key
from ..tools.files import write
from ..tools.this_machine import is_here
from . import command as on
from .command import argument, flag, put, put_all, warn

CONNECT_S = 10


def key_made(oned: Oned) -> list[str]:
    """Make the key if there is none, and return what is left to do for the other front-ends; raise NoKey.

    Another front-end that has one already, or that cannot say, keeps this one from making a second.

    All front-ends of an HA group have one key.
    """
    why = key.look(oned.key)[1]
    if why != key.MISSING:
        if why:
            raise NoKey(f"{oned.key} {why}")
        return []
    others = front_ends.others(oned)
    for machine, said in _asked(oned.key, others, CONNECT_S).items():
        if isinstance(said, str):
            which = f"{machine}, a front-end of this zone too,"
            raise NoKey(f"{oned.key} {why}, and {which} does not say whether it has one: {said}")
        if said["why_not"] != key.MISSING:
            raise NoKey(f"{oned.key} {why}, and {machine} has one: scp -p {machine}:{oned.key} {oned.key}")
    key.make(oned.key)
    copies = [f"scp -p {oned.key} {machine}:{oned.key}" for machine in others]
    return [f"made {oned.key}", *(f"each front-end needs the same: {copy}" for copy in copies)]


def is_key_made(oned: Oned) -> bool:
    """Make the key if there is none, tell whether there is one then, and say on stderr what is left to do."""
    try:
        said = key_made(oned)
    except NoKey as e:
        warn(f"{NAME} setup: {printable(e.line())}")
        return False
    for line in said:
        warn(f"{NAME} setup: {line}")
    return True


def key_findings(front_end: str, connect_s: int) -> list[Finding]:
    """Return what is wrong with the key here and on the other front-ends, as far as they can be asked."""
    try:
        oned = Oned()
        others = front_ends.others(oned)
    except SemisharedError:
        return []  # oned is a finding of its own
    return of_keys(_asked(oned.key, [front_end, *others], connect_s), front_end, oned.key)


def _asked(path: str, machines: Sequence[str], connect_s: int) -> dict[str, dict[str, Any] | str]:
    """Return what each machine says of its key, or why it says nothing."""
    question = encoded(Question(roles=(), key=(path, os.urandom(16).hex())))
    said = examined(machines, question, connect_s)
    for machine, answer in said.items():
        if isinstance(answer, dict):
            its = answer.get("key")
            said[machine] = its if isinstance(its, dict) else "its answer makes no sense"
    return said


def examined(
    machines: Sequence[str], question: str, connect_s: int = CONNECT_S
) -> dict[str, dict[str, Any] | str]:
    """Return what each machine answers, or why it does not."""

    def one(machine: str) -> dict[str, Any]:
        return examine.examine(machine, question, connect_s)

    answers = on.at_once("setup: machines", machines, one)
    return {name: found.detail if isinstance(found, SemisharedError) else found for name, found in answers}


DIR, IMAGE, SYSTEM = "dir", "semi_img", "semi_sys"
"""What is made if nothing else is said, and nothing is there."""
SYSTEM_TYPE, IMAGE_TYPE = "SYSTEM_DS", "IMAGE_DS"
HOLDER = {IMAGE_TYPE: "image datastore", SYSTEM_TYPE: "system datastore"}
OURS = ("NAME", "TYPE", "DS_MAD", "TM_MAD")


class Template(NamedTuple):
    """A datastore to be made: its attributes in order."""

    attributes: dict[str, str]

    @property
    def name(self) -> str:
        return self.attributes["NAME"]

    @property
    def type(self) -> str:
        return self.attributes["TYPE"]

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """Return the attributes that do not make it a datastore of ours."""
        return [(name, value) for name, value in self.attributes.items() if name not in OURS]

    def text(self) -> str:
        """Return it as `onedatastore create` reads it."""
        return "".join(f"{name} = {quoted(value)}\n" for name, value in self.attributes.items())


def _set(name: str, text: str) -> on.Argument:
    return argument(name, metavar="NAME=VALUE", action="append", default=[], help=text)


THERE = "(the one that is there, else"
ARGUMENTS = (
    argument("--kind", choices=sorted(access.KINDS), help=f"of the image store {THERE} {DIR})"),
    argument("--image", metavar="NAME", help=f"name of the image datastore {THERE} {IMAGE})"),
    argument("--system", metavar="NAME", help=f"name of the system datastore {THERE} {SYSTEM})"),
    _set("--set", "an attribute of the image datastore"),
    _set("--set-system", "one of the system datastore"),
    flag("--apply", "make them in OpenNebula", one_of="how"),
    flag(
        "--is-store",
        "mark the store though nothing is mounted there: this machine exports it, or is the only one",
    ),
    flag(
        "--stock-compatible",
        "COMPATIBLE_SYS_DS of other drivers' image datastores too: print it; write it with --apply",
    ),
    argument("--out", metavar="DIR", help="write the templates to files in DIR", one_of="how"),
    flag(
        "--key",
        "make this front-end's key for marks of fences, as --apply does, and nothing else",
        one_of="how",
    ),
    on.JSON,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared setup`."""
    if arguments.key and arguments.json:
        raise BadArguments("--key prints lines: it has no --json")
    if arguments.key:
        for line in key_made(Oned()):
            put(line)
        return 0
    try:
        templates = wanted(arguments)
        wrong = [
            f"{template.name}: {text}"
            for template in templates
            for text in known.problems(HOLDER[template.type], template.attributes)
        ]
        if arguments.apply and not wrong:
            take_what_is_there(arguments, Oned().datastores())
            templates = wanted(arguments)
    except (BadArguments, BadAttribute) as e:
        wrong, templates = [e.detail], []
    if arguments.is_store and (not arguments.apply or not access.KINDS[arguments.kind or DIR].is_mounted):
        raise BadArguments("--is-store is for --apply, and for a store that is mounted")
    if wrong:
        return refused(*wrong)
    made: dict[str, int] = {}
    marked, has_key = Marked(), not arguments.apply or is_key_made(Oned())
    if arguments.apply:
        why = apply(templates, made)
        if why:
            return refused(why)
        try:
            marked = mark_store(made[templates[0].name], arguments.is_store)
        except OnedUnavailable:
            raise
        except SemisharedError as e:
            return refused(e.detail)
    found = shared(made[templates[1].name]) if arguments.apply else []
    sent = compatible_sent(arguments.apply, arguments.stock_compatible)
    if arguments.apply:
        noted_datastores.note_all(Oned().datastores())
    files = {}
    if arguments.out:
        os.makedirs(arguments.out, exist_ok=True)
        for template in templates:
            files[template.name] = os.path.join(os.path.abspath(arguments.out), f"{template.name}.ds")
            write(files[template.name], template.text().encode())
    if arguments.json:
        rows = [{**template.attributes, "ID": made.get(template.name)} for template in templates]
        answer = {"datastores": rows, "files": files, "store": marked.store, "not_marked": marked.why_not}
        on.put_json({**answer, "shared": [item.what for item in found], "compatible": sent.rows()})
    else:
        show(templates, made, files, marked)
        if sent.text(bool(made)):
            put_all(sent.text(bool(made)))
    refused(*(f"{item.what}\n-> {item.mend}" for item in found))
    return int(bool(found) or not has_key)


def refused(*texts: str) -> int:
    """Say on stderr what is wrong; return the exit code."""
    for text in texts:
        put_all(f"{NAME} setup: {text}", to=sys.stderr)
    return 1


def wanted(arguments: argparse.Namespace) -> list[Template]:
    """Return the datastores that the arguments describe; raise BadArguments."""
    image_name, system_name = arguments.image or IMAGE, arguments.system or SYSTEM
    kind = arguments.kind or DIR
    if image_name == system_name:
        raise BadArguments(f"both datastores are called {image_name!r}")
    image = {"NAME": image_name, "TYPE": IMAGE_TYPE, "DS_MAD": NAME, "TM_MAD": NAME}
    if access.KINDS[kind].disk_type:
        image["DISK_TYPE"] = access.KINDS[kind].disk_type
    system = {"NAME": system_name, "TYPE": SYSTEM_TYPE, "TM_MAD": NAME}
    return [Template({**image, **pairs(arguments.set)}), Template({**system, **pairs(arguments.set_system)})]


def take_what_is_there(arguments: argparse.Namespace, datastores: Sequence[Datastore]) -> None:
    """Fill in the datastores of ours that are there, and the store's kind; raise BadArguments for several."""
    ours = [store for store in datastores if store.driver == NAME and not store_template.is_shares(store)]
    images = [store for store in ours if store.type == DatastoreType.IMAGE_DS]
    of_kind = [store.name for store in images if arguments.kind in (None, store_template.kind(store).name)]
    systems = [store.name for store in ours if store.is_system]
    arguments.image = arguments.image or _one(of_kind, IMAGE, "image")
    arguments.system = arguments.system or _one(systems, SYSTEM, "system")
    arguments.kind = arguments.kind or next(
        (store_template.kind(store).name for store in images if store.name == arguments.image), DIR
    )


def _one(names: Sequence[str], usual: str, what: str) -> str:
    """Return the one of these names that is meant by none."""
    if usual in names or not names:
        return usual
    if len(names) > 1:
        several = f"there are several {what} datastores of {NAME}, {', '.join(sorted(names))}"
        raise BadArguments(f"{several}: say which by --{what} NAME")
    return names[0]


def pairs(words: list[str]) -> dict[str, str]:
    """Return NAME=VALUE arguments; raise BadArguments."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().upper()
        if not equals or not known.NAME.match(name) or not value.strip() or not value.isprintable():
            raise BadArguments(f"not NAME=VALUE: {word!r}")
        if name in OURS:
            raise BadArguments(f"{name} is not to be set: it is what makes a datastore one of {NAME}")
        found[name] = value.strip()
    return found


def apply(templates: list[Template], made: dict[str, int]) -> str:
    """Make what is not there yet, and note its ids in `made`; return why not, '' if all are there now."""
    oned = Oned()
    there = {store.name: store for store in oned.datastores()}
    for template in templates:
        store = there.get(template.name)
        if store is None:
            continue
        what = f"datastore {template.name} (id {store.id})"
        if store.driver != NAME or store.type != getattr(DatastoreType, template.type):
            return f"there is a {what} of another kind: choose another name"
        other = ", ".join(name for name, value in template.chosen if store.attribute(name) != value)
        if other:
            return f"{what} is there with another {other}: onedatastore update {store.id}"
        made[template.name] = store.id
    for template in templates:
        if template.name not in made:
            made[template.name] = oned.create_datastore(template.text())
    return ""


class Sent(NamedTuple):
    """What COMPATIBLE_SYS_DS of image datastores is to be."""

    written: Sequence[Change] = ()
    left: Sequence[Change] = ()
    """Not written: they are other drivers', or nothing is applied."""

    def rows(self) -> list[on.Row]:
        """Return it as JSON data."""
        return [
            {"ID": one.store.id, "NAME": one.store.name, COMPATIBLE.name: one.value, "written": is_written}
            for changes, is_written in ((self.written, True), (self.left, False))
            for one in changes
        ]

    def text(self, is_applied: bool) -> str:
        """Return it as lines."""
        head = (
            f"The scheduler may send VMs of other drivers' images to our system datastore, where oned does "
            f"not deploy them. `{NAME} setup --apply --stock-compatible` writes "
            f"(docs/how-to/beside-stock.md):"
        )
        lines = [*map(_line, self.written), *([head] if self.left else []), *map(_line, self.left)]
        if not is_applied:
            lines.insert(
                0,
                f"For the scheduler, --apply also writes {COMPATIBLE.name} into our image datastores: the "
                f"ids of our system datastores",
            )
        return "\n".join(lines)


def _line(change: Change) -> str:
    return f"datastore {change.store.id} ({change.store.name}): {COMPATIBLE.name} = {change.value}"


def compatible_sent(is_applied: bool, is_for_stock: bool) -> Sent:
    """Write COMPATIBLE_SYS_DS of our image datastores, and `is_for_stock` of others; raise OnedUnavailable.

    Unless it `is_applied`: then nothing is written, and oned is asked for others' alone.
    """
    if not (is_applied or is_for_stock):
        return Sent()
    oned = Oned()
    datastores = oned.datastores()
    changes, others = (compatible.changes(datastores, ours=ours) for ours in (True, False))
    written, left = (changes + others, []) if is_for_stock else (changes, others)
    if not is_applied:
        return Sent((), written)
    for change in written:
        oned.update_datastore(change.store.id, COMPATIBLE.line(change.value))
    return Sent(written, left)


def shared(system: int) -> list[Finding]:
    """Return what is wrong with the system datastore's place on the machines that answer, as doctor does."""
    oned = Oned()
    datastores = [store for store in oned.datastores() if store.driver == NAME]
    hosts = [host.name for host in oned.hosts() if not host.is_offline and host.is_near(datastores)]
    path = next((path_of(store) for store in datastores if store.id == system), "")
    front_end = os.uname().nodename
    machines = list(dict.fromkeys([front_end, *(name for name in hosts if not is_here(name))]))
    if not path or len(machines) < 2:
        return []
    question = encoded(Question(roles=(), location=os.path.dirname(path), systems=(path,)))
    return of_shared(examined(machines, question), front_end)  # what does not answer `doctor` says


def mark_store(number: int, is_store: bool) -> Marked:
    """Mark the store of datastore `number` if it is mounted and in its place; raise if it is another's."""
    oned = Oned()
    ours = [store for store in oned.datastores() if store.driver == NAME and not store.is_system]
    (datastore,) = [store for store in ours if store.id == number]
    others = [store for store in ours if store.id != number]
    return mark(oned, datastore, others, oned.images(), is_store)


def show(templates: list[Template], made: dict[str, int], files: dict[str, str], marked: Marked) -> None:
    """Print templates, or what was made, and what is to be done by hand."""
    for template in templates:
        if template.name in made:
            put(f"{HOLDER[template.type]} {template.name}: id {made[template.name]}")
        else:
            put(f"# {HOLDER[template.type]}" + (f": {files[template.name]}" if files else ""))
            put_all(template.text() + "\n")
    if made:
        put_all(after(templates, made, marked))
        return
    put("As oneadmin, for each: onedatastore create FILE. Or `semishared setup --apply`. Or in Sunstone:")
    put()
    for template in templates:
        put_all(sunstone(template) + "\n")


def after(templates: list[Template], made: dict[str, int], marked: Marked) -> str:
    """Return what remains to be done outside of OpenNebula."""
    image = made[templates[0].name]
    if marked.why_not and marked.store:
        said = f"The store has lost its marker, and none was written: {marked.why_not}"
        return f"{said}. Until then every action on it is refused"
    if marked.why_not:
        return (
            f"The store is not marked yet: {marked.why_not}.\nNext: mount the shared tree at "
            f"<DATASTORE_LOCATION>/{image} (/var/lib/one/datastores/{image}) on the front-end and on every "
            "host, writable for oneadmin; then this again (--is-store where this machine exports the tree "
            "itself)"
        )
    if marked.store:
        return (
            f"The store is marked. Next: the same tree at <DATASTORE_LOCATION>/{image} "
            f"(/var/lib/one/datastores/{image}) on every host, writable for oneadmin; then `semishared "
            "doctor`; for hosts that die: docs/how-to/dead-host.md"
        )
    return (
        "Next: keys and libvirt secrets on the hosts (docs/how-to/ceph.md); then `semishared doctor`; for "
        "hosts that die: docs/how-to/dead-host.md"
    )


def sunstone(template: Template) -> str:
    """Return what to click for a datastore, with the labels of Sunstone 7.2 and 7.4.

    Steps of the form: General, Select Cluster, Configuration attributes, Custom Variables.
    """
    is_image = template.type == IMAGE_TYPE
    lines = [
        f"{template.name}: Storage > Datastores > Create",
        f"  General: Datastore type {'IMAGE' if is_image else 'SYSTEM'}, Name {template.name}, "
        "Storage backend Custom",
        *([f"    Datastore Custom, Custom DS_MAD {NAME}"] if is_image else []),
        f"    Transfer Custom, Custom TM_MAD {NAME}",
        "  Select Cluster: the cluster of the hosts",
        "  Configuration attributes: nothing (for Custom it is empty)",
        "  Custom Variables: " + ("" if template.chosen else "none"),
        *(f"    {name} = {value}" for name, value in template.chosen),
        "  Finish",
    ]
    if is_image and template.attributes.get("DISK_TYPE", "") in ("", "FILE"):
        lines += [
            f"  Mark the store when it is mounted: `{NAME} setup --apply` finds the datastore by its name.",
            f"    Then it is in Storage > Datastores > {template.name} > Info, panel Attributes: "
            f"{STORE.name} = the id",
            "    that is in the tree's marker. Attributes that you add later go into that panel too, "
            "not through Update",
        ]
    return "\n".join([*lines, ""])
