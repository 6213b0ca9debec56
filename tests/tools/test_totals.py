# SPDX-License-Identifier: Apache-2.0
"""Of how many bytes work is, where that is known before it ends: what `semishared jobs` has a share of."""

from __future__ import annotations

import http.server
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from semishared.disk import backup, epochs
from semishared.intake import source, unpack
from semishared.model import steps as s
from semishared.model.job_steps import Job, far
from semishared.named import to_data
from semishared.tools import curl, progress, qemu_img
from store.benches import DirBench
from tools.test_commits import lent_qcow2
from tools.world import MiB, World, qemu_io

BODY = os.urandom(3 * MiB)


@pytest.fixture()
def bench(tmp_path: Path) -> DirBench:
    return DirBench(tmp_path)


@contextmanager
def goals(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[progress.Goal]]:
    """Yield what was said to be moved while programs convert."""
    found: List[progress.Goal] = []
    inner = qemu_img.convert

    def convert(*words: Any, **how: Any) -> None:
        inner(*words, **how)
        found.append(progress.goal)

    monkeypatch.setattr(qemu_img, "convert", convert)
    yield found


@pytest.mark.fault(75, "a backup of a VM that is off says how much it is, as its copies are one movement")
def test_a_backup_of_a_vm_that_is_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = [world.disk(5, number) for number in (0, 1)]
    for disk in disks:
        qemu_io(world.clone(world.image(), disk), "qcow2", "write -P 0x66 4M 8M")
    at = f"{disks[0].vm_dir}/backup"
    step = s.BackUp(5, disks[0].vm_dir, at, ("0", "1"), "", "NONE", "<VM/>")
    with goals(monkeypatch) as found:
        backup.back_up(step, epochs.arrived(-1, [step], {}), None)
    assert len(found) == 2 and found[0] is found[1]
    copies = sum(os.stat(path).st_size for path in Path(at).iterdir() if path.name.startswith("disk."))
    assert copies > 16 * MiB and 0.9 < copies / found[0].of <= 1.1


@pytest.mark.fault(75, "a commit that makes an image anew says how much it is")
def test_a_commit_of_a_whole_image(bench: DirBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, _ = lent_qcow2(bench, tmp_path)
    it.write("write -P 1 3M 2M")
    with goals(monkeypatch) as found:
        assert it.commit().how == "whole"
    (goal,) = found
    assert goal.target == "the store"
    assert 0.9 < os.stat(it.image.source).st_size / goal.of <= 1.1


class Handler(http.server.BaseHTTPRequestHandler):
    """A server that says the length of what it sends, or does not, behind a redirection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", self.path.replace("/moved", ""))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/known":
            self.send_header("Content-Length", str(len(BODY)))
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(BODY)


@pytest.mark.fault(75, "a download says how much it is, where its server does")
@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize(("path", "of_bytes"), [("known", 3 * MiB), ("moved/known", 3 * MiB), ("other", 0)])
def test_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, of_bytes: int, least: int
) -> None:
    said: List[tuple[int, int]] = []
    inner = progress.reached
    monkeypatch.setattr(progress, "reached", lambda done, of: (said.append((done, of)), inner(done, of)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = source.Source(f"http://127.0.0.1:{server.server_port}/{path}", {}, False, "")
        target = tmp_path / "download"
        source.fetch(asked, str(target), unpack.Bound(0, 64 * MiB), least, 60)
        server.shutdown()
    assert target.read_bytes() == BODY
    assert {of for _, of in said} == {of_bytes} and said[-1][0] == len(BODY)
    assert [path.name for path in tmp_path.iterdir()] == ["download"]


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (b"", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", 12),
        (b"HTTP/2 200\r\ncontent-length:7\r\n\r\n", 7),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 9\r\n\r\nHTTP/1.1 200 OK\r\nVia: HTTP/1.1 x\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999999\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nX: content-length: 5\r\n\r\n", 0),
    ],
)
def test_the_length_that_a_server_says(heads: bytes, said: int) -> None:
    assert curl.length(heads) == said


def test_what_is_not_known_is_said() -> None:
    job = Job(7, "1", "cp", "upload", -1, -1, "image 7", "", "", 3 * MiB, 0, MiB, 0, "oned")
    assert far(job) == "3.0 MiB of ?"
    assert far(Job(**{**to_data(job), "of": 6 * MiB})) == "50 %"
