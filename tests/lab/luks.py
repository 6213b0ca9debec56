# SPDX-License-Identifier: Apache-2.0
"""LUKS images, and the libvirt secret that opens one, as docs/how-to/luks.md has them made."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import List

from lab import caches
from lab.cloud import Cloud
from lab.guest import METAL, content
from lab.node import Node

SECRET = "8f2c1a4e-5d0b-4b3e-9a57-0c6f3e2d1b40"
PASSPHRASE = b"not for everybody"
VIRSH = ["virsh", "-q", "-c", "qemu:///system"]
KEY = "/var/tmp/luks-key"
KIB = 64
DATA = content("luks", 0, KIB)
DIRECT = {"ARCH": "x86_64", "MACHINE": "pc", **METAL.os}
"""OS of a VM whose kernel is the host's, so that no disk has to be bootable."""
XML = f"""<secret ephemeral='no' private='yes'>
  <uuid>{SECRET}</uuid>
  <usage type='volume'><volume>disk.luks</volume></usage>
</secret>
"""


def know(node: Node, passphrase: bytes) -> None:
    """Define the secret on a host, as docs/how-to/luks.md says."""
    for name, text in (("secret.xml", XML.encode()), ("luks-key", passphrase)):
        node.path(f"/var/tmp/{name}").write_bytes(text)
    node.run([*VIRSH, "secret-define", "/var/tmp/secret.xml"], user="root")
    node.run([*VIRSH, "secret-set-value", SECRET, "--file", KEY, "--plain"], user="root")


def forget(node: Node) -> None:
    """Undefine the secret on a host."""
    node.run([*VIRSH, "secret-undefine", SECRET], user="root", check=False)


def secret(passphrase: bytes) -> List[str]:
    """Return the words by which a program of QEMU gets a passphrase, as object `key`."""
    return ["--object", f"secret,id=key,data={passphrase.decode()}"]


def container(path: Path, size: int, passphrase: bytes) -> Path:
    """Write an empty LUKS image to `path`. Made once, since QEMU times its key derivation for a second or two
    each time.
    """
    kept = caches.CACHE / f"luks-{size}-{hashlib.sha256(passphrase).hexdigest()[:16]}"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made"
            options = ["-o", "key-secret=key,iter-time=10"]
            argv = [
                "qemu-img",
                "create",
                "-q",
                "-f",
                "luks",
                *secret(passphrase),
                *options,
                str(made),
                str(size),
            ]
            for left in range(20, -1, -1):
                # It gives up where a busy machine gives it no CPU just then.
                done = subprocess.run(argv, stderr=subprocess.PIPE, check=False)
                if not done.returncode:
                    break
                assert left and b"accurate CPU usage" in done.stderr, done.stderr.decode()
            caches.put(kept, made.read_bytes())
    subprocess.run(["cp", "--sparse=always", str(kept), str(path)], check=True)
    return path


def luks_image(cloud: Cloud) -> str:
    """Make a LUKS image of 16 MiB on the front-end that begins with DATA for whoever has the passphrase."""
    plain = cloud.upload_file("luks-plain")
    plain.write_bytes(DATA.ljust(16 << 20, b"\0"))
    path, key = "/var/tmp/luks.img", secret(PASSPHRASE)
    container(cloud.upload_file("luks.img"), 16 << 20, PASSPHRASE)
    into = f"driver=luks,key-secret=key,file.driver=file,file.filename={path}"
    cloud.lab.fe.run(
        ["qemu-img", "convert", "-n", "-f", "raw", *key, "--target-image-opts", "/var/tmp/luks-plain", into],
        user="root",
    )
    plain.unlink()
    cloud.give(cloud.upload_file("luks.img"))
    return path
