# SPDX-License-Identifier: Apache-2.0
"""What a kernel host runs for its test: start programs, feed them, say what they say. JSON lines on a virtio
port.

    -> {"id", "start": [argv], "env": {}, "user": [uid, gid] or null, "cwd"}
                                        <- {"id", "out": base64} {"id", "err": base64} {"id", "end": code}
    -> {"id", "input": base64}  {"id", "close": true}                          stdin of that program
    -> {"id", "signal": number}                                                to its process group
    -> {"id", "put": path, "content": base64, "mode": number}                  <- {"id", "end": 0} or {"id",
    "err": ...} {"id", "end": 1}

Nothing waits for anything else: what hangs in a file system hangs alone.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from binascii import a2b_base64, b2a_base64

if False:  # it takes an emulated processor long to load
    from typing import Any, BinaryIO

PORT = "kernel-host"
CHUNK = 1 << 16


def encoded(data: bytes) -> str:
    """Return base64."""
    return b2a_base64(data, newline=False).decode()


def port() -> str:
    """Return the device of our port."""
    ports = "/sys/class/virtio-ports"
    for name in os.listdir(ports):
        with open(f"{ports}/{name}/name", encoding="ascii") as file:
            if file.read().strip() == PORT:
                return f"/dev/{name}"
    raise FileNotFoundError(PORT)


class Agent:
    """The conversation on the port."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._inputs: dict[int, queue.Queue[bytes | None]] = {}

    def say(self, **message: Any) -> None:
        """Send one message."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def serve(self) -> None:
        """Do as told until the other side is gone."""
        self.say(hello=os.uname().release)
        pending = b""
        while True:
            data = os.read(self._fd, CHUNK)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "start" in message or "put" in message:
            self._inputs[number] = queue.Queue()
            work = self._start if "start" in message else self._put
            threading.Thread(target=self._try, args=(work, message), daemon=True).start()
        elif "input" in message:
            self._inputs[number].put(a2b_base64(message["input"]))
        elif "close" in message:
            self._inputs[number].put(None)
        elif "signal" in message and number in self._running:
            try:
                os.killpg(self._running[number].pid, message["signal"])
            except ProcessLookupError:
                pass

    def _try(self, work: Any, message: dict[str, Any]) -> None:
        try:
            code = work(message)
        except OSError as e:
            self.say(id=message["id"], err=encoded(f"{e}\n".encode()))
            code = 127
        self.say(id=message["id"], end=code)

    @staticmethod
    def _put(message: dict[str, Any]) -> int:
        os.makedirs(os.path.dirname(message["put"]), exist_ok=True)
        with open(message["put"], "wb") as file:
            file.write(a2b_base64(message["content"]))
        os.chmod(message["put"], message["mode"])
        return 0

    def _start(self, message: dict[str, Any]) -> int:
        number = message["id"]
        who: dict[str, Any] = {}
        if message["user"]:
            uid, gid = message["user"]
            who = {"user": uid, "group": gid, "extra_groups": []}
        process = subprocess.Popen(
            message["start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=message["env"],
            cwd=message["cwd"],
            start_new_session=True,
            **who,
        )
        self._running[number] = process
        assert process.stdin and process.stdout and process.stderr
        threads = [
            threading.Thread(target=self._pass_on, args=(number, key, stream), daemon=True)
            for key, stream in (("out", process.stdout), ("err", process.stderr))
        ]
        for thread in threads:
            thread.start()
        threading.Thread(target=self._feed, args=(number, process.stdin), daemon=True).start()
        code = process.wait()
        for thread in threads:
            # Who was started in the background may hold these open for ever.
            thread.join(1)
        del self._running[number]
        return code

    def _pass_on(self, number: int, key: str, stream: BinaryIO) -> None:
        while True:
            data = os.read(stream.fileno(), CHUNK)
            if not data:
                return
            self.say(**{"id": number, key: encoded(data)})

    def _feed(self, number: int, stream: BinaryIO) -> None:
        try:
            while True:
                data = self._inputs[number].get()
                if data is None:
                    break
                stream.write(data)
                stream.flush()
        except OSError:
            pass  # it has ended, or does not read
        try:
            stream.close()
        except OSError:
            pass


if __name__ == "__main__":
    os.environ.setdefault("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    Agent(port()).serve()
    sys.exit(0)
