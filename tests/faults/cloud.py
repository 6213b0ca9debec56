# SPDX-License-Identifier: Apache-2.0
"""A lab with the drivers installed, images in its store, and an oned that says what the test wants."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import xmlrpc.client
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape

from lab import Lab, Node, NodeProcess
from lab.forks import serve
from lab.oned.rpc import listen

STORE = "/var/lib/one/datastores/100"
SYSTEM = "/var/lib/one/datastores/101"
BASES = "/var/lib/one/datastores/.semishared"
REMOTES = "/var/lib/one/remotes"
Done = subprocess.CompletedProcess  # of bytes
PREFIXED = re.compile(r"(INFO|WARN|ERROR|DEBUG): \S+: ")
ANSWERED = re.compile(r"[A-Z]+: *[0-9]")


class Answers:
    """XML-RPC on the front-end's loopback: `texts[method, id]` is what one.*.info serves, whatever it is."""

    def __init__(self, pid: int) -> None:
        self.texts: Dict[Tuple[str, int], str] = {}
        answers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:  # noqa: N802 - name given by the base class
                parameters, method = xmlrpc.client.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = int(parameters[1]) if len(parameters) > 1 else -1  # type: ignore[arg-type]
                text = answers.texts.get((str(method).split(".")[1], number))
                reply = (
                    [True, text, 0]
                    if text is not None
                    else [False, f"Error getting {method} {number}", 0x400]
                )
                body = xmlrpc.client.dumps((reply,), methodresponse=True).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        listener = listen(("127.0.0.1", 2633), pid)
        self._server = ThreadingHTTPServer(("127.0.0.1", 2633), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = listener
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Cloud:
    """The lab and what a test asks of it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.fe = lab.fe
        self.h1, self.h2 = lab.hosts
        self.answers = Answers(lab.fe.pid)
        self._disks: Dict[int, Dict[int, int]] = {}
        self.answers.texts["hostpool", -1] = (
            "<HOST_POOL><HOST><NAME>h1</NAME></HOST><HOST><NAME>h2</NAME></HOST></HOST_POOL>"
        )
        for number in (100, 101):
            self.answers.texts["datastore", number] = f"<DATASTORE><ID>{number}</ID><TEMPLATE/></DATASTORE>"

    @classmethod
    @contextmanager
    def up(cls, forks: bool = False) -> Iterator[Cloud]:
        """Put it up; with `forks` the drivers are forked and not started (lab/forks.py), and copied and not
        installed.
        """
        with Lab.up(hosts=2) as lab:
            cloud = cls(lab)
            if forks:
                lab.put()
                serve(lab)
            else:
                lab.install()
            try:
                yield cloud
            finally:
                cloud.answers.close()

    # -- facts ----------------------------------------------------------------------------------

    def image(self, number: int, format: str = "raw", persistent: bool = False, attributes: str = "") -> None:
        """Let oned know an image."""
        self.answers.texts["image", number] = (
            f"<IMAGE><ID>{number}</ID><PERSISTENT>{int(persistent)}</PERSISTENT><FORMAT>{format}</FORMAT><DATASTORE_ID>100</DATASTORE_ID>"
            f"<TEMPLATE>{attributes}</TEMPLATE></IMAGE>"
        )

    def vm(self, number: int, disks: Dict[int, int], fs: str = "", lcm_state: int = 3, seq: int = 0) -> None:
        """Let oned know a VM; `disks` maps disk ids to image ids (-1: volatile)."""
        self._disks[number] = disks
        text = "".join(
            f"<DISK><DISK_ID>{disk}</DISK_ID><IMAGE_ID>{image}</IMAGE_ID><DATASTORE_ID>100</DATASTORE_ID><CLONE>{self._clone(image)}</CLONE>"
            f"<SIZE>8</SIZE><ORIGINAL_SIZE>8</ORIGINAL_SIZE><TM_MAD>semishared</TM_MAD><FS>{fs}</FS></DISK>"
            for disk, image in disks.items()
        )
        history = f"<HISTORY_RECORDS><HISTORY><SEQ>{seq}</SEQ><DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS>"
        self.answers.texts["vm", number] = (
            f"<VM><ID>{number}</ID><LCM_STATE>{lcm_state}</LCM_STATE><TEMPLATE>{text}</TEMPLATE>{history}</VM>"
        )

    def _clone(self, image: int) -> str:
        return "NO" if "<PERSISTENT>1" in self.answers.texts.get(("image", image), "") else "YES"

    # -- calls ----------------------------------------------------------------------------------

    def tm(self, action: str, *argv: str, stdin: bytes = b"", timeout: float = 60) -> Done[bytes]:
        """Run a transfer action as one_tm does."""
        self._source(action, argv)
        return self.fe.run(
            [f"{REMOTES}/tm/semishared/{action}", *argv], input=stdin, check=False, timeout=timeout
        )

    def _source(self, action: str, argv: Tuple[str, ...]) -> None:
        """Let oned know where the image is that an action is given: its SOURCE."""
        disk = argv[1].rpartition("/disk.")[2] if len(argv) > 2 else ""
        if action in ("clone", "ln") and disk.isdigit() and argv[2].isdigit():
            image = self._disks.get(int(argv[2]), {}).get(int(disk), -1)
            known = self.answers.texts.get(("image", image), "")
            source = f"<SOURCE>{escape(argv[0].partition(':')[2])}</SOURCE>"
            told = known.partition("<SOURCE>")[0].replace("</IMAGE>", "")
            self.answers.texts["image", image] = f"{told}{source}</IMAGE>" if known else ""

    def start(self, action: str, *argv: str, stdin: bytes = b"") -> NodeProcess:
        """Start a transfer action."""
        self._source(action, argv)
        process = self.fe.popen(
            [f"{REMOTES}/tm/semishared/{action}", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin
        process.stdin.write(stdin)
        process.stdin.close()
        process.stdin = None
        return process

    def kill_driver(self, driver: NodeProcess) -> None:
        """Kill the driver's own process on the front-end, and nothing else."""
        found = self.fe.run(["pgrep", "-f", f"{REMOTES}/tm/semishared/"]).stdout.split()
        assert len(found) == 1, found
        self.fe.run(["kill", "-KILL", found[0].decode()])
        driver.communicate(timeout=10)

    def node(self, name: str) -> Node:
        return self.lab.node(name)

    def datastore(
        self, action: str, image: str, attributes: str = "", data: Optional[bytes] = None
    ) -> Done[bytes]:
        """Run a datastore action as one_datastore does."""
        xml = (
            f"<DS_DRIVER_ACTION_DATA><IMAGE>{image}</IMAGE><DATASTORE><ID>100</ID><TYPE>0</TYPE><BASE_PATH>{STORE}</BASE_PATH>"
            f"<TEMPLATE>{attributes}</TEMPLATE></DATASTORE></DS_DRIVER_ACTION_DATA>"
        )
        stdin = base64.b64encode(xml.encode("utf-8", "surrogateescape")) if data is None else data
        return self.fe.run([f"{REMOTES}/datastore/semishared/{action}", "1"], input=stdin, check=False)

    def upload(self, content: bytes, name: str = "upload.raw", attributes: str = "") -> str:
        """Upload an image and return its SOURCE."""
        path = self.fe.path(f"/var/tmp/{name}")
        path.write_bytes(content)
        path.chmod(0o644)
        done = self.datastore("cp", f"<ID>1</ID><TYPE>0</TYPE><PATH>/var/tmp/{name}</PATH>", attributes)
        assert done.returncode == 0, done.stderr.decode()
        path.unlink()
        return done.stdout.decode().split()[0]

    def clone(
        self, source: str, vm: int = 7, disk: int = 0, host: str = "h1", timeout: float = 60
    ) -> Done[bytes]:
        return self.tm("clone", *self.clone_words(source, vm, disk, host), timeout=timeout)

    def clone_words(self, source: str, vm: int = 7, disk: int = 0, host: str = "h1") -> List[str]:
        return [f"fe:{source}", f"{host}:{SYSTEM}/{vm}/disk.{disk}", str(vm), "100"]

    def delete(self, vm: int = 7, host: str = "h1", disks: Sequence[int] = (0,)) -> None:
        """Delete a VM as oned does, disk by disk; it must succeed."""
        for disk in disks:
            done = self.tm("delete", f"{host}:{SYSTEM}/{vm}/disk.{disk}", str(vm), "100")
            assert done.returncode == 0, done.stderr.decode()
        done = self.tm("delete", f"{host}:{SYSTEM}/{vm}", str(vm), "101")
        assert done.returncode == 0, done.stderr.decode()

    def forget(self, *vms: int) -> None:
        """Clean the hosts by hand: VMs, bases, clones on the store."""
        for node in (self.fe, self.h1, self.h2):
            for directory in (*(f"{SYSTEM}/{vm}" for vm in vms), BASES):
                shutil.rmtree(node.path(directory), ignore_errors=True)
        for clones in self.fe.path(f"{STORE}/.semishared").glob("*/clones"):
            shutil.rmtree(clones)

    # -- what is there --------------------------------------------------------------------------

    def left_of(self, vm: int, *nodes: Node) -> List[str]:
        """Return what there is of a VM, or staged, on nodes and in the store."""
        mine = re.compile(
            rf"/101/{vm}(/|$)|/(leases|clones)/{vm}-|/\.staged-|\.(incoming|outgoing|removed)-{vm}(-|/|$)"
        )
        found: List[str] = []
        for node in nodes or (self.h1, self.h2, self.fe):
            for top in (SYSTEM, BASES, STORE):
                outside = str(node.path(top))
                for folder, folders, files in os.walk(outside):
                    paths = (top + os.path.join(folder, name)[len(outside) :] for name in (*folders, *files))
                    found += [path for path in paths if mine.search(path)]
        return found

    def images(self) -> List[str]:
        """Return the files in the store that look like images, and what uploads have left."""
        store, uploads = self.fe.path(STORE), self.fe.path(f"{STORE}/.semishared/.uploads")
        found = [f"{STORE}/{path.name}" for path in store.iterdir() if path.is_file()]
        found += [
            f"{STORE}/.semishared/.uploads/{path.name}"
            for path in (uploads.iterdir() if uploads.exists() else ())
        ]
        return sorted(found)

    def guest_sees(self, node: Node, path: str, format: str) -> bytes:
        """Return what a guest would read from a disk."""
        node.run(["qemu-img", "convert", "-f", format, "-O", "raw", path, "/tmp/guest-sees"])
        try:
            return node.path("/tmp/guest-sees").read_bytes()
        finally:
            node.run(["rm", "/tmp/guest-sees"])

    def hostsides(self, node: Node) -> List[int]:
        """Return the pids, inside the node, of host sides at work; of one that is forked also that of who
        asked for it.
        """
        words = ["sh", "-c", "pgrep -f '[s]emishared/hostside.py'; pgrep -x hostside.py"]
        return [int(word) for word in node.run(words, check=False).stdout.split()]

    def wait_for_hostside(self, node: Node) -> None:
        """Wait until a host side has begun, and for at most 10 s until it does nothing: what it needs is
        held.
        """
        until(lambda: bool(self.hostsides(node)), 60, f"a host side on {node.name}")
        deadline = time.monotonic() + 10
        before = self._worked(node)
        while time.monotonic() < deadline:
            time.sleep(0.5)
            now = self._worked(node)
            if all(
                state == "S" and ticks - before.get(pid, (state, 0))[1] <= 2
                for pid, (state, ticks) in now.items()
            ):
                break
            before = now

    def _worked(self, node: Node) -> Dict[str, Tuple[str, int]]:
        """Return for each host side its state, and its ticks of CPU time."""
        paths = [f"/proc/{pid}/stat" for pid in self.hostsides(node)]
        lines = node.run(["cat", *paths], check=False).stdout.decode().splitlines() if paths else []
        rows = [(line.split()[0], line.rpartition(")")[2].split()) for line in lines]
        return {pid: (fields[0], int(fields[11]) + int(fields[12])) for pid, fields in rows}

    def stopped(self, node: Node, program: str, known: Sequence[str] = ()) -> NodeProcess:
        """Begin to stop, inside the node, whatever begins with these words and is none of `known`; it prints
        its pid and ends.
        """
        script = (
            'while :; do for p in $(pgrep -f "^$0"); do case " $* " in *" $p "*) ;; '
            '*) kill -STOP "$p" && echo "$p" && exit;; esac; done; sleep 0.01; done'
        )
        return node.popen(["timeout", "60", "bash", "-c", script, program, *known], stdout=subprocess.PIPE)

    def wait_for_no_hostside(self, node: Node, seconds: float = 30) -> None:
        until(lambda: not self.hostsides(node), seconds, f"no host side on {node.name}")

    @contextmanager
    def held(self, node: Node, lock: str) -> Iterator[None]:
        """Hold a lock of the host's base store, so that whoever needs it waits."""
        node.run(["mkdir", "-p", f"{BASES}/locks"])
        holder = node.popen(
            ["flock", f"{BASES}/locks/{lock}", "sh", "-c", "echo held; exec sleep 600"],
            stdout=subprocess.PIPE,
        )
        assert holder.stdout
        try:
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()

    @contextmanager
    def small(self, node: Node, directory: str, size: str, fill: int = 0) -> Iterator[None]:
        """Put a small file system over a directory of a node, its first `fill` bytes taken."""
        node.run(["mkdir", "-p", directory])
        node.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "small", directory], user="root")
        try:
            if fill:
                node.run(
                    ["dd", "if=/dev/zero", f"of={directory}/filler", "bs=4096", f"count={fill // 4096}"],
                    check=False,
                )
            yield
        finally:
            # A host side that was turned away may still be ending.
            node.wait_for(["umount", directory], 30, user="root")
            # From now on it is a plain directory again, which nobody is to take for one that is not mounted.
            node.run(
                [
                    "rm",
                    "-f",
                    f"{os.path.dirname(directory)}/.semishared/mounted/{os.path.basename(directory)}",
                ]
            )


def until(true: Any, seconds: float, what: str, pause: float = 0.1) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause)


def one_line(done: Done[bytes], *words: str, code: int = 1) -> str:
    """Assert that a call failed as it must: exit code, one line for the user, with these words in it."""
    text = done.stderr.decode()
    plain = [line for line in text.splitlines() if not PREFIXED.match(line)]
    assert done.returncode == code, f"exit code {done.returncode}: {text}"
    assert len(plain) == 1, f"{len(plain)} lines for the user: {text}"
    assert not any(ANSWERED.match(line) for line in text.splitlines()), f"this line crashes oned: {text}"
    assert done.stdout == b"", f"on stdout: {done.stdout!r}"
    assert all(c.isprintable() for c in plain[0])
    assert re.match(r"SS\d{3} ", plain[0]) and text.splitlines()[0] == plain[0], text
    assert text.isascii(), text
    for word in words:
        assert word in plain[0], f"{word!r} is not in: {plain[0]}"
    return plain[0]
