# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of what `--json` prints, one for each verb (`make docs`); tests hold what is printed to them.

A row of fields is `name:kind name?:kind ...`; `?` is for one that may be missing. Kinds: text, int, count
(not negative), num, bool, any, `[kind]` a list, `{kind}` an object by names, `@row` a row of the verb,
`kind|null`.
"""

from __future__ import annotations

import json
from typing import Dict

from semishared.cli.command import SCHEMA
from semishared.cli.main import COMMANDS, parser

KINDS: Dict[str, Dict[str, object]] = {
    "text": {"type": "string"},
    "int": {"type": "integer"},
    "count": {"type": "integer", "minimum": 0},
    "num": {"type": "number"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "any": {},
}
ERROR = "host:text error:text machine?:text"
BASE = """host:text name:text bytes?:count root?:text staged?:num used?:num leases?:[text] size?:count
    damaged?:bool device?:text here?:bool bad?:[int] seconds?:num wrong_in_memory?:bool mended?:any why?:text
    evicted?:bool verified?:num reread?:[text]"""
NOTE = "event:text host:text text:text"
PROGRESS = """event:text host:text have?:int of?:int source?:text done?:bool transport?:text sender?:text|null
    hosts?:[text] name?:text"""
PLAN = "event:text transport:text sender:text|null hosts:[text]"
SHARE = """image:int owner:int born:int bytes:int size:int used:int source:text stripes?:count
    object_size?:count pool?:text directory?:text readonly?:bool snapshots?:[text]|null wrong?:any
    datastore:int state:text name?:text|null vms?:[@having]"""
DISK = """vm:count name:text state:text host:text machine:text disk:count image:text|null image_id:int|null
    place:text|null how:text|null format:text|null bytes:count|null uncommitted:count|null io_class:text|null
    snapshots:count|null path:text|null device:text|null hot:any delta:bool|null why:text base:text|null
    missing:text under_way:text"""
SNAPSHOT = "name:text made:int alone:int path:text in_guest:text wrong?:any"

ROWS: Dict[str, Dict[str, str]] = {
    "attention": {
        "": "items:[@item] errors:[@error]",
        "item": "kind:text severity:text host:text machine:text what:text since:text|null command:text",
        "error": ERROR,
    },
    "base": {"": "bases:[@base] errors:[@error]", "base": BASE, "error": ERROR},
    "caps": {"": "keys:[@key]", "key": "user:text roles:[text] caps:{text}"},
    "cluster": {
        "": "event:text verb:text vms:count failed:count rows:[@vm]",
        "vm": """event?:text vm:count name?:text host:text how:text why:text seconds?:num disk?:int image?:int
            id?:text said?:text state?:text disks?:[@disk]""",
        "disk": DISK,
        "note": NOTE,
        "plan": PLAN,
        "progress": PROGRESS,
    },
    "commit": {
        "": "vm:count dry_run:bool rows:[@row] errors:[@error]",
        "row": "vm:count disk:count kept:text how:text why:text id:text said:text",
        "error": ERROR,
    },
    "detach": {
        "": "event:text dry_run:bool detached:count failed:count rows:[@vm]",
        "vm": "event?:text vm:count host:text disk:int image:int how:text why:text id:text seconds:num",
        "note": NOTE,
        "plan": PLAN,
        "progress": PROGRESS,
    },
    "doctor": {
        "": "result:text findings:[@finding] machines:{@versions}",
        "finding": "severity:text host:text machine:text what:text mend:text",
        "versions": """semishared?:text qemu?:text libvirt?:text python3?:text zstd?:text lzop?:text
            udpcast?:text""",
    },
    "explain": {"": "errors:[@error]", "error": "id:text name:text meaning:text remedy:text pages:[text]"},
    "failover": {
        "": "host:text dry_run:bool fence:int|null vms:[@vm]",
        "vm": "vm:count name:text how:text why:text",
    },
    "fence": {
        "": """host:text fenced:bool lifted:bool missing:text stay?:[text] epoch?:int boot?:text since?:int
            off?:text blocked?:[text] notes?:[text] by?:text"""
    },
    "gc": {
        "": "dry_run:bool findings:[@finding] errors:[@error] totals:@totals",
        "finding": """host:text machine:text kind:text path:text reason:text bytes:count age_s:num keep:text
            result:text""",
        "totals": """found:count bytes:count removed:count kept:count young:count young_bytes:count
            young_for_s:num""",
        "error": ERROR,
    },
    "jobs": {
        "": "jobs:[@job] errors:[@error]",
        "job": """host:text pid:count vm:int|null disk:int|null action:text step:text image:text source:text
            target:text done:count of:count rate:count since:count asked_by:text""",
        "error": ERROR,
    },
    "plan": {
        "": "action:text plan:[@message] open:bool stdout:text|null",
        "message": "host:text steps:[@step] answers?:[any]|null during?:text follows?:text",
        "step": "step:text *",
    },
    "pool": {
        "": "hosts:[@pool] errors:[@error]",
        "pool": "host:text devices:[@device] changes:[text] wrong:[text]",
        "device": """uuid:text path:text class:text weight:num total:count free:count disks:count bases:count
            promised:count lost:[text] is_old:bool state:text mixes_memory?:bool|null watched?:bool|null
            limit?:int|null""",
        "summary": "schema:count event:text empty:bool|null text:text rows:[@vm]",
        "vm": """event?:text what:text vm:int disk:int from:text to:text bytes:count how:text why:text id:text
            seconds:num""",
        "progress": "event:text host:text have:count of:count",
        "note": NOTE,
        "error": ERROR,
    },
    "publish": {
        "": "dry_run:bool vms:[@vm] images:{text} errors:[@error]",
        "vm": "vm:count how:text why?:text fields?:{text}",
        "error": ERROR,
    },
    "setup": {
        "": """datastores:[@datastore] files:{text} store:text not_marked:text shared:[text]
            compatible:[@compatible]""",
        "datastore": "ID:int|null NAME:text TYPE:text TM_MAD:text *",
        "compatible": "ID:int NAME:text COMPATIBLE_SYS_DS:text written:bool",
    },
    "share": {
        "": """shares?:[@share] datastore?:int root?:text marker?:text image?:int bytes?:int used?:int
            size?:int before?:int snapshot?:@snapshot snapshots?:[@snapshot] credentials?:@credentials
            taken?:any wrong?:any said?:text""",
        "share": SHARE,
        "having": "vm:count name:text disk:count tag:text host:text readonly:bool",
        "snapshot": SNAPSHOT,
        "credentials": "monitors:text fs:text path:text user:text key:text access:text",
    },
    "stage": {
        "": """event:text dry_run:bool images:[@image] transports:[text] sender:text|null seconds:num
            bytes:{count} common:count unique:count stream:@stream ratio:num|null rate:int|null complete:bool
            hosts:{@outcome} gone:[int]""",
        "image": "id:count name:text generation:text",
        "stream": "codec?:text plain?:count packed?:count resent_percent?:num dropped?:count",
        "outcome": "ok:bool sources:{@source} troubles:[text] why:text lacks:[text] would:[text]",
        "source": "extents:count bytes:count",
        "note": NOTE,
        "plan": PLAN,
        "progress": PROGRESS,
    },
    "status": {
        "": "disks:[@disk] bases:[@base] kept:[@kept] shares:[@share] space:{@space} errors:[@error]",
        "disk": DISK,
        "base": BASE,
        "kept": "host:text path:text vm:count disk:count image:any bytes:count size:count error?:text",
        "share": SHARE,
        "having": "vm:count name:text disk:count tag:text host:text readonly:bool",
        "space": "free:count total:count",
        "error": ERROR,
    },
    "support-bundle": {"": "file:text parts:[text] errors:{text}"},
}
"""Verb -> its rows, '' that of the object which it prints, or of the last line."""
LINES = ("summary", "vm", "note", "plan", "progress")
"""Rows that are lines of their own, where a verb prints several."""


def verbs() -> list[str]:
    """Return the verbs with --json."""
    choices = next(action.choices for action in parser(every=True)._actions if action.dest == "command")
    return [verb for verb in COMMANDS if choices and "--json" in choices[verb]._option_string_actions]


def schema(verb: str) -> Dict[str, object]:
    """Return the schema of what a verb prints; of one without rows above that it is an object."""
    rows = ROWS.get(verb, {"": "*"})
    defs = {name: _row(fields) for name, fields in rows.items() if name}
    head: Dict[str, object] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:semishared:{verb}:{SCHEMA}",
        "title": f"semishared {verb} --json",
        "description": COMMANDS[verb],
    }
    main = _row(f"schema:count {rows['']}")
    main["properties"]["schema"] = {"const": SCHEMA}  # type: ignore[index]
    lines = [{"$ref": f"#/$defs/{name}"} for name in LINES if name in rows] if _has_lines(rows) else []
    if lines:
        return {**head, "anyOf": [{"$ref": "#/$defs/last"}, *lines], "$defs": {"last": main, **defs}}
    return {**head, **main, **({"$defs": defs} if defs else {})}


def _has_lines(rows: Dict[str, str]) -> bool:
    return rows[""].startswith("event:") or "summary" in rows


def _row(fields: str) -> Dict[str, object]:
    """Return the schema of a row; a `*` says that others of any name are expected."""
    words = [word for word in fields.split() if word != "*"]
    named = {name.rstrip("?"): _kind(kind) for name, _, kind in (word.partition(":") for word in words)}
    required = [word.partition(":")[0] for word in words if "?:" not in word]
    found: Dict[str, object] = {"type": "object", "properties": named, "required": required}
    return {**found, "additionalProperties": {}} if "*" in fields.split() else found


def _kind(word: str) -> Dict[str, object]:
    if word.endswith("|null"):
        return {"anyOf": [_kind(word[: -len("|null")]), KINDS["null"]]}
    if word.startswith("["):
        return {"type": "array", "items": _kind(word[1:-1])}
    if word.startswith("{"):
        return {"type": "object", "additionalProperties": _kind(word[1:-1])}
    return {"$ref": f"#/$defs/{word[1:]}"} if word.startswith("@") else KINDS[word]


def page(verb: str) -> str:
    """Return the file of a verb's schema."""
    return json.dumps(schema(verb), indent=1) + "\n"
