# SPDX-License-Identifier: Apache-2.0
"""Notes and records in JSON: each says its version, or is one of layout v1, which had none and keeps its
meaning as it is.

A note that a later version means otherwise has to be told from that of today. So a writer of a new one says
`"version"`; what older versions have left is read as ever (test_record.py, tests/upgrade).
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, Tuple

import pytest

from semishared.model.disk import place
from semishared.model.disk.record import Record
from unit.sources import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "lib/semishared"
WRITERS = {("files", "write_json"), ("locks", "note"), ("json", "dump"), ("json", "dumps")}

ELSEWHERE: Dict[Tuple[str, str], str] = {
    ("device/label.py", "write"): "the label of pool/labels.py",
    ("disk/records.py", "write_record"): "model/disk/record.py",
    ("disk/retained_diffs.py", "keep_unknown"): "a record that is there, with another path; of any version",
    ("guest/active_layer.py", "write"): "model/disk/record.py",
    ("pool/labels.py", "_close"): "a note that is there, with another weight",
}
"""Who writes what has its version from elsewhere."""
LAYOUT_V1: Dict[Tuple[str, str], str] = {
    ("disk/create.py", "publish_first"): "clone.N.json: the name of a clone, for its removal alone",
    ("disk/epochs.py", "note_deletion"): "in a lock: counters by name; a reader takes those that it knows",
    ("disk/epochs.py", "note_made"): "the same lock",
    ("disk/epochs.py", "begin_move"): "the same lock",
    ("device/offline.py", "_waits"): "which process waits for an answer: of this run of the host alone",
    ("front/questions.py", "_hints"): "a guess at who has a base: what is odd counts as unknown",
    ("guest/block_jobs.py", "noted"): "job.N.json: of this run of the guest alone; further fields are added",
    ("guest/freeze.py", "_freeze"): "frozen.json: of this run of the guest alone; further fields are added",
    ("guest/freeze.py", "_forget"): "frozen.json",
    ("guest/freeze.py", "_thaw"): "frozen.json",
    ("guest/job_lock.py", "_keep"): "in a lock: counters by name; a reader takes those that it knows",
    ("guest/job_lock.py", "note_end"): "the same lock",
    ("stage/source_speed.py", "note"): "measured speeds by source: what is odd is measured again",
    ("store/commit/change.py", "remember"): "committed.N: saves work alone; what is odd is read again",
    ("store/dir/image.py", "publish_generation"): "generation.json: all fields are compared with the image",
    ("store/dir/journal.py", "write_claim"): "owner.json: claims.parse refuses fields that it does not know",
    ("store/rbd/claim.py", "write"): "the same in Ceph",
    ("tools/signatures.py", "_write_signature"): "what a host shows of itself: gone with its next sign",
}
"""Who writes what layout v1 has without a version, what that is, and why it needs none."""
NOT_ON_DISK = {
    "cli/command.py",
    "cli/progress.py",
    "cli/support_bundle.py",
    "front/trail.py",
    "disk/remote_first.py",
    "disk/snapshot_marks.py",
    "install/configuration.py",
    "install/preflight.py",
    "share/ceph_clients.py:_said",
    "share/cephfs.py",
    "store/dir/clones.py",
    "store/rbd/blocklist.py",
    "store/rbd/pool.py",
    "tools/block_sums.py",
    "tools/copy_on_read.py",
    "tools/files.py",
    "tools/layers.py",
    "tools/locks.py",
    "tools/qemu_img.py",
    "tools/redact.py",
    "tools/storage_daemon.py",
    "tools/trail_lines.py",
    "wire/messages.py",
}
"""Modules where json.dumps makes what goes to a program, another machine or people; or is what is looked for
here (tools/).
"""


def writers(tree: ast.AST, function: str = "") -> Iterator[Tuple[str, ast.Call, ast.AST]]:
    """Yield calls of what writes JSON, each with the innermost function around it, by name and node."""
    yield from _writers(tree, function, tree)


def _writers(node: ast.AST, function: str, around: ast.AST) -> Iterator[Tuple[str, ast.Call, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _writers(child, child.name, child)
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            of = child.func.value
            if isinstance(of, ast.Name) and (of.id, child.func.attr) in WRITERS:
                yield function, child, around
        yield from _writers(child, function, around)


def says_version(call: ast.Call, around: ast.AST) -> bool:
    """Return True if a writer is given a dict that says its version, there or in a name of its function."""
    data = call.args[0] if getattr(call.func, "attr", "").startswith("dump") else call.args[1]
    if isinstance(data, ast.Name):
        given = [
            node.value
            for node in ast.walk(around)
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            and data.id in {target.id for target in _targets(node) if isinstance(target, ast.Name)}
        ]
        return bool(given) and all(map(_has_version, given))
    return _has_version(data)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    yield from node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]


def _has_version(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Dict) and any(
        isinstance(key, ast.Constant) and key.value == "version" for key in node.keys
    )


def found() -> Iterator[Tuple[str, str, bool]]:
    """Yield module, function, and whether it says a version, of each writer of a file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        for function, call, around in writers(parsed(path.read_text(encoding="utf-8"))):
            is_text = isinstance(call.func, ast.Attribute) and call.func.attr == "dumps"
            if not (is_text and {module, f"{module}:{function}"} & NOT_ON_DISK):
                yield module, function, says_version(call, around)


@pytest.mark.reads_checkout
def test_every_note_says_its_version_or_is_of_layout_v1() -> None:
    without = {(module, function) for module, function, says in found() if not says}
    new = without - set(ELSEWHERE) - set(LAYOUT_V1)
    assert not new, f'{new}: a new note says {{"version": 1, ...}}, and its reader refuses a newer one'


@pytest.mark.reads_checkout
def test_tables_name_writers_that_are_there() -> None:
    there = {(module, function) for module, function, says in found() if not says}
    assert {*ELSEWHERE, *LAYOUT_V1} <= there


def test_a_record_says_its_version() -> None:
    assert Record(0, place.OVERLAY, "qcow2", "/disk.0").to_data()["version"] == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('files.write_json(path, {"version": 1, "size": 2})', True),
        ("files.write_json(path, {'version': VERSION, **more})", True),
        ('said = {"version": 1}\n    files.write_json(path, said)', True),
        ('files.write_json(path, {"size": 2})', False),
        ("files.write_json(path, {**noted, 'at': 1})", False),
        ('said = {"size": 1}\n    locks.note(file, said)', False),
        ("files.write_json(path, record.to_data())", False),
        ("file.write(json.dumps({'size': 1}))", False),
    ],
)
def test_a_writer_is_seen(source: str, says: bool) -> None:
    ((function, call, around),) = writers(ast.parse(f"def f(path):\n    {source}"))
    assert (function, says_version(call, around)) == ("f", says)
