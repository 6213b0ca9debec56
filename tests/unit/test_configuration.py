# SPDX-License-Identifier: Apache-2.0
"""What install.sh makes of oned.conf and vmm_execrc, read back the way oned reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configurations import REFUSED, SOUND, Value, oned_reads, vmm_execrc
from semishared.errors import BadConfiguration, ConfigurationConflict
from semishared.install import configuration as plan
from semishared.install import edits
from semishared.install.edits import NO_ACTIONS
from semishared.install.oned_conf import parse
from semishared.model import attributes

VMM = Path(__file__).resolve().parents[2] / "vmm"
OWN = (
    "attach_disk",
    "deploy",
    "detach_disk",
    "migrate",
    "restore",
    "save",
    "snapshot_create",
    "snapshot_revert",
)
# What was there by hand is ours: it goes when we go.
NOT_UNDONE = ("by hand",)


def test_oned_is_told_of_our_hypervisor_actions_and_of_nothing_else_in_their_directory() -> None:
    assert sorted(set(os.listdir(VMM)) - set(NO_ACTIONS) - {"__pycache__"}) == list(OWN)


def named(read: list[tuple[str, Value]], kind: str, name: str) -> dict[str, str]:
    return next(
        value for key, value in read if key == kind and isinstance(value, dict) and value.get("NAME") == name
    )


def drivers(read: list[tuple[str, Value]], kind: str, option: str) -> list[str]:
    """Return the list behind an option of TM_MAD or DATASTORE_MAD, as the driver's GetoptLong gets it."""
    arguments = next(value["ARGUMENTS"] for key, value in read if key == kind and isinstance(value, dict))
    found = re.findall(rf"(?<!\S)(?:{option})[ =]?(\S+)", arguments)
    return found[-1].split(",") if found else ["semishared"]


@pytest.mark.parametrize("name", SOUND)
def test_everything_is_there_as_oned_reads_it(name: str) -> None:
    done = plan.configure(SOUND[name], OWN)
    read = oned_reads(done.text)
    assert "semishared" in drivers(read, "TM_MAD", r"-d|--tm-types")
    assert "semishared" in drivers(read, "DATASTORE_MAD", r"-d|--ds-types")
    assert "semishared" in drivers(read, "DATASTORE_MAD", r"-s|--system-ds-types")
    tm, ds = named(read, "TM_MAD_CONF", "semishared"), named(read, "DS_MAD_CONF", "semishared")
    assert (tm["SHARED"], tm["LN_TARGET"], tm["CLONE_TARGET"], tm["ALLOW_ORPHANS"]) == (
        "NO",
        "NONE",
        "SYSTEM",
        "YES",
    )
    assert ds["PERSISTENT_ONLY"] == "NO"
    flat = [(key, value) for key, value in read if isinstance(value, str)]
    assert all(("IMAGE_RESTRICTED_ATTR", attribute) in flat for attribute in plan.RESTRICTED)
    assert all(
        (name, attribute) in flat for name, attributes in plan.INHERITED.items() for attribute in attributes
    )
    for key, value in read:
        if key == "VM_MAD" and isinstance(value, dict) and value["NAME"] in ("kvm", "qemu", "kvm-gpu"):
            words = value["ARGUMENTS"].split()
            assert "semishared" in words and "kvm" not in words and "migrate=" not in value["ARGUMENTS"]


@pytest.mark.parametrize("name", SOUND)
def test_nothing_else_changes(name: str) -> None:
    """What oned reads differs in our words only; every line that is not of ours stays to the byte."""
    before, after = SOUND[name], plan.configure(SOUND[name], OWN).text
    gone = [line for line in before.splitlines() if line not in after.splitlines()]
    assert all(re.search(r"ARGUMENTS|arguments|semishared|ALLOW_ORPHANS|CLONE_TARGET", line) for line in gone)
    there = oned_reads(after)
    for key, value in oned_reads(before):
        if key not in ("VM_MAD", "TM_MAD", "DATASTORE_MAD", "TM_MAD_CONF", "DS_MAD_CONF"):
            assert (key, value) in there
    assert [key for key, _ in there if key.endswith("_MAD")] == [
        key for key, _ in oned_reads(before) if key.endswith("_MAD")
    ]


@pytest.mark.parametrize("name", SOUND)
def test_second_run_changes_nothing_and_uninstall_is_the_inverse(name: str) -> None:
    done = plan.configure(SOUND[name], OWN)
    assert done.changes and done.text != SOUND[name]
    assert plan.configure(done.text, OWN) == plan.Changed(done.text, ())
    undone = plan.unconfigure(done.text)
    if name in NOT_UNDONE:
        assert "semishared" not in undone.text.lower()
    else:
        assert undone.text == SOUND[name]
    assert plan.unconfigure(undone.text).text == undone.text


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line_that_says_why(name: str) -> None:
    text, why = REFUSED[name]
    with pytest.raises((BadConfiguration, ConfigurationConflict)) as caught:
        plan.configure(text, OWN, "/etc/one/oned.conf")
    assert why in caught.value.detail and "/etc/one/oned.conf" in caught.value.detail


def test_what_was_added_later_survives_the_uninstall() -> None:
    done = plan.configure(SOUND["migrate on the front-end"], OWN).text
    later = done.replace("PORT = 2633", "PORT = 2634").replace(
        'purefa,semishared"', 'purefa,semishared,linstor"'
    )
    later = later.replace(plan.END, 'OURS = "no"  # in the wrong place\n' + plan.END) + "LAST = 1\n"
    undone = plan.unconfigure(later).text
    assert "semishared" not in undone.lower() and "migrate=migrate_local" in undone
    read = oned_reads(undone)
    assert ("OURS", "no") in read and ("LAST", "1") in read and ("PORT", "2634") in read
    assert drivers(read, "TM_MAD", "-d")[-1] == "linstor"


def test_changed_arguments_lose_our_directory_only() -> None:
    done = plan.configure(SOUND["migrate on the front-end"], OWN).text.replace(
        "-t 15 -r 0 semishared -p", "-t 99 -r 0 semishared -p"
    )
    assert '"-t 99 -r 0 kvm -p"' in plan.unconfigure(done).text


def transfers(text: str) -> str:
    """Return how many transfers one_tm does at once, as its GetoptLong gets it; '' for its own 15."""
    arguments = next(
        value["ARGUMENTS"] for key, value in oned_reads(text) if key == "TM_MAD" and isinstance(value, dict)
    )
    return (re.findall(r"(?<!\S)(?:-t|--threads)[ =]?(\S+)", arguments) or [""])[-1]


@pytest.mark.parametrize("name", SOUND)
def test_clones_that_wait_leave_threads_for_others(name: str) -> None:
    done = plan.configure(SOUND[name], OWN)
    assert int(transfers(done.text)) == max(64, int(transfers(SOUND[name]) or 15))
    assert any("-t 64" in line for line in done.changes) == (transfers(SOUND[name]) != "99")
    assert transfers(plan.unconfigure(done.text).text) == transfers(SOUND[name])


def test_threads_put_back_by_hand_stay_and_are_warned_of() -> None:
    done = plan.configure(SOUND["stock 7.4"], OWN).text
    fewer, more = done.replace("-t 64", "-t 15"), done.replace("-t 64", "-t 200")
    again = plan.configure(fewer, OWN)
    assert (again.text, again.changes) == (fewer, ()) and "TM_MAD: with -t 15" in again.warnings[0]
    assert plan.configure(more, OWN) == plan.Changed(more, ())
    assert plan.unconfigure(fewer).text == SOUND["stock 7.4"]
    assert transfers(plan.unconfigure(more).text) == "200"


def test_foreign_migrate_is_named_in_a_warning() -> None:
    done = plan.configure(SOUND["migrate and more on the front-end"], OWN)
    assert "migrate_storpool" in done.warnings[0]
    assert (
        named(oned_reads(done.text), "VM_MAD", "kvm")["ARGUMENTS"]
        == "-t 15 -l cancel,save=x -r 0 semishared -p"
    )


def test_settings_by_hand_are_put_right_and_other_choices_stay() -> None:
    done = plan.configure(SOUND["by hand"], OWN)
    conf = named(oned_reads(done.text), "TM_MAD_CONF", "semishared")
    assert conf["SHARED"] == "NO" and conf["DS_MIGRATE"] == "NO" and conf["DS_MIGRATE_SNAP"] == "YES"
    assert (
        sum(key == "TM_MAD_CONF" and value["NAME"] == "semishared" for key, value in oned_reads(done.text))  # type: ignore[index]
        == 1
    )


RC = {
    "stock 6.10": vmm_execrc("6.10"),
    "stock 7.0": vmm_execrc("7.0"),
    "stock 7.4": vmm_execrc(),
    "single quotes": "LIVE_DISK_SNAPSHOTS='kvm-ssh'\n",
    "export": 'export LIVE_DISK_SNAPSHOTS="kvm-ssh"  # list\n',
    "empty": 'LIVE_DISK_SNAPSHOTS=""\n',
    "blank at the end": 'LIVE_DISK_SNAPSHOTS="kvm-ssh "\n',
    "none": "# nothing\nA=b",
    "twice": 'LIVE_DISK_SNAPSHOTS="kvm-a"\nLIVE_DISK_SNAPSHOTS="kvm-b"\n',
    "two lines": 'LIVE_DISK_SNAPSHOTS="kvm-a\nkvm-b"\n',
    "commented out": '#LIVE_DISK_SNAPSHOTS="kvm-a"\n',
    "another add-on": 'LIVE_DISK_SNAPSHOTS="kvm-storpool qemu-storpool"\n',
}


def words(text: str) -> list[str]:
    """Return the list that a shell has after reading `text`."""
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found = re.findall(r"LIVE_DISK_SNAPSHOTS=(?:\"([^\"]*)\"|'([^']*)')", plain)
    return "".join(found[-1]).split() if found else []


@pytest.mark.parametrize("name", RC)
def test_live_snapshots(name: str) -> None:
    done = edits.configure_execrc(RC[name], ["kvm", "qemu"])
    assert words(done.text) == [*words(RC[name]), "kvm-semishared", "qemu-semishared"]
    assert edits.configure_execrc(done.text, ["kvm", "qemu"]) == plan.Changed(done.text, ())
    assert edits.unconfigure_execrc(done.text).text == RC[name]


@pytest.mark.fault(61, "doctor says when an upgrade of OpenNebula has left datastores that refuse moves")
def test_what_the_file_says_of_moves_is_read() -> None:
    text = plan.configure(SOUND["stock 7.4"], OWN).text
    everything = {"DS_MIGRATE": "YES", "DS_LIVE_MIGRATE": "YES", "DS_MIGRATE_SNAP": "YES"}
    assert edits.moves(text, "oned.conf") == everything and edits.moves(SOUND["stock 7.4"], "oned.conf") == {}
    ours = 'TM_MAD_CONF = [ NAME = "semishared", LN_TARGET = "NONE", SHARED = "no", DS_MIGRATE = "no" ]\n'
    # As oned takes it where nothing is said.
    assert edits.moves(ours, "x") == {"DS_MIGRATE": "NO", "DS_LIVE_MIGRATE": "NO", "DS_MIGRATE_SNAP": "NO"}


def test_live_snapshots_of_what_is_missing_only() -> None:
    done = edits.configure_execrc('LIVE_DISK_SNAPSHOTS="kvm-semishared a"\n', ["kvm", "qemu"])
    assert words(done.text) == ["kvm-semishared", "a", "qemu-semishared"]
    bare = edits.configure_execrc("LIVE_DISK_SNAPSHOTS=kvm-a\n", ["kvm"])
    assert words(bare.text) == ["kvm-a", "kvm-semishared"]


@pytest.mark.parametrize(
    "line", ['LIVE_DISK_SNAPSHOTS="$A b"', 'LIVE_DISK_SNAPSHOTS="a"$(b)', 'LIVE_DISK_SNAPSHOTS="a \\\n b"']
)
def test_shell_that_is_no_plain_list_is_not_edited(line: str) -> None:
    with pytest.raises(BadConfiguration, match="line 2"):
        edits.configure_execrc(f"# x\n{line}\n", ["kvm"])


TEXT = st.text(st.sampled_from('AB_1 \t\n=[],"#\\x'), max_size=40)


@given(TEXT)
def test_our_reader_and_oned_agree(text: str) -> None:
    """Where ours reads a file, oned reads the same out of it. (Where oned skips over rubbish, ours
    refuses.)
    """
    try:
        ours = parse(text)
    except BadConfiguration:
        return
    flat: list[tuple[str, object]] = []
    for item in ours:
        fields: dict[str, str] = {}
        for field in item.fields or ():
            fields.setdefault(field.name, field.value.text)
        flat.append((item.name, item.value.text if item.fields is None else fields))
    assert flat == oned_reads(text)


def test_every_attribute_of_images_is_for_administrators_only() -> None:
    assert set(plan.RESTRICTED) == {name for name, row in attributes.known().items() if "image" in row.of} - {
        attributes.STATE.name  # for people: plan/care/vm_vector.py says why not
    }


@pytest.mark.reads_checkout
def test_page_shows_the_block_that_is_made() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "configure-oned.md").read_text()
    made = plan.BLOCK.search(plan.configure(SOUND["stock 7.4"], OWN).text)
    assert made and "".join(f"    {line}\n" for line in made.group().strip().splitlines()) in page
