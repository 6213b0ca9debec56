# SPDX-License-Identifier: Apache-2.0
"""A host side that has waited for its next plan, or for who takes what it sends, longer than a plan may stand
still.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from semishared.config import Config
from semishared.model import steps as s
from semishared.model.device import steps as device_steps
from semishared.wire.messages import RELEASE
from semishared.wire.session import Session
from tools.world import World, qemu_io

LIB = Path(__file__).resolve().parents[2] / "lib"
WAITED = f"""
import sys
sys.path.insert(0, {str(LIB)!r})
from semishared.host import service
from semishared.tools import progress
progress.last -= 10 ** 6
service.ALIVE_S = 0.001
sys.exit(service.main())
"""


def test_a_plan_that_comes_late_has_not_stood_still(tmp_path: Path) -> None:
    """It is looked all the time whether it does, and many steps take a while to be read."""
    steps = [s.to_data(device_steps.ListDevices(str(tmp_path)))] * 4000
    plan = {"version": RELEASE, "action": "test", "seq": -1, "answers": False, "last": True, "steps": steps}
    words = [sys.executable, "-I", "-c", WAITED]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as host:
        assert host.stdin and host.stdout
        host.stdin.write(json.dumps({"plan": plan}).encode() + b"\n")
        host.stdin.flush()
        events = [json.loads(line)["event"] for line in host.stdout]
    assert [event for event in events if event != "alive"] == ["done"] and host.returncode == 0


def test_a_sender_to_whom_nobody_has_listened_has_not_been_silent(world: World) -> None:
    """Whoever passes on what it sends waits for who takes it, perhaps for long; meanwhile it cannot even say
    that it is alive.
    """
    world.clone(world.image(), world.disk())
    qemu_io(f"{world.disk().path}.snap/0", "qcow2", "write -P 0x41 0 32M")
    vm_dir, limit = world.disk().vm_dir, 2
    with Session("localhost", "mv", Config(hosts_silence_timeout_s=limit)) as source:
        source.begin([s.SendVm(5, vm_dir)])
        received, message = 0, source.read()
        while isinstance(message, bytes):
            if received in range(4 << 20, 5 << 20):
                time.sleep(limit + 1)
            received += len(message)
            message = source.read()
        assert received > 32 << 20
        source.finish()
