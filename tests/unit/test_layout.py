# SPDX-License-Identifier: Apache-2.0
"""model/*/names.py: who formats a name can parse it, nobody else does either, and docs/reference/names.md has
them all.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, Iterator, cast

import pytest

from semishared.model.base import names as base_names
from semishared.model.device import names as device_names
from semishared.model.disk import names as disk_names
from semishared.model.share import names as share_names
from semishared.model.store import dir_names, rbd_names
from semishared.tools import signatures
from unit.sources import nodes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lib" / "semishared"
LAYOUT = {"names", "dir_names", "rbd_names"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem not in LAYOUT)

# -- nobody else ------------------------------------------------------------------------------------

OURS = re.compile(
    r"\.semishared|semishared[-_][a-z]|\.snap\b|(?<![a-z])disk\\?\.(?![a-z "
    r"])|\.?(staged|incoming|outgoing|removed|machine)-"
    r"|\.uploads|\.monitor\b|(vm|frozen|migration|generation)\.json|(job|clone)\.$|\.json$"
    r"|/(bases|leases|staging|locks|holders|clones|damaged|manifest|have|session)\b|^(base|vm|port)-$|-disks$"
)
"""What a name or path of ours has that hardly any other text has."""
ELSEWHERE = {
    # (module, the text): why it is none of the layout's
    ("cli/caps.py", "semishared-fence"): "a user of Ceph",
    ("disk/guard.py", r"disk\.[0-9]+[A-Za-z0-9._-]*\Z"): "second names of disks, of OpenNebula's own drivers",
    ("errors.py", "docs/explanation/staging.md"): "a page",
    ("install/edits.py", ".semishared-"): "a copy of a file of OpenNebula's, beside it",
    ("install/next_steps.py", "semishared-failover"): "a hook of OpenNebula's",
    ("install/shipped.py", "etc/.semishared.conf.shipped"): "a note of install.sh's, beside semishared.conf",
    ("cli/support_bundle.py", "semishared-support-"): "a file that an administrator gets",
    ("cli/support_bundle.py", ".json"): "a part of that file",
    ("plan/care/gc.py", "vm: `<system>/<vm>/`"): "what people read of it",
    ("plan/care/checks.py", "semishared-ram.sh enable"): "a command of a host's administrator",
    ("install/tree.py", ".semishared-install."): "in remotes/, while install.sh runs",
    ("front/fence_facts.py", "semishared-fence-"): "the name of a document in OpenNebula",
    ("intake/source.py", r"/disk\."): "of a backup, as OpenNebula's backup drivers name it",
    (
        "opennebula/oned.py",
        "semishared_key",
    ): "beside one_auth of a front-end",
    ("front/trail.py", "semishared_key"): "the same, of which nothing goes into the trail",
    ("front/vm_notes.py", "semishared_vms"): "beside the key, on each front-end",
    ("install/timer.py", "/var/lib/semishared-metrics"): "made by systemd for a unit",
    ("front/action_lines.py", "semishared_metrics"): "beside the key, on each front-end",
    ("front/noted_datastores.py", "semishared_datastores"): "beside the key, on each front-end",
    ("opennebula/args.py", r"disk\.([0-9]{1,9})\Z"): "a word of oned, which knows of no layout",
    ("plan/vm/live_migration.py", "--migrate-disks"): "an option of virsh",
    ("share/as_root.py", "semishared-btrfs "): "what that program calls itself",
    ("share/btrfs.py", "/usr/local/sbin/semishared-btrfs"): "the program that root has a copy of",
    ("store/rbd/pool.py", "semishared-mkfs-"): "in the directory for temporary files, in one process",
    ("store/writers.py", "/proc/locks"): "the kernel's",
    (
        "tools/context_iso.py",
        "semishared-context-",
    ): "in the directory for temporary files, until its process ends (tools/owner.py)",
    ("tools/jobs.py", ".json"): "below /run, while its process works",
    ("tools/extents.py", "semishared-manifest 1"): "the first line of a manifest",
    ("tools/lock_holders.py", "/proc/locks"): "the kernel's own list",
}
ON_ITS_OWN = {"install/preflight.py", "tools/signatures.py"}
"""They go to machines that have nothing of ours: test_what_is_sent_has_the_same_names."""


OUR_NAME = "FormattedValue(value=Name(id='NAME'"


def rendered(node: ast.AST) -> str | None:
    """Return a string constant, or an f-string with its values in braces, but for our own name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "semishared" if ast.dump(part).startswith(OUR_NAME) else rendered(part) or "{}"
            for part in node.values
        )
    return None


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is no docstring."""
    bodies = (
        node.body for node in nodes(source) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
    prose = {id(statement.value) for body in bodies for statement in body if isinstance(statement, ast.Expr)}
    for node in nodes(source):
        text = rendered(node)
        if text is not None and id(node) not in prose:
            yield node.lineno, text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    ['f"{path}.snap/{n}"', 'f"{root}/.{NAME}/x"', '"disk." + n', 'f"{dir}/disk.{n}"', 'f"{root}/locks/{x}"'],
)
def test_a_formatter_is_seen(source: str) -> None:
    assert any(OURS.search(text) for _, text in texts(f"def f():\n    '''.snap'''\n    return {source}"))


@pytest.mark.reads_checkout
@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_formats_or_parses_a_name(path: Path) -> None:
    module = str(path.relative_to(PACKAGE))
    if module in ON_ITS_OWN:
        return
    allowed = [text for name, text in ELSEWHERE if name == module]
    found = [(line, text) for line, text in texts(path.read_text(encoding="utf-8")) if OURS.search(text)]
    others = [item for item in found if not any(text in item[1] for text in allowed)]
    assert not others, f"{module} formats or parses what model/layout*.py is there for: {others}"
    assert all(any(text in item[1] for item in found) for text in allowed), (
        f"{module} has less than ELSEWHERE says"
    )


@pytest.mark.reads_checkout
def test_what_is_sent_has_the_same_names() -> None:
    assert signatures.STAGED == disk_names.STAGED and signatures.SIGNED.match(
        f"{signatures.SIGNATURE}0123456789abcdef"
    )
    said = {text for _, text in texts((PACKAGE / "install" / "preflight.py").read_text(encoding="utf-8"))}
    assert {f"{{}}/{disk_names.SIDE}", dir_names.MARKER} <= said  # opened one after the other


# -- who formats can parse --------------------------------------------------------------------------

GENERATION = "0123456789abcdef" * 2


def test_names_are_parsed_as_they_were_made() -> None:
    maker = disk_names.Maker(GENERATION[:16], 4711, "99")
    assert (
        disk_names.maker_of(disk_names.staged("disk.0", disk_names.made_by(maker, "0123456789ab"))) == maker
    )
    assert disk_names.maker_of(".staged-disk.0.1a2b3c") is None
    assert (
        disk_names.disk_named(disk_names.disk_name(3)) == disk_names.recorded(disk_names.record_name(3)) == 3
    )
    assert [
        disk_names.disk_named(name)
        for name in ("disk.3.snap", "disk.", "disk.x", "disk.1234567890", "disk.3\n")
    ] == [None] * 5
    assert disk_names.disk_file(disk_names.layer("/ds/0/7/disk.3", 2)) == ("/ds/0/7", 3, "2")
    assert disk_names.disk_file("/ds/0/7/disk.3") == ("/ds/0/7", 3, "")
    assert [
        disk_names.disk_file(path)
        for path in ("disk.3", "/ds/0/7/disk.03", "/ds/0/7/disk.3.snap/x", "/ds/0/7/disk.3.snap")
    ] == [None] * 4
    own = "/ds/0/7/disk.3"
    assert (
        disk_names.plain(disk_names.layer(own, 0))
        == disk_names.plain(own)
        == disk_names.disk_of(disk_names.layers(own))
        == own
    )
    assert all(
        disk_names.is_of_disk(name, 1)
        for name in ("disk.1", disk_names.layers("disk.1"), disk_names.staged("disk.1", "x"))
    )
    assert not any(
        disk_names.is_of_disk(name, 1)
        for name in ("disk.10", disk_names.layers("disk.10"), disk_names.staged("disk.10", "x"))
    )
    incoming = disk_names.beside("/ds/0", "incoming", 7, "0123456789ab")
    assert (
        disk_names.beside_named(Path(incoming).name)
        == ("incoming", 7)
        == disk_names.beside_named(".incoming-7")
    )
    lock = Path(disk_names.incoming_lock("/root", incoming)).name
    assert disk_names.incoming_of(lock, 7) == Path(incoming).name and not disk_names.incoming_of(lock, 8)
    assert disk_names.locked_vm(lock) == disk_names.locked_vm(Path(disk_names.vm_lock("/root", 7)).name) == 7
    assert disk_names.locked_vm(Path(disk_names.disks_lock("/root", 7)).name) is None
    assert disk_names.of_second_name(
        disk_names.with_second_name(disk_names.layer(own, 2))
    ) == disk_names.layer(own, 2)
    assert not any(
        map(
            disk_names.of_second_name,
            (disk_names.layer(own, 2), disk_names.with_second_name(own), disk_names.layer(own, "x.kept")),
        )
    )


def test_names_of_bases_clones_and_images_are_parsed_as_they_were_made() -> None:
    name = base_names.name(100, 35, GENERATION)
    assert base_names.named(name) == (100, 35, GENERATION) and base_names.prefix_of(
        name
    ) == base_names.prefix(100, 35)
    assert base_names.named(f"{name}0") is base_names.named("100-35-") is None
    lock = Path(base_names.image_lock("/root", "100-35")).name
    assert base_names.locked_image(lock) == "100-35"
    assert base_names.locked_image(Path(base_names.hot_lock("/root", name)).name) is None
    own = device_names.Link(
        "0f0e0d0c-0b0a-4908-8706-050403020100", "layers", device_names.layers_name(7, 1, "0123456789ab")
    )
    for link in (own, own._replace(part="bases", name=name), own._replace(part="staging", name="100-35")):
        assert device_names.linked(device_names.target_of(link)) == link
    assert device_names.layers_named(own.name) == (7, 1) and device_names.layers_named("7-1-x") is None
    strange = (device_names.target_of(own)[3:], f"{device_names.target_of(own)}/..")
    assert [
        device_names.linked(text) for text in (*strange, device_names.target_of(own._replace(part="locks")))
    ] == [None] * 3
    assert device_names.mount(device_names.side("/mnt/a")) == "/mnt/a"
    assert (
        base_names.leased_to(base_names.lease_name(7, 1)) == (7, 1) and base_names.leased_to("7-1-2") is None
    )
    for cloud in ("", GENERATION):
        clone = dir_names.clone("/ds/100/.semishared/abc", 7, 1, cloud)
        assert dir_names.clone_named(Path(clone).name) == (7, 1, cloud, False)
        assert dir_names.clone_named(Path(disk_names.layers(clone)).name) == (7, 1, cloud, True)
        assert (
            dir_names.side_of(clone)
            == dir_names.side_of(disk_names.layer(clone, 0))
            == "/ds/100/.semishared/abc"
        )
        assert dir_names.is_clone_of(clone, 7, 1) and not dir_names.is_clone_of(clone, 7, 11)
    assert dir_names.store_of("/ds/100/.semishared/abc") == "/ds/100"
    assert (
        share_names.image_of(Path(share_names.record(35)).name) == 35
        and share_names.image_of(Path(share_names.lock(35)).name) == -1
    )
    assert (
        share_names.number_of(Path(share_names.uids(3)).name) == 3
        and share_names.number_of(disk_names.staged("3", "x")) == -1
    )
    assert share_names.snapshot_of(35, share_names.snapshot(35, "a-b")) == "a-b"
    image = rbd_names.image(35)
    clone = rbd_names.clone(image, 7, 1)
    assert rbd_names.named(image) == (35, None, None, False, False) and rbd_names.named(clone) == (
        35,
        7,
        1,
        False,
        False,
    )
    assert rbd_names.named(rbd_names.staged(clone, "0123456789ab")) == (35, 7, 1, True, False)
    assert rbd_names.named(rbd_names.changing(image)) == (35, None, None, False, True)
    assert rbd_names.is_staged(rbd_names.staged(image, "0123456789ab"), image)
    assert not rbd_names.is_staged(rbd_names.changing(image), image)
    assert rbd_names.generation(rbd_names.frozen(GENERATION)) == GENERATION and not rbd_names.generation(
        rbd_names.NEW
    )


# -- docs/reference/names.md ------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "reference" / "names.md").read_text(encoding="utf-8")
PARSERS = {
    "layer_of",
    "disk_of",
    "plain",
    "location_of",
    "incoming_of",
    "prefix_of",
    "store_of",
    "side_of",
    "rbd_names.generation",
    "of_second_name",
    "mount",
    "snapshot_of",
    "summed",
}
"""Functions that return a text, but no name that they have made."""
PLACEHOLDERS: dict[str, Any] = {
    # (function and) parameter: what the page has in its place; NAME in that of all others, which are paths or
    # names
    "vm": "<vm>",
    "disk": "<disk>",
    "generation": "<generation>",
    "random": "<random>",
    "port": "<port>",
    "cloud": "<cloud>",
    "maker": "<host><boot>-<pid>-<start>-<random>",
    "kind": "removed",
    "store": "<store>",
    "prefix": "<store>-<image>",
    **{
        f"disk_names.{name}.disk": "N"
        for name in (
            "disk_name",
            "record_name",
            "record",
            "clone_note",
            "job_note",
            "saved",
            "arriving_backup",
        )
    },
    "uuid": "<uuid>",
    "link": device_names.Link("<uuid>", "layers", "<vm>-<disk>-<random>"),
    "epoch": "<seq>",
    "disk_names.last_commit.disk": "N",
    "disk_names.disk.number": "N",
    "disk_names.backup_copy.number": "N",
    "disk_names.layer.number": "K",
    "rbd_names.image.number": "<image>",
    "disk_names.layer.disk": "disk.N",
    "disk_names.layers.disk": "disk.N",
    "disk_names.staged.name": "NAME",
    "disk_names.lock.name": "holders",
    "disk_names.made_by.maker": disk_names.Maker("<host><boot>", "<pid>", "<start>"),  # type: ignore[arg-type]
    "disk_names.incoming_lock.incoming": ".incoming-<vm>-<random>",
    "disk_names.staged_backup.directory": "<vm>/backup",
    "base_names.name.image": "<image>",
    "base_names.prefix.image": "<image>",
    "base_names.base.name": "<store>-<image>-<generation>",
    "base_names.hot_lock.name": "<store>-<image>-<generation>",
    "device_names.hot.name": "<store>-<image>-<generation>",
    "base_names.mounted.system": "<system>",
    "base_names.holders.name": "<store>-<image>-<generation>",
    "dir_names.side.image": "NAME",
    "dir_names.link_target.image": "NAME",
    "rbd_names.clone.image": "one-<image>",
    "rbd_names.staged.image": "one-<image>",
    "rbd_names.changing.image": "one-<image>",
    "rbd_names.rescued.image": "one-<image>",
    "rbd_names.rescued.random": "<x>",
    "rbd_names.backup.mark": "ss-<x>",
    "disk_names.sums.mark": "ss-<random>-<increment>",
    "device_names.left.folder": "disk.N.snap",
    "device_names.note_beside.device": "devices/<uuid>",
    "device_names.asked_beside.device": "devices/<uuid>",
    "device_names.left_note.disk": "N",
    "device_names.aside.side": "<mount point>/.semishared",
    "rbd_names.lent.snapshot": "<id>",
    "disk_names.with_second_name.layer": "K",
    "rbd_names.manifest.number": "<n>",
    **{
        f"share_names.{name}.image": "<image>"
        for name in ("tree", "gone", "record", "lock", "snapshot", "key", "namespace")
    },
    "share_names.uids.number": "<number>",
    "share_names.namespace.marker": "<SEMISHARED_STORE>",
    "share_names.key.readonly": False,
    **{f"share_names.{name}.name": "<name>" for name in ("snapshot", "below", "inside")},
    "share_names.inside.inode": "<inode>",
    "rbd_names.staged.random": "<x>",
    "rbd_names.set_aside.random": "<x>",
    "rbd_names.made_for.source": "SOURCE",
}
NOT_OURS = re.compile(
    r"<datastore>|<SEMISHARED_FS_ROOT>|<DATASTORE_LOCATION>|<system "
    r"datastore>|<vm>|<uuid>|9b6635f6\.+(\.snap)?|POOL|NAME|ID|K"
    r"|\.\.+|->|"
)
"""Parts of paths on the page that are OpenNebula's, or stand for another part."""


def made() -> Iterator[str]:
    """Yield what each formatter makes of what the page has in the place of its arguments, and each constant
    name.
    """
    for module in (disk_names, base_names, device_names, share_names, dir_names, rbd_names):
        room, short = module.__name__.split(".")[-2:]
        short = f"{room}_{short}" if short == "names" else short
        yield from (
            value
            for name, value in vars(module).items()
            if name.isupper() and isinstance(value, str) and value[-1] not in "-"
        )
        for name, function in inspect.getmembers(module, inspect.isfunction):
            returns_text = (
                function.__module__ == module.__name__ and function.__annotations__["return"] == "str"
            )
            if returns_text and not {name, f"{short}.{name}"} & PARSERS:
                parameters = inspect.signature(function).parameters
                yield function(
                    *(
                        PLACEHOLDERS.get(f"{short}.{name}.{p}", PLACEHOLDERS.get(p, "NAME"))
                        for p in parameters
                    )
                )


@pytest.mark.reads_checkout
def test_every_name_that_is_made_is_on_the_page() -> None:
    missing = {name.rpartition("/")[2] for name in made()} - {"NAME"}
    assert not {name for name in missing if name not in PAGE}


@pytest.mark.reads_checkout
def test_every_name_on_the_page_is_made() -> None:
    """In the left column of its tables, which ends at two spaces or at the link's arrow."""
    known = {part for name in made() for part in name.split("/")}
    known |= {part.replace("removed", kind) for part in known for kind in ("incoming", "outgoing", "kept")}
    known |= {f"{signatures.SIGNATURE}<id>"}
    vm, disk = cast(Any, ("<vm>", "<disk>"))
    clones = [dir_names.clone_name(vm, disk, cloud) for cloud in ("", "<cloud>")]
    known |= {"<vm>-<disk>", *(disk_names.layers(name) for name in clones)}
    left = re.findall(r"^ {4,42}(\S+?)(?:$|  | ->)", PAGE, re.MULTILINE)
    parts = {part.lstrip("@") for path in left for part in path.split("/")}
    assert len(parts) > 40
    assert not {part for part in parts if part not in known and not NOT_OURS.fullmatch(part)}
