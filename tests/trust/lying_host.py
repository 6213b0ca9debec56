# SPDX-License-Identifier: Apache-2.0
"""Stands where ssh stands: a host with system datastores and bases of its own, whose host side is the real
one, or lies as it was told.

<TOP>/hosts/<HOST>/101, .semishared    what that host sees below <TOP>/datastores
<TOP>/hosts/<HOST>/lie.json            {"step", "at": where in the answer, "by": what stands there instead}
and its like: lies.py
<TOP>/hosts/<HOST>/said.jsonl          what it has answered truly: (step, answer)
<TOP>/hosts/<HOST>/heard               all that it was sent
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List

OWN = ("101", "103", ".semishared")
SENT = 24 << 20
"""Bytes of a flood: more than any disk here has, and what a VM may have beside its disks."""


NESTED = b"[" * 100_000 + b"]" * 100_000
RAW: Dict[str, bytes] = {
    "nested": b'{"event": "done", "results": ' + NESTED + b"}\n",
    "nested as far as goes": b'{"event": "done", "results": ['
    + b'{"kept": ' * 400
    + b"1"
    + b"}" * 400
    + b"]}\n",
    "NaN": b'{"event": "done", "results": [NaN, -Infinity], "moved": {"read": NaN}}\n',
    "no answers": b'{"event": "done"}\n',
    "answers to more": b'{"event": "done", "results": [{}, {}, {}, {}, {}, {}, {}]}\n',
    "an error of no kind": b'{"event": "error", "id": ["SS011"], "detail": '
    + NESTED[:300]
    + NESTED[-300:]
    + b"}\n",
    "an error with ESC": json.dumps(
        {"event": "error", "id": "SS011", "detail": "\x1b]0;x\x07\x9b2J\r\n12 \ud800"}
    ).encode()
    + b"\n",
    "a question for what is none": b'{"event": "ask", "question": "base", "name": "../../../x", '
    b'"bases": [7], '
    b'"needed": "all"}\n',
    "no message": b"no message\n",
    "a line without end": b'{"event": "' + b"x" * (5 << 20),
}


def apart(top: Path, host: str) -> None:
    """Give this process the directories of that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(
        b"none", b"/", None, 0x4000 | 0x40000, None
    ):  # CLONE_NEWNS; MS_REC, MS_PRIVATE
        raise OSError(ctypes.get_errno(), "unshare")
    for name in OWN:
        own, place = top / "hosts" / host / name, top / "datastores" / name
        if own.is_dir() and libc.mount(str(own).encode(), str(place).encode(), None, 0x1000, None):  # MS_BIND
            raise OSError(ctypes.get_errno(), f"mount {own}")


def lied(value: Any, at: List[Any], by: Any) -> Any:
    """Return a value with another one at a place within."""
    if not at:
        return by
    if isinstance(value, dict):
        return {**value, at[0]: lied(value.get(at[0]), at[1:], by)}
    if isinstance(value, list) and isinstance(at[0], int) and at[0] < len(value):
        return [lied(one, at[1:], by) if number == at[0] else one for number, one in enumerate(value)]
    return value


class Lying:
    """Between a front-end and the host side that really is there."""

    def __init__(self, folder: Path, lie: Dict[str, Any], stdin: int, stdout: int) -> None:
        from semishared.wire.messages import Reader, Writer

        self.folder, self.lie = folder, lie
        self.ours, self.theirs = Reader(0), Writer(stdin)
        self.said, self.out = Reader(stdout), Writer(1)
        self.steps: List[str] = []
        self.stdin = stdin

    def pump(self) -> None:
        """Pass on what the front-end says."""
        with open(self.folder / "heard", "ab") as heard:
            while True:
                message = self.ours.read()
                if message is None:
                    os.close(self.stdin)
                    return
                if isinstance(message, bytes):
                    heard.write(message)
                    self.theirs.send_data(message)
                    continue
                heard.write(json.dumps(message).encode())
                plan = message.get("plan")
                if isinstance(plan, dict):
                    self.steps = [str(step["step"]) for step in plan["steps"]]
                    if self.outright(plan):
                        continue
                self.theirs.send(**message)

    def outright(self, plan: Dict[str, Any]) -> bool:
        """Answer a plan without carrying it out, if that is what is to be done."""
        answers = self.lie.get("answers", {})
        if not self.steps or not all(step in answers for step in self.steps):
            return False
        self.answer({"event": "done", "results": [answers[step] for step in self.steps], "moved": {}})
        return True

    def relay(self) -> None:
        """Pass on what the host side says, but for the lie."""
        while True:
            message = self.said.read()
            if message is None:
                return
            if isinstance(message, bytes):
                self.out.send_data(message)
            elif message.get("event") in ("done", "sent", "error"):
                self.answer(message)
            else:
                self.out.send(**message)

    def answer(self, message: Dict[str, Any]) -> None:
        done, results = message["event"] == "done", message.get("results")
        with open(self.folder / "said.jsonl", "a", encoding="utf-8") as file:
            for name, one in zip(self.steps, results if isinstance(results, list) else ()):
                file.write(json.dumps([name, one]) + "\n")
        wanted = self.lie.get("step")
        if wanted not in self.steps or (message["event"] == "sent") != (wanted == "SendVm"):
            self.out.send(**message)
            return
        how = self.lie.get("how")
        if how:
            self.misbehave(how)
        elif message["event"] == "sent":
            said = lied(message, self.lie["at"], self.lie["by"])
            self.out.send(**{**(said if isinstance(said, dict) else {}), "event": "sent"})
        elif done:
            number = self.steps.index(wanted)
            answer = lied(message["results"][number], self.lie["at"], self.lie["by"])
            self.out.send(**{**message, "results": lied(message["results"], [number], answer)})
        else:
            # It has failed, and says that it has not.
            self.out.send(
                event="done",
                moved={},
                results=[self.lie["by"] if name == wanted else {} for name in self.steps],
            )

    def misbehave(self, how: str) -> None:
        """Say what is no answer."""
        if how in RAW:
            self.out._write(RAW[how])
        elif how == "data":
            for _ in range(SENT >> 20):
                self.out.send_data(b"\xee" * (1 << 20))
        elif how == "words":
            while True:
                self.out.send(event="progress", done=1, of=2)
        elif how == "silence":
            time.sleep(60)
        os._exit(0)


def examined(folder: Path, lie: Dict[str, Any]) -> int:
    """Say of this machine what preflight.py would, but for the lie."""
    import base64

    from semishared.install import preflight

    answer = preflight.examine(
        preflight.Question(*json.loads(base64.b64decode(sys.argv[-1].rpartition(" ")[2])))
    )
    with open(folder / "said.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(["examine", answer]) + "\n")
    if lie.get("step") == "examine" and lie.get("how") == "data":
        for _ in range(SENT >> 20):
            os.write(1, b"\xee" * (1 << 20))
    elif lie.get("step") == "examine" and "how" in lie:
        os.write(1, RAW[lie["how"]][:60_000] + b"\n")
    else:
        os.write(
            1,
            json.dumps(
                lied(answer, lie["at"], lie["by"]) if lie.get("step") == "examine" else answer
            ).encode(),
        )
    return 0


def main() -> int:
    from semishared.host import service

    top, host = Path(__file__ if len(sys.argv) < 2 else sys.argv[1]), sys.argv[sys.argv.index("--") + 1]
    folder = top / "hosts" / host
    apart(top, host)
    try:
        lie = json.loads((folder / "lie.json").read_text())
    except FileNotFoundError:
        lie = None
    if "hostside.py" not in sys.argv[-1]:
        return examined(folder, lie or {}) if " - " in sys.argv[-1] else 0
    if lie is None:
        return service.main()
    theirs_in, stdin = os.pipe()
    stdout, theirs_out = os.pipe()
    if not os.fork():
        os.setpgid(0, 0)
        os.dup2(theirs_in, 0)
        os.dup2(theirs_out, 1)
        os.closerange(3, 1000)
        os._exit(service.main())
    os.close(theirs_in)
    os.close(theirs_out)
    lying = Lying(folder, lie, stdin, stdout)
    threading.Thread(target=lying.pump, daemon=True).start()
    try:
        lying.relay()
    except (BrokenPipeError, OSError):
        pass
    return 0


if __name__ == "__main__":
    os._exit(main())
