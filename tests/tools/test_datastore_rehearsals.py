# SPDX-License-Identifier: Apache-2.0
"""`semishared plan datastore/ACTION` for a mounted store: it says what the action would do, and nothing
changes.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from rehearsing import things
from semishared.front import datastore
from tools.test_datastore import ROOT, Store

Situation = Callable[[Store], Dict[str, Any]]


def uploaded(store: Store) -> Dict[str, Any]:
    """Return what oned says of an image that was uploaded."""
    path = store.uploads / "raw"
    subprocess.run(["qemu-img", "create", "-q", "-f", "raw", str(path), "4M"], check=True)
    source, format = store.cp(path)
    return {"SOURCE": str(source), "FORMAT": format, "SIZE": 4}


def new(store: Store) -> Dict[str, Any]:
    uploaded(store)
    return {"PATH": str(store.uploads / "raw")}


def with_snapshot(store: Store) -> Dict[str, Any]:
    """Return an image with a snapshot as oned's disk_snapshot_create leaves it."""
    image = uploaded(store)
    folder = Path(f"{image['SOURCE']}.snap")
    folder.mkdir()
    (folder / "0").write_bytes(Path(image["SOURCE"]).read_bytes())
    return {**image, "TARGET_SNAPSHOT": 0}


SITUATIONS: Dict[str, Tuple[Situation, List[str]]] = {
    "stat": (new, []),
    "cp": (new, ["StoreUpload", "..."]),
    "mkfs": (lambda _: {"SIZE": 4, "FORMAT": "raw"}, ["CreateImage"]),
    "clone": (lambda store: {"PATH": uploaded(store)["SOURCE"], "FORMAT": "raw"}, ["CopyStored"]),
    "rm": (uploaded, ["RemoveImage"]),
    "snap_delete": (with_snapshot, ["ForgetSnapshot"]),
    "snap_revert": (with_snapshot, ["RevertImage"]),
    "snap_flatten": (with_snapshot, ["FlattenImage"]),
    "export": (uploaded, []),
    "monitor": (uploaded, ["MakeStore", "MeasureStore", "..."]),
}
"""By action: what leads to it; the steps that are said to follow (`...`: and more)."""
NEW = re.compile("[0-9a-f]{32}")
"""A new image has another name each time."""


def rehearsed(action: str, stdin: bytes) -> Dict[str, Any]:
    argv = [str(ROOT / "bin/semishared"), "plan", "--json", f"datastore/{action}", "7"]
    done = subprocess.run(argv, input=stdin, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    found: Dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("action", SITUATIONS)
@pytest.mark.fault(
    21, "`semishared plan` of a datastore action changes nothing: no name, byte, time or attribute"
)
def test_a_rehearsal_says_the_steps_and_changes_nothing(tmp_path: Path, action: str) -> None:
    store = Store(tmp_path)
    made, steps = SITUATIONS[action]
    image = made(store)
    before = things(tmp_path)
    said = rehearsed(action, base64.b64encode(store.message(**image).encode()))
    assert things(tmp_path) == before
    assert [step["step"] for part in said["plan"] if "answers" not in part for step in part["steps"]] + [
        "..."
    ] * said["open"] == steps
    answer = store.ok(action, **image)
    assert said["open"] or NEW.sub("NEW", said["stdout"]) == NEW.sub("NEW", answer)
    if steps and action != "monitor":
        assert things(tmp_path) != before


def test_every_action_is_rehearsed_here() -> None:
    assert set(SITUATIONS) == set(datastore.ACTIONS)
