# SPDX-License-Identifier: Apache-2.0
"""Web servers as they are: `stat` and `cp` ask the same client, curl, and nothing shows a password; and other
machines, by ssh.
"""

from __future__ import annotations

import base64
import http.server
import lzma
import os
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Callable, Iterator

import pytest

from images import made
from images.test_formats import arrives
from semishared.errors import BadArguments
from semishared.tools import curl
from tools.test_datastore import Store
from tools.test_refusal import HOST

MiB = 1 << 20
SECRET = "gehe%20im"


class Handler(http.server.BaseHTTPRequestHandler):
    body = b""
    bodies: dict[str, bytes] = {}
    seen: list[tuple[str, str]] = []
    """Paths and user agents."""
    arguments: list[bytes] = []
    """Command lines of all curls while they were asked."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        agent = self.headers.get("User-Agent", "")
        self.seen.append((self.path, agent))
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "comm").read_text() == "curl\n":
                    self.arguments.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/image")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        code = 200
        if "urllib" in agent:
            code = 403
        wanted = "Basic " + base64.b64encode(b"ci:gehe im").decode()
        if self.path.startswith("/private") and self.headers.get("Authorization") != wanted:
            code = 401
        body = b"" if code != 200 else self.bodies.get(self.path.split("?")[0], self.body)
        given = self.headers.get("Range", "")
        if given and code == 200:
            first = int(given.removeprefix("bytes=").split("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            body = body[first:]
        else:
            self.send_response(code)
        if "no-length" in self.path:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


class Server6(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6


@pytest.fixture()
def server(store: Store) -> Iterator[str]:
    Handler.body = store.image("origin", "qcow2", 8 * MiB).read_bytes()
    Handler.seen.clear()
    Handler.arguments.clear()
    Handler.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()


def uploaded(store: Store, url: str) -> bytes:
    """Upload as oned does; return all that the actions said."""
    said = b""
    for action in ("stat", "cp"):
        done = store.run(action, PATH=url, SIZE=8)
        assert done.returncode == 0, done.stderr.decode()
        assert action == "cp" or done.stdout == b"8\n"
        said += done.stderr
    return said


@pytest.mark.parametrize(
    "path",
    [
        "x(1).qcow2",
        "a;b!c*d$e.qcow2",
        "ümlaut-日本.qcow2",
        "with blank.qcow2",
        "it's.qcow2",
        "a[1]{2}.qcow2",
        "moved",
    ],
)
@pytest.mark.fault(51, "stat and cp fetch what curl fetches: any name, past servers that turn Python away")
def test_name_that_a_url_may_have(store: Store, server: str, path: str) -> None:
    uploaded(store, f"http://{server}/{path}")
    assert all(agent.startswith("curl/") for _, agent in Handler.seen)
    asked = {path for path, _ in Handler.seen if path != "/image"}
    assert len(asked) == 1, "stat and cp have asked for the same"


@pytest.mark.fault(51, "a password in a URL is used, and is in no line and on no command line")
def test_password_is_used_and_not_shown(store: Store, server: str) -> None:
    said = uploaded(store, f"http://ci:{SECRET}@{server}/private?token=abcd")
    assert SECRET.encode() not in said and b"abcd" not in said and b"ci:***@" in said
    assert Handler.arguments, "no curl was seen"
    assert not any(b"gehe" in line or b"abcd" in line for line in Handler.arguments)


@pytest.mark.parametrize("action", ["stat", "cp"])
@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://ci:falsch@{at}/private", "SS026"),
        ("http://ci:falsch@127.0.0.1:1/x", "SS026"),
        ("http://ci:falsch@no-such-host.invalid/x", "SS026"),
        ("http://ci:falsch@[::1/x", "SS001"),
        ("http://ci:fal\x07sch@{at}/x", "SS001"),
        ("http://ci:fal/sch@{at}/x", "SS001"),
    ],
)
def test_failure_does_not_show_the_password(
    store: Store, server: str, action: str, url: str, error: str
) -> None:
    done = store.run(action, PATH=url.format(at=server), SIZE=8)
    assert done.returncode == 1
    said = done.stderr.decode()
    assert said.startswith(f"{error} "), said
    assert "falsch" not in said and "fal" not in said and "sch@" not in said, said


def test_address_of_ipv6(store: Store) -> None:
    Handler.body = store.image("origin", "qcow2", 8 * MiB).read_bytes()
    try:
        running = Server6(("::1", 0), Handler)
    except OSError:
        pytest.skip("no IPv6 here")
    with running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        uploaded(store, f"http://[::1]:{running.server_port}/x.qcow2")
        running.shutdown()


def test_certificate_that_nobody_knows(store: Store, tmp_path: Path) -> None:
    """It is refused by a line that says what to do; with a checksum the content speaks for itself."""
    Handler.body = store.image("origin", "qcow2", 8 * MiB).read_bytes()
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    argv = ["openssl", "req", "-x509", *words, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(argv, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.socket = context.wrap_socket(running.socket, server_side=True)
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"https://localhost:{running.server_port}/x.qcow2"
        for action in ("stat", "cp"):
            store.fails(action, "SS026", "certificate", "SHA256", PATH=url, SIZE=8)
        sums = subprocess.run(["sha256sum"], input=Handler.body, capture_output=True, check=True).stdout
        for action in ("stat", "cp"):
            done = store.run(action, PATH=url, SIZE=8, attributes={"SHA256": sums.split()[0].decode()})
            assert done.returncode == 0, done.stderr.decode()
        secret = url.replace("https://", "https://ci:geheim@")
        done = store.run("stat", PATH=secret, attributes={"SHA256": "0" * 64})
        assert done.returncode == 1 and b"geheim" not in done.stderr, "a password goes to who it is for"
        running.shutdown()


@pytest.mark.parametrize("kind", ["xz", "zst"])
def test_size_of_a_packed_disk_behind_a_url(store: Store, server: str, tmp_path: Path, kind: str) -> None:
    """By the index of xz, for which the end is asked for, and the first frame of zstd: not by all of it."""
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(range(256)) * 4096 * 3 + bytes(200 * MiB))
    if kind == "xz":
        Handler.bodies["/disk"] = lzma.compress(plain.read_bytes(), preset=0)
    else:
        subprocess.run(["zstd", "-q", "-1", str(plain), "-o", str(tmp_path / "p.zst")], check=True)
        Handler.bodies["/disk"] = (tmp_path / "p.zst").read_bytes()
    assert store.ok("stat", PATH=f"http://{server}/disk") == "203"
    source, _ = store.cp(f"http://{server}/disk", SIZE=203)
    assert source.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("packing", ["", "gzip", "xz", "zstd"])
@pytest.mark.parametrize("told", [True, False], ids=["length", "no length"])
@pytest.mark.fault(51, "stat reads of a VHDX behind a URL as much as tells its size")
def test_vhdx_behind_a_url(store: Store, server: str, raw: Path, packing: str, told: bool) -> None:
    whole = made.vhdx(raw.read_bytes())
    if packing:
        whole = subprocess.run([packing, "-c", "-1"], input=whole, capture_output=True, check=True).stdout
    Handler.bodies["/disk" if told else "/disk-of-no-length"] = whole
    arrives(store, f"http://{server}/disk{'' if told else '-of-no-length'}", raw)


def test_vhdx_behind_a_url_is_judged_by_its_beginning(store: Store, server: str, content: bytes) -> None:
    whole = made.vhdx(content)
    for name, body, error_id, word in (
        ("child", made.vhdx(content, parent=True), "SS021", "a parent image"),
        ("open", made.vhdx(content, log=True), "SS077", "not closed"),
        ("short", whole[: 100 << 10], "SS077", "its tables"),
        ("cut", whole[: 2 * MiB + 4096], "SS077", "one of its regions"),
        ("far", made.vhdx(content, metadata_at=40 * MiB), "SS003", "upload it unpacked from a file"),
        ("other", whole.replace(b"metadata", b"METADATA"), "SS077", "without its size"),
    ):
        Handler.bodies[f"/{name}"] = body
        store.fails("stat", error_id, word, PATH=f"http://{server}/{name}")


@pytest.mark.parametrize("packing", ["", "gzip"])
@pytest.mark.fault(51, "stat reads of a disk on another machine as much as tells its size, packed or not")
def test_vhdx_on_another_machine(
    store: Store, sshd: Callable[[str], int], raw: Path, packing: str, tmp_path: Path
) -> None:
    sshd("")
    store.path = os.environ["PATH"]  # with the ssh that knows HOST
    whole, other = made.vhdx(raw.read_bytes()), tmp_path / "other"
    other.mkdir()
    store.template["SAFE_DIRS"] = f"ssh://{HOST}:{other}"
    if packing:
        whole = subprocess.run([packing, "-c", "-1"], input=whole, capture_output=True, check=True).stdout
    (other / "disk.vhdx").write_bytes(whole)
    arrives(store, f"ssh://{HOST}:{other}/disk.vhdx", raw)
    (other / "short.vhdx").write_bytes(made.vhdx(raw.read_bytes())[: 100 << 10])
    store.fails("stat", "SS077", PATH=f"ssh://{HOST}:{other}/short.vhdx")


def test_page_of_a_server_is_refused(store: Store, server: str) -> None:
    Handler.bodies["/login.qcow2"] = b"<!DOCTYPE html><title>Sign in</title>"
    for action in ("stat", "cp"):
        store.fails(action, "SS076", "HTML", PATH=f"http://{server}/login.qcow2", SIZE=8)


def test_cut_off_file_on_a_server_is_refused(store: Store, server: str) -> None:
    Handler.bodies["/cut.qcow2"] = Handler.body[:-64]
    Handler.bodies["/cut.qcow2"] = Handler.body[: 300 << 10]
    store.fails("cp", "SS077", "cut off", PATH=f"http://{server}/cut.qcow2", SIZE=8)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h/x", "http://h/x"),
        ("http://u:p@h/x", "http://u:***@h/x"),
        ("http://u@h/x", "http://u@h/x"),
        ("http://u:p@q@h/x", "http://u:***@h/x"),
        ("http://u:p/q@h/x", "http://***@h/x"),
        ("https://h:8/x?sig=1#f", "https://h:8/x?..."),
        ("http://h/a@b", "http://h/a@b"),
        ("/var/tmp/x?y", "/var/tmp/x?y"),
        ("ssh://u@h:/x", "ssh://u@h:/x"),
    ],
)
def test_url_as_lines_show_it(url: str, shown: str) -> None:
    assert curl.masked(url) == shown


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://h\\x/", "http://a b/", "http://[x]/", "http://h:x/"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadArguments):
        curl.config(url)


def test_url_cannot_add_a_line_to_the_configuration_of_curl() -> None:
    with pytest.raises(BadArguments):
        curl.config('http://h/"\noutput = "/x')
    assert curl.config('http://h/"a\\').decode() == 'url = "http://h/%22a%5C"\n'
