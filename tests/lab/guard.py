# SPDX-License-Identifier: Apache-2.0
"""Keep one lab and take it down when its owner goes away, however the owner goes.

Started by `Lab.up()` in a session of its own, so that Ctrl-C does not reach it. It starts the lab's keeper
(the process everything in the lab descends from) and waits: for the end of its standard input, which is a
pipe the owner holds open, for SIGTERM, or for the end of the keeper. Whichever comes, it removes the lab and
ends. An owner that writes `stay` into the pipe leaves the lab standing.

    python3 -m lab.guard STATE_DIRECTORY
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from lab import state

HERE = Path(__file__).resolve().parent


def main(folder: Path) -> int:
    """Run until the lab has to go; print the keeper's pid once it is there."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    keeper = subprocess.Popen(
        # Should this guard be killed itself, the keeper and with it every process of the lab dies too.
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child"]
        + ["bash", str(HERE / "keeper.sh")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdout
    try:
        line = keeper.stdout.readline()
        if line:
            pid = int(line)
            record = state.read(folder)
            record.update(keeper=pid, keeper_start=state.started(pid))
            record.update(guard=os.getpid(), guard_start=state.started(os.getpid()))
            state.write(folder, record)
            print(pid, flush=True)
            os.set_blocking(keeper.stdout.fileno(), False)
            watched = [woken, keeper.stdout.fileno(), 0]
            while True:
                ready = select.select(watched, [], [])[0]
                if woken in ready or keeper.stdout.fileno() in ready:
                    break
                if 0 in ready:
                    if os.read(0, 4096) != b"stay":
                        break
                    watched.remove(0)
    finally:
        state.remove(folder)
        keeper.wait()
    return 0 if line else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
