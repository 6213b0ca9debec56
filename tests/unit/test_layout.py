# SPDX-License-Identifier: Apache-2.0
"""model/layout*.py: who formats a name can parse it, nobody else does either, and docs/reference/names.md has
them all.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, Iterator

import pytest

from semishared.model import (
    layout,
    layout_base,
    layout_delta,
    layout_devices,
    layout_diff,
    layout_pool,
    layout_share,
    layout_store,
)
from semishared.tools import signatures

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lib" / "semishared"
LAYOUT = {
    "layout",
    "layout_base",
    "layout_delta",
    "layout_devices",
    "layout_diff",
    "layout_pool",
    "layout_share",
    "layout_store",
}
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
    ("install/timer.py", "semishared-detach"): "a unit of systemd, or a file of cron",
    ("cli/doctor_pool.py", "semishared-ram.sh enable"): "a command of a host's administrator",
    ("install/tree.py", ".semishared-install."): "in remotes/, while install.sh runs",
    ("front/fence_marks.py", "semishared-fence-"): "the name of a document in OpenNebula",
    ("intake/source.py", r"/disk\."): "of a backup, as OpenNebula's backup drivers name it",
    (
        "opennebula/oned.py",
        "semishared_key",
    ): "beside one_auth of a front-end, where nothing else of ours lies",
    ("opennebula/args.py", r"disk\.([0-9]{1,9})\Z"): "a word of oned, which knows of no layout",
    ("plan/live_migration.py", "--migrate-disks"): "an option of virsh",
    ("share/as_root.py", "semishared-btrfs "): "what that program calls itself",
    ("share/btrfs.py", "/usr/local/sbin/semishared-btrfs"): "the program that root has a copy of",
    ("store/rbd_new.py", "semishared-mkfs-"): "in the directory for temporary files, in one process",
    ("store/writers.py", "/proc/locks"): "the kernel's",
    (
        "tools/context_iso.py",
        "semishared-context-",
    ): "in the directory for temporary files, until its process ends (tools/owner.py)",
    ("tools/extents.py", "semishared-manifest 1"): "the first line of a manifest",
    ("tools/holders.py", "/proc/locks"): "the kernel's own list",
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


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is no docstring."""
    bodies = (
        node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    )
    prose = {id(statement.value) for body in bodies for statement in body if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        text = rendered(node)
        if text is not None and id(node) not in prose:
            yield node.lineno, text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    ['f"{path}.snap/{n}"', 'f"{root}/.{NAME}/x"', '"disk." + n', 'f"{dir}/disk.{n}"', 'f"{root}/locks/{x}"'],
)
def test_a_formatter_is_seen(source: str) -> None:
    assert any(
        OURS.search(text) for _, text in texts(ast.parse(f"def f():\n    '''.snap'''\n    return {source}"))
    )


@pytest.mark.reads_checkout
@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_formats_or_parses_a_name(path: Path) -> None:
    module = str(path.relative_to(PACKAGE))
    if module in ON_ITS_OWN:
        return
    allowed = [text for name, text in ELSEWHERE if name == module]
    found = [
        (line, text) for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))) if OURS.search(text)
    ]
    others = [item for item in found if not any(text in item[1] for text in allowed)]
    assert not others, f"{module} formats or parses what model/layout*.py is there for: {others}"
    assert all(any(text in item[1] for item in found) for text in allowed), (
        f"{module} has less than ELSEWHERE says"
    )


@pytest.mark.reads_checkout
def test_what_is_sent_has_the_same_names() -> None:
    assert signatures.STAGED == layout.STAGED and signatures.SIGNED.match(
        f"{signatures.SIGNATURE}0123456789abcdef"
    )
    said = {
        text
        for _, text in texts(ast.parse((PACKAGE / "install" / "preflight.py").read_text(encoding="utf-8")))
    }
    assert {f"{{}}/{layout.SIDE}", layout_store.MARKER} <= said  # opened one after the other


# -- who formats can parse --------------------------------------------------------------------------

GENERATION = "0123456789abcdef" * 2


def test_names_are_parsed_as_they_were_made() -> None:
    maker = layout.Maker(GENERATION[:16], 4711, "99")
    assert layout.maker_of(layout.staged("disk.0", layout.made_by(maker, "0123456789ab"))) == maker
    assert layout.maker_of(".staged-disk.0.1a2b3c") is None
    assert layout.disk_named(layout.disk_name(3)) == layout.recorded(layout.record_name(3)) == 3
    assert [
        layout.disk_named(name) for name in ("disk.3.snap", "disk.", "disk.x", "disk.1234567890", "disk.3\n")
    ] == [None] * 5
    assert layout.disk_file(layout.layer("/ds/0/7/disk.3", 2)) == ("/ds/0/7", 3, "2")
    assert layout.disk_file("/ds/0/7/disk.3") == ("/ds/0/7", 3, "")
    assert [
        layout.disk_file(path)
        for path in ("disk.3", "/ds/0/7/disk.03", "/ds/0/7/disk.3.snap/x", "/ds/0/7/disk.3.snap")
    ] == [None] * 4
    own = "/ds/0/7/disk.3"
    assert (
        layout.plain(layout.layer(own, 0)) == layout.plain(own) == layout.disk_of(layout.layers(own)) == own
    )
    assert all(
        layout.is_of_disk(name, 1)
        for name in ("disk.1", layout.layers("disk.1"), layout.staged("disk.1", "x"))
    )
    assert not any(
        layout.is_of_disk(name, 1)
        for name in ("disk.10", layout.layers("disk.10"), layout.staged("disk.10", "x"))
    )
    incoming = layout.beside("/ds/0", "incoming", 7, "0123456789ab")
    assert layout.beside_named(Path(incoming).name) == ("incoming", 7) == layout.beside_named(".incoming-7")
    lock = Path(layout.incoming_lock("/root", incoming)).name
    assert layout.incoming_of(lock, 7) == Path(incoming).name and not layout.incoming_of(lock, 8)
    assert layout.locked_vm(lock) == layout.locked_vm(Path(layout.vm_lock("/root", 7)).name) == 7
    assert layout.locked_vm(Path(layout.disks_lock("/root", 7)).name) is None
    assert layout_delta.kept_layer(layout_delta.kept(layout.layer(own, 2))) == layout.layer(own, 2)
    assert not any(
        map(
            layout_delta.kept_layer,
            (layout.layer(own, 2), layout_delta.kept(own), layout.layer(own, "x.kept")),
        )
    )


def test_names_of_bases_clones_and_images_are_parsed_as_they_were_made() -> None:
    name = layout_base.name(100, 35, GENERATION)
    assert layout_base.named(name) == (100, 35, GENERATION) and layout_base.prefix_of(
        name
    ) == layout_base.prefix(100, 35)
    assert layout_base.named(f"{name}0") is layout_base.named("100-35-") is None
    own = layout_devices.Link(
        "0f0e0d0c-0b0a-4908-8706-050403020100", "layers", layout_devices.layers_name(7, 1, "0123456789ab")
    )
    for link in (own, own._replace(part="bases", name=name), own._replace(part="staging", name="100-35")):
        assert layout_devices.linked(layout_devices.target_of(link)) == link
    assert layout_devices.layers_named(own.name) == (7, 1) and layout_devices.layers_named("7-1-x") is None
    strange = (layout_devices.target_of(own)[3:], f"{layout_devices.target_of(own)}/..")
    assert [
        layout_devices.linked(text)
        for text in (*strange, layout_devices.target_of(own._replace(part="locks")))
    ] == [None] * 3
    assert layout_devices.mount(layout_devices.side("/mnt/a")) == "/mnt/a"
    assert (
        layout_base.leased_to(layout_base.lease_name(7, 1)) == (7, 1)
        and layout_base.leased_to("7-1-2") is None
    )
    for cloud in ("", GENERATION):
        clone = layout_store.clone("/ds/100/.semishared/abc", 7, 1, cloud)
        assert layout_store.clone_named(Path(clone).name) == (7, 1, cloud, False)
        assert layout_store.clone_named(Path(layout.layers(clone)).name) == (7, 1, cloud, True)
        assert (
            layout_store.side_of(clone)
            == layout_store.side_of(layout.layer(clone, 0))
            == "/ds/100/.semishared/abc"
        )
        assert layout_store.is_clone_of(clone, 7, 1) and not layout_store.is_clone_of(clone, 7, 11)
    assert layout_store.store_of("/ds/100/.semishared/abc") == "/ds/100"
    assert (
        layout_share.image_of(Path(layout_share.record(35)).name) == 35
        and layout_share.image_of(Path(layout_share.lock(35)).name) == -1
    )
    assert (
        layout_share.number_of(Path(layout_share.uids(3)).name) == 3
        and layout_share.number_of(layout.staged("3", "x")) == -1
    )
    assert layout_share.snapshot_of(35, layout_share.snapshot(35, "a-b")) == "a-b"
    image = layout_pool.image(35)
    clone = layout_pool.clone(image, 7, 1)
    assert layout_pool.named(image) == (35, None, None, False, False) and layout_pool.named(clone) == (
        35,
        7,
        1,
        False,
        False,
    )
    assert layout_pool.named(layout_pool.staged(clone, "0123456789ab")) == (35, 7, 1, True, False)
    assert layout_pool.named(layout_pool.changing(image)) == (35, None, None, False, True)
    assert layout_pool.is_staged(layout_pool.staged(image, "0123456789ab"), image)
    assert not layout_pool.is_staged(layout_pool.changing(image), image)
    assert layout_pool.generation(
        layout_pool.frozen(GENERATION)
    ) == GENERATION and not layout_pool.generation(layout_pool.NEW)


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
    "layout_pool.generation",
    "kept_layer",
    "mount",
    "snapshot_of",
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
        f"layout.{name}.disk": "N"
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
    "link": layout_devices.Link("<uuid>", "layers", "<vm>-<disk>-<random>"),
    "epoch": "<seq>",
    "layout_diff.last.disk": "N",
    "layout.disk.number": "N",
    "layout.backup_copy.number": "N",
    "layout.layer.number": "K",
    "layout_pool.image.number": "<image>",
    "layout.layer.disk": "disk.N",
    "layout.layers.disk": "disk.N",
    "layout.staged.name": "NAME",
    "layout.lock.name": "holders",
    "layout.made_by.maker": layout.Maker("<host><boot>", "<pid>", "<start>"),  # type: ignore[arg-type]
    "layout.incoming_lock.incoming": ".incoming-<vm>-<random>",
    "layout.staged_backup.directory": "<vm>/backup",
    "layout_base.name.image": "<image>",
    "layout_base.prefix.image": "<image>",
    "layout_base.base.name": "<store>-<image>-<generation>",
    "layout_base.hot_lock.name": "<store>-<image>-<generation>",
    "layout_devices.hot.name": "<store>-<image>-<generation>",
    "layout_base.mounted.system": "<system>",
    "layout_base.holders.name": "<store>-<image>-<generation>",
    "layout_store.side.image": "NAME",
    "layout_store.link_target.image": "NAME",
    "layout_pool.clone.image": "one-<image>",
    "layout_pool.staged.image": "one-<image>",
    "layout_pool.changing.image": "one-<image>",
    "layout_pool.rescued.image": "one-<image>",
    "layout_pool.rescued.random": "<x>",
    "layout_devices.left.folder": "disk.N.snap",
    "layout_devices.note_beside.device": "devices/<uuid>",
    "layout_devices.asked_beside.device": "devices/<uuid>",
    "layout_devices.left_note.disk": "N",
    "layout_devices.aside.side": "<mount point>/.semishared",
    "layout_pool.lent.snapshot": "<id>",
    "layout_delta.kept.layer": "K",
    "layout_pool.manifest.number": "<n>",
    **{
        f"layout_share.{name}.image": "<image>"
        for name in ("tree", "gone", "record", "lock", "snapshot", "key", "namespace")
    },
    "layout_share.uids.number": "<number>",
    "layout_share.namespace.marker": "<SEMISHARED_STORE>",
    "layout_share.key.readonly": False,
    **{f"layout_share.{name}.name": "<name>" for name in ("snapshot", "below", "inside")},
    "layout_share.inside.inode": "<inode>",
    "layout_pool.staged.random": "<x>",
    "layout_pool.set_aside.random": "<x>",
    "layout_pool.made_for.source": "SOURCE",
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
    for module in (
        layout,
        layout_base,
        layout_delta,
        layout_devices,
        layout_diff,
        layout_share,
        layout_store,
        layout_pool,
    ):
        short = module.__name__.rpartition(".")[2]
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
    known |= {
        layout.layers(layout_store.clone_name("<vm>", "<disk>", cloud)) for cloud in ("", "<cloud>")
    } | {"<vm>-<disk>"}  # type: ignore[arg-type]
    left = re.findall(r"^ {4,42}(\S+?)(?:$|  | ->)", PAGE, re.MULTILINE)
    parts = {part.lstrip("@") for path in left for part in path.split("/")}
    assert len(parts) > 40
    assert not {part for part in parts if part not in known and not NOT_OURS.fullmatch(part)}
