# SPDX-License-Identifier: Apache-2.0
"""What *Update* of a datastore in Sunstone sends, by FireEdge's source.

sunstone.json has what was taken from it: `source`, the tag and the files; `form`, the fields of the step
"Configuration attributes"; `keeps_others`, whether what is no field comes into the step "Custom Variables";
and of datastores of each kind what an Update with nothing changed takes away, None where the form cannot be
finished. For a driver that the form does not know (storage backend *Custom*) its fields are hidden, and sent
as they are; DISK_TYPE is never sent. oned then replaces the whole template (`replace: 0`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

SAID: Dict[str, Any] = json.loads(Path(__file__).with_name("sunstone.json").read_text())
VERSIONS: Dict[str, Any] = SAID["versions"]
CASES: Dict[str, Any] = SAID["cases"]
OF_OTHER_STEPS = ("NAME", "TYPE", "DS_MAD", "TM_MAD", "DISK_TYPE", "COMPATIBLE_SYS_DS")
"""What no step "Custom Variables" has."""


def update(version: str, template: Mapping[str, Any]) -> Optional[Dict[str, str]]:
    """Return the template that Update sends when nothing is changed; None if the form cannot be finished."""
    form, keeps_others = VERSIONS[version]["form"], VERSIONS[version]["keeps_others"]
    if template.get("CEPH_HOST"):
        return None  # a field of many values gets one text: "Has errors", on a page without fields
    sent = {"NAME": template["NAME"], "TYPE": template["TYPE"], "TM_MAD": "semishared"}
    if template["TYPE"] != "SYSTEM_DS":
        sent["DS_MAD"] = "semishared"
    for name, value in template.items():
        is_cache = name.startswith("CACHE_") and template.get("CACHE_ENABLE") != "YES"
        if name in form and not is_cache and name != "LVM_THIN_ENABLE":
            sent[name] = value
        elif name == "COMPATIBLE_SYS_DS":
            sent[name] = ",".join(value.split(", "))
        elif keeps_others and name not in (*OF_OTHER_STEPS, *form):
            sent[name] = value
    return sent
