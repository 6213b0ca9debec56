# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of the operator's command: each verb with --json has one, and it says no to what is not in it.

What the verbs really print is compared where they are run: lab/node.py, tools/oned_site.py,
tools/conftest.py.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import schemas
from semishared.cli import command, gc
from semishared.cli.main import COMMANDS, parser
from semishared.plan.care import gc as plan_gc

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
ROW = {"vm": 3, "host": "h1", "disk": 0, "image": 7, "how": "detached", "why": "", "id": "", "seconds": 1.5}
ERROR = {"host": "h2", "error": "SS010 h2: no route; check the host"}
FINDING = plan_gc.Finding("h1", "/var/lib/one/datastores", "staged", "/x", "its writer is gone", 5, 7200)
SAMPLES: list[tuple[str, Any]] = [
    ("caps", {"keys": [{"user": "libvirt", "roles": ["hosts"], "caps": {"mon": "profile rbd"}}]}),
    (
        "commit",
        {
            "vm": 3,
            "dry_run": False,
            "rows": [
                {"vm": 3, "disk": 0, "kept": "", "how": "failed", "why": "x", "id": "SS071", "said": ""}
            ],
            "errors": [ERROR],
        },
    ),
    ("detach", {"event": "summary", "dry_run": False, "detached": 1, "failed": 0, "rows": [ROW]}),
    (
        "failover",
        {
            "host": "h1",
            "dry_run": True,
            "fence": None,
            "vms": [{"vm": 1, "name": "a", "how": "waits", "why": "b"}],
        },
    ),
    (
        "gc",
        {
            "dry_run": True,
            "findings": [gc.row(FINDING, "would remove")],
            "errors": [{**ERROR, "machine": "h2"}],
            "totals": {
                "found": 1,
                "bytes": 5,
                "removed": 0,
                "kept": 0,
                "young": 0,
                "young_bytes": 0,
                "young_for_s": 0,
            },
        },
    ),
    (
        "publish",
        {
            "dry_run": True,
            "vms": [{"vm": 1, "how": "would publish", "fields": {"A": "b"}}],
            "images": {"7": "on h1, disk 0 of VM 1: all committed"},
            "errors": [],
        },
    ),
    ("explain", {"errors": [{"id": "SS024", "name": "a", "meaning": "b", "remedy": "c", "pages": []}]}),
]


def with_json() -> list[str]:
    """Return the verbs that print JSON."""
    top = parser(every=True)
    choices = next(one.choices for one in top._actions if isinstance(one, argparse._SubParsersAction))
    return [verb for verb in COMMANDS if "--json" in choices[verb]._option_string_actions]


@pytest.mark.fault(80, "each verb that prints JSON has a schema with a version, and is held to it")
def test_each_verb_that_prints_json_has_a_schema() -> None:
    assert {path.stem for path in schemas.FOLDER.glob("*.json")} == set(with_json())
    for verb in with_json():
        found = json.loads((schemas.FOLDER / f"{verb}.json").read_text())
        assert found["$id"] == f"urn:semishared:{verb}:{command.SCHEMA}"
        assert len(found.get("properties", found.get("$defs"))) > 1, (
            f"docs/json_schemas.py has no row of {verb}"
        )


def test_verbs_that_do_or_find_things_print_json() -> None:
    assert set(COMMANDS) - set(with_json()) <= {"metrics", "support-bundle"}


@pytest.mark.skipif(not schemas.IS_INSTALLED, reason="jsonschema is not installed")
@pytest.mark.parametrize(
    ("verb", "sample"), SAMPLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_schema_takes_what_is_printed_and_nothing_else(
    verb: str, sample: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command.put_json(sample)
    printed = capsys.readouterr().out.encode()
    argv = ["/x/semishared", verb, "--json"]
    schemas.check(argv, printed)
    assert schemas.verb_of(argv) == verb
    # A list of the sample's own, in which a row has one name more.
    lists = [name for name, value in sample.items() if isinstance(value, list) and value]
    for change in (
        {"schema": 2},
        {"more": 1},
        {name: [{**sample[name][0], "more": 1}] for name in lists[:1]},
    ):
        wrong = {**copy.deepcopy(json.loads(printed)), **change}
        with pytest.raises(AssertionError, match=f"semishared {verb} --json: "):
            schemas.check(argv, json.dumps(wrong).encode())


@pytest.mark.skipif(not schemas.IS_INSTALLED, reason="jsonschema is not installed")
def test_lines_are_compared_one_by_one() -> None:
    lines = [
        {"event": "plan", "transport": "chain", "sender": "h1", "hosts": ["h2"]},
        {"event": "vm", **ROW},
        {"event": "note", "host": "h1", "text": "x"},
        {"event": "summary", "schema": 1, "dry_run": False, "detached": 1, "failed": 0, "rows": [ROW]},
    ]
    argv = ["python3", "/x/semishared", "detach", "3", "--json"]
    schemas.check(argv, "\n".join(map(json.dumps, lines)).encode())
    with pytest.raises(AssertionError):
        schemas.check(argv, json.dumps({"event": "summary", "detached": 1}).encode())
