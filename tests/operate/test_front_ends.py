# SPDX-License-Identifier: Apache-2.0
"""The key of front-ends where there are two, which know each other by oned's zone and speak over ssh: h1
plays the second.
"""

from __future__ import annotations

import json
from typing import Any, Iterator

import pytest

from lab.cloud import Cloud
from lab.layout import FRONT_END_KEY

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KEY = "/var/lib/one/.one/semishared_key"


@pytest.fixture()
def two(cloud: Cloud) -> Iterator[Cloud]:
    rpc = cloud.oned.rpc
    assert rpc
    before = rpc.zones
    servers = "".join(
        f"<SERVER><ENDPOINT>http://{name}:2633/RPC2</ENDPOINT></SERVER>" for name in ("fe", "h1")
    )
    rpc.zones = f"<ZONE><ID>0</ID><NAME>OpenNebula</NAME><SERVER_POOL>{servers}</SERVER_POOL></ZONE>"
    cloud.lab.node("h1").run(["mkdir", "-p", "-m", "700", "/var/lib/one/.one"])
    yield cloud
    rpc.zones = before
    cloud.lab.node("h1").run(["rm", "-rf", "/var/lib/one/.one"])
    cloud.lab.fe.path(KEY).write_bytes(FRONT_END_KEY)


def of_key(cloud: Cloud) -> list[tuple[str, str, str]]:
    """Return what doctor says of the key: machine, what, and the words after the user in what mends it."""
    done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=60)
    rows: Any = json.loads(done.stdout)["findings"]
    return [
        (row["machine"], row["what"], row["mend"].partition(": ")[2]) for row in rows if KEY in row["what"]
    ]


@pytest.mark.fault(
    27,
    "front-ends of one group have one key: setup makes no second, doctor names who has none, "
    "another, or an open one",
)
def test_front_ends_have_one_key(two: Cloud) -> None:
    fe, h1 = two.lab.fe, two.lab.node("h1")
    ((machine, what, mend),) = of_key(two)
    assert machine == "h1" and what == f"{KEY} is missing: hosts cannot be fenced from here"
    fe.run(mend.split())
    assert of_key(two) == [] and h1.path(KEY).read_bytes() == FRONT_END_KEY
    h1.run(["chmod", "644", KEY])
    assert "has mode 644: others may read or change it" in of_key(two)[0][1]
    h1.run(["chmod", "600", KEY])
    fe.path(KEY).write_bytes(b"5f" * 32)
    assert "is another than that of fe" in of_key(two)[0][1]

    # This one has lost its key: the other's counts.
    fe.run(["rm", KEY])
    done = fe.run([COMMAND, "setup", "--key"], check=False)
    said = done.stderr.decode()
    assert done.returncode == 2 and f"h1 has one: scp -p h1:{KEY} {KEY}" in said
    fe.run(["scp", "-p", f"h1:{KEY}", KEY])
    assert of_key(two) == []
    fe.run(["rm", KEY])
    h1.run(["rm", KEY])
    made = fe.run([COMMAND, "setup", "--key"]).stdout.decode()
    assert made == f"made {KEY}\neach front-end needs the same: scp -p {KEY} h1:{KEY}\n"
