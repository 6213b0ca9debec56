# SPDX-License-Identifier: Apache-2.0
"""Edit oned.conf for semishared (docs/explanation/contract.md): text in, text and changes out.

Words go to the end of lists that are there; what is wholly ours goes into one block at the end of the file.
The removal is the exact inverse: it restores, to the byte, a file that was not changed otherwise. vmm_execrc:
install/edits.py.
"""

from __future__ import annotations

import json
import re
from typing import Optional, Sequence

from .. import NAME as DRIVER
from ..errors import BadConfiguration, ConfigurationConflict
from ..model import attributes as model_attributes
from ..model.attributes import TM_CONF
from ..named import NamedTuple
from .oned_conf import Arguments, Attribute, Edit, Value, apply, parse, quoted, removal, within

DS_CONF = (
    ("REQUIRED_ATTRS", "", False),
    ("PERSISTENT_ONLY", "NO", False),
    ("MARKETPLACE_ACTIONS", "export", False),
)
RESTRICTED = tuple(row.name for row in model_attributes.of_images() if row.is_restricted)
OF_STOCK = ("DISK_TYPE", "ALLOW_ORPHANS", "CEPH_HOST", "CEPH_SECRET", "CEPH_USER", "CEPH_CONF", "POOL_NAME")
"""Attributes that oned itself looks for in a VM's disk; all stock files have them."""
OURS = tuple(row.name for row in model_attributes.of_images() if row.is_inherited)
INHERITED = {"INHERIT_DATASTORE_ATTR": (*OF_STOCK, *OURS), "INHERIT_IMAGE_ATTR": OURS}
"""Attributes of datastores and images that oned copies into a VM's disk."""
OPTIONS = {"t": "threads", "d": "tm-types", "w": "timeout"}
"""Options of one_tm, by letter."""
LEAST = 64
"""As many as two clusters can have waiting, and four more."""
STOCK_THREADS = 15
"""one_tm's own default."""
THREADS_NOTE = re.compile(r'^# before: TM_MAD -t: (".*")\n', re.MULTILINE)
"""The former value, as JSON; nothing if the option was not there."""


def threads_raised(arguments: Arguments, noted: bool) -> tuple[list[Edit], list[str], list[str]]:
    """Return the edits of TM_MAD's ARGUMENTS for LEAST threads, the note of the former value, and warnings.

    If the administrator has put the value back (`noted`), it stays, with a warning.

    -t of TM_MAD says how many transfers run at once. one_tm has one queue for all VMs and datastores: a
    transfer begins when a thread is free, and holds that thread until its last script has ended
    (mad/ruby/ActionManager.rb:165-230, tm_mad/one_tm.rb:71-88). Nothing overtakes. A clone ends when its disk
    is there, and not before: with 15 threads, the default of oned.conf, 15 clones that wait for one base hold
    up every other VM's delete as long. oned's own scheduler begins up to 30 for each cluster
    (MAX_ACTIONS_PER_CLUSTER). Threads are made when there is work, and cost nothing otherwise.
    """
    word = arguments.last("t")
    text = word.text if word else str(STOCK_THREADS)
    count = int(text) if text.isascii() and text.isdigit() else 0
    if count >= LEAST or not text:
        return [], [], []
    if noted:
        what = "that many clones that wait for a base keep all other VMs' transfers waiting"
        return [], [], [f"TM_MAD: with -t {count} {what}"]
    if word:
        edit = Edit(word.start, word.end, str(LEAST))
    else:
        edit = Edit(0, 0, f"-t {LEAST} " if arguments.text else f"-t {LEAST}")
    return [edit], [f"# before: TM_MAD -t: {json.dumps(word.text if word else '')}\n"], []


def threads_lowered(arguments: Arguments, block: str) -> list[Edit]:
    """Return the edits that undo that, if the value is still ours; `block`: our lines in oned.conf."""
    note, word = THREADS_NOTE.search(block), arguments.last("t")
    if not note or word is None or word.text != str(LEAST):
        return []
    before = str(json.loads(note.group(1)))
    if before:
        return [Edit(word.start, word.end, before)]
    whole = arguments.whole["t"][-1]
    return [Edit(whole.start, whole.end + (len(arguments.text) > whole.end), "")]


STOCK = "kvm"
"""OpenNebula's hypervisor directory, to which ours forwards."""
BEGIN = f"# {DRIVER} begin: made by install.sh, and taken out by install.sh --uninstall"
END = f"# {DRIVER} end"
BLOCK = re.compile(rf"\n?^{re.escape(BEGIN)}\n(.*?)^{re.escape(END)}\n", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r'^# before: VM_MAD ([A-Za-z0-9_.\-]*): (".*")\n', re.MULTILINE)
"""A VM_MAD's former ARGUMENTS, as JSON, if we took more out of them than the directory."""

DS_OPTIONS = {"t": "threads", "d": "ds-types", "s": "system-ds-types", "w": "timeout"}
VM_OPTIONS = {
    "r": "retries",
    "t": "threads",
    "l": "local",
    "d": "delegate",
    "s": "shell",
    "p": "parallel",
    "w": "timeout",
}


class Changed(NamedTuple):
    """A file's new text, the changes in it, and warnings for the administrator."""

    text: str
    changes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class _Notes:
    """Changes, warnings and notes of one pass over a file."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []
        self.changes: list[str] = []
        self.warnings: list[str] = []
        self.before: list[str] = []


# -- the file as a whole ----------------------------------------------------------------------------


def configure(text: str, own_actions: Sequence[str], path: str = "oned.conf") -> Changed:
    """Return oned.conf with all that semishared needs; `own_actions`: actions that we do not forward.

    Raise BadConfiguration for a file that oned could not read or that lacks a driver, ConfigurationConflict
    for settings of others that would bypass ours.
    """
    attributes = parse(text, path)
    notes = _Notes()
    _transfer(attributes, bool(THREADS_NOTE.search(text)), notes, path)
    _list(attributes, "DATASTORE_MAD", DS_OPTIONS, "d", notes, path)
    _list(attributes, "DATASTORE_MAD", DS_OPTIONS, "s", notes, path)
    _hypervisors(attributes, own_actions, notes, path)
    wanted = _conf(attributes, "TM_MAD_CONF", TM_CONF, notes)
    wanted += _conf(attributes, "DS_MAD_CONF", DS_CONF, notes)
    for name, values in (("IMAGE_RESTRICTED_ATTR", RESTRICTED), *INHERITED.items()):
        wanted += _values(attributes, name, values, notes)
    new = _with_block(apply(text, notes.edits), notes.before, wanted)
    return Changed(new, tuple(notes.changes), tuple(notes.warnings))


def unconfigure(text: str, path: str = "oned.conf") -> Changed:
    """Return oned.conf without anything of semishared; our VMs and datastores stop working then."""
    attributes = parse(text, path)
    notes = _Notes()
    before = [(match.group(1), str(json.loads(match.group(2)))) for match in NOTE.finditer(text)]
    block = BLOCK.search(text)
    inside = range(block.start(1), block.end(1)) if block else range(0)
    for attribute in attributes:
        if attribute.name in ("TM_MAD", "DATASTORE_MAD"):
            _drop_words(attribute, notes, block.group(1) if block else "")
        elif attribute.name == "VM_MAD":
            _drop_hypervisor(attribute, before, notes)
        elif _is_ours(attribute):
            if attribute.start not in inside:
                notes.edits.append(removal(text, attribute))
            notes.changes.append(f"{attribute.name} of {DRIVER}: out")
    if block:
        notes.edits.append(Edit(block.start(), block.end(), _others(block.group(1), text[: block.start()])))
    return Changed(apply(text, notes.edits), tuple(notes.changes))


def hypervisor_names(text: str, path: str = "oned.conf") -> list[str]:
    """Return the VM_MADs that use our directory, or will: those with the stock one."""
    return [
        attribute.text("NAME")
        for attribute in _vm_mads(parse(text, path))
        for word in Arguments(attribute.text("ARGUMENTS"), VM_OPTIONS, "p").words[:1]
        if word.text in (STOCK, DRIVER)
    ]


def _vm_mads(attributes: list[Attribute]) -> list[Attribute]:
    """Return the drivers of hypervisors that run scripts, as those for kvm do."""
    named = [attribute for attribute in attributes if attribute.name == "VM_MAD"]
    return [attribute for attribute in named if attribute.text("EXECUTABLE").endswith("one_vmm_exec")]


def _transfer(attributes: list[Attribute], noted: bool, notes: _Notes, path: str) -> None:
    """Put the driver into the list of TM_MAD, and raise its threads."""
    value = _arguments(attributes, "TM_MAD", path)
    if value is None:
        return
    arguments = Arguments(value.text, OPTIONS)
    edits = _listed(arguments, "TM_MAD", "d", notes, path)
    more, before, warnings = threads_raised(arguments, noted)
    notes.before += before
    notes.changes += [f"TM_MAD: -t {LEAST}, so many transfers at once" for _ in more]
    notes.warnings += warnings
    notes.edits += within(value, edits + more)


def _list(
    attributes: list[Attribute], name: str, options: dict[str, str], letter: str, notes: _Notes, path: str
) -> None:
    """Put the driver into the list of option `letter` of `name`."""
    value = _arguments(attributes, name, path)
    if value is not None:
        notes.edits += within(value, _listed(Arguments(value.text, options), name, letter, notes, path))


def _arguments(attributes: list[Attribute], name: str, path: str) -> Optional[Value]:
    attribute = next((item for item in attributes if item.name == name and item.fields is not None), None)
    if attribute is None:
        raise BadConfiguration(f"{path} has no {name} = [ ... ]")
    return attribute.field("ARGUMENTS")


def _listed(arguments: Arguments, name: str, letter: str, notes: _Notes, path: str) -> list[Edit]:
    """Return the edit of the list of option `letter`; without the option oned takes all drivers there are."""
    word = arguments.last(letter)
    if word is None or DRIVER in word.text.split(","):
        return []
    if not word.text:
        raise BadConfiguration(f"{path}: ARGUMENTS of {name} have a -{letter} with nothing behind it")
    notes.changes.append(f"{name}: {DRIVER} into the list -{letter}")
    return [Edit(word.end, word.end, f",{DRIVER}")]


def _hypervisors(attributes: list[Attribute], own_actions: Sequence[str], notes: _Notes, path: str) -> None:
    """Let all drivers that use the stock directory use ours."""
    found = False
    for attribute in _vm_mads(attributes):
        name = attribute.text("NAME")
        value = attribute.field("ARGUMENTS")
        arguments = Arguments(value.text, VM_OPTIONS, "p") if value else None
        if not value or not arguments or not arguments.words:
            if name in (STOCK, "qemu"):
                raise BadConfiguration(f"{path}: ARGUMENTS of VM_MAD {name} name no directory")
            continue
        directory = arguments.words[0]
        if directory.text not in (STOCK, DRIVER):
            if name in (STOCK, "qemu"):
                raise ConfigurationConflict(
                    f"{path}: VM_MAD {name} uses the hypervisor directory {directory.text!r}, not "
                    f"{STOCK!r}: of another add-on?"
                )
            continue
        found = True
        notes.edits += within(value, _own_directory(value.text, arguments, name, own_actions, notes, path))
    if not found:
        raise BadConfiguration(f"{path} has no VM_MAD that uses the hypervisor directory {STOCK!r}")


def _own_directory(
    text: str, arguments: Arguments, name: str, own_actions: Sequence[str], notes: _Notes, path: str
) -> list[Edit]:
    """Return the edits that give a VM_MAD's ARGUMENTS our directory and remove a foreign local migrate."""
    edits = []
    directory = arguments.words[0]
    if directory.text != DRIVER:
        edits.append(Edit(directory.start, directory.end, DRIVER))
        notes.changes.append(f"VM_MAD {name}: hypervisor directory {DRIVER} instead of {directory.text}")
    local = arguments.last("l")
    actions = local.text.split(",") if local else []
    names = [action.partition("=")[0].strip().lower() for action in actions]
    # migrate is removed. Without our save a guest is saved as well, unless a disk is leaving its store.
    bypassed = sorted(set(names) & set(own_actions) - {"migrate", "save"})
    if bypassed:
        raise ConfigurationConflict(
            f"{path}: VM_MAD {name} runs {', '.join(bypassed)} on the front-end (-l), past semishared's own: "
            "a guest would get its disks with the wrong format"
        )
    if local and "migrate" in names:
        kept = [action for action, called in zip(actions, names) if called != "migrate"]
        whole = arguments.whole["l"][-1]
        if kept:
            edits.append(Edit(local.start, local.end, ",".join(kept)))
        else:
            edits.append(Edit(len(text[: whole.start].rstrip()), whole.end, ""))
        notes.before.append(f"# before: VM_MAD {name}: {json.dumps(text)}\n")
        notes.changes.append(f"VM_MAD {name}: no -l migrate")
        notes.warnings.append(
            f"VM_MAD {name}: `-l {local.text}` put another migrate in the place of semishared's and loses "
            "it; VMs of other storage are migrated by OpenNebula's own script now"
        )
    return edits


def _conf(
    attributes: list[Attribute], name: str, wanted: Sequence[tuple[str, str, bool]], notes: _Notes
) -> str:
    """Correct our TM_MAD_CONF or DS_MAD_CONF; return it as text if there is none."""
    named = (item for item in attributes if item.name == name)
    found = next((item for item in named if item.text("NAME").lower() == DRIVER), None)
    if found is None:
        notes.changes.append(f"{name} of {DRIVER}: in")
        pairs = (("NAME", DRIVER), *((key, value) for key, value, _ in wanted))
        rows = ",\n    ".join(f"{key} = {quoted(value)}" for key, value in pairs)
        return f"{name} = [\n    {rows}\n]\n"
    missing = []
    for key, value, must in wanted:
        there = found.field(key)
        if there is None:
            missing.append((key, value))
        elif must and there.text.upper() != value.upper():
            notes.edits.append(Edit(there.start, there.end, quoted(value)))
            was = quoted(there.text)
            notes.changes.append(f"{name} of {DRIVER}: {key} = {quoted(value)} instead of {was}")
    if missing and found.fields:
        at = found.fields[-1].value.end
        notes.edits.append(Edit(at, at, "".join(f", {key} = {quoted(value)}" for key, value in missing)))
        notes.changes += [f"{name} of {DRIVER}: {key} = {quoted(value)}" for key, value in missing]
    return ""


def _values(attributes: list[Attribute], name: str, wanted: Sequence[str], notes: _Notes) -> str:
    """Return the lines `name = "value"` that are missing."""
    there = {item.value.text.upper() for item in attributes if item.name == name and item.fields is None}
    missing = [value for value in wanted if value not in there]
    notes.changes += [f"{name}: {value}" for value in missing]
    return "".join(f"{name} = {quoted(value)}\n" for value in missing)


def _with_block(text: str, before: list[str], wanted: str) -> str:
    """Return `text` with `wanted` in our block: a new one at the end, or the one that is there."""
    if not before and not wanted:
        return text
    block = BLOCK.search(text)
    if block:
        return text[: block.start(1)] + "".join(before) + block.group(1) + wanted + text[block.end(1) :]
    # The newline before it belongs to the block: its removal restores a file without a final newline.
    return f"{text}\n{BEGIN}\n{''.join(before)}{wanted}{END}\n"


def _others(inside: str, above: str) -> str:
    """Return the lines in our block that the administrator has added, to be kept."""
    attributes = [item for item in parse(inside) if _is_ours(item) or _is_inherited(item)]
    rest = THREADS_NOTE.sub("", NOTE.sub("", apply(inside, [removal(inside, item) for item in attributes])))
    return f"\n{rest}" if rest and above and not above.endswith("\n") else rest


def _is_ours(attribute: Attribute) -> bool:
    if attribute.name in ("TM_MAD_CONF", "DS_MAD_CONF"):
        return attribute.text("NAME").lower() == DRIVER
    is_list = attribute.name in ("IMAGE_RESTRICTED_ATTR", *INHERITED)
    return is_list and attribute.value.text.upper() in RESTRICTED


def _is_inherited(attribute: Attribute) -> bool:
    return attribute.value.text.upper() in INHERITED.get(attribute.name, ())


def _drop_words(attribute: Attribute, notes: _Notes, inside: str) -> None:
    """Remove the driver from the lists of a TM_MAD or DATASTORE_MAD; undo the changes noted in our block."""
    value = attribute.field("ARGUMENTS")
    if value is None:
        return
    options = OPTIONS if attribute.name == "TM_MAD" else DS_OPTIONS
    arguments = Arguments(value.text, options)
    edits = threads_lowered(arguments, inside) if attribute.name == "TM_MAD" else []
    for letter, words in arguments.values.items():
        for word in words:
            names = word.text.split(",")
            if letter in ("d", "s") and DRIVER in names:
                kept = ",".join(name for name in names if name != DRIVER)
                edits.append(Edit(word.start, word.end, kept))
                notes.changes.append(f"{attribute.name}: {DRIVER} out of the list -{letter}")
    if edits:
        notes.edits += within(value, edits)


def _drop_hypervisor(attribute: Attribute, before: list[tuple[str, str]], notes: _Notes) -> None:
    """Give a VM_MAD of ours the stock directory, and what we removed from its ARGUMENTS."""
    value = attribute.field("ARGUMENTS")
    arguments = Arguments(value.text, VM_OPTIONS, "p") if value else None
    if not value or not arguments or not arguments.words or arguments.words[0].text != DRIVER:
        return
    name = attribute.text("NAME")
    directory = arguments.words[0]
    edits = [Edit(directory.start, directory.end, STOCK)]
    for called, text in before:
        if called == name and _as_made(text, name) == value.text:
            edits = [Edit(0, len(value.text), text)]
    notes.edits += within(value, edits)
    notes.changes.append(f"VM_MAD {name}: hypervisor directory {STOCK} again")


def _as_made(before: str, name: str) -> Optional[str]:
    """Return our edit of ARGUMENTS; None for ones without a directory."""
    arguments = Arguments(before, VM_OPTIONS, "p")
    if not arguments.words:
        return None
    return apply(before, _own_directory(before, arguments, name, (), _Notes(), ""))
