# SPDX-License-Identifier: Apache-2.0
"""A LUKS image, and the libvirt secret that opens it, as docs/how-to/luks.md has them made."""

from __future__ import annotations

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


def luks_image(cloud: Cloud) -> str:
    """Make a LUKS image of 16 MiB on the front-end that begins with DATA for whoever has the passphrase."""
    plain = cloud.upload_file("luks-plain")
    cloud.upload_file("luks-key").write_bytes(PASSPHRASE)
    plain.write_bytes(DATA.ljust(16 << 20, b"\0"))
    path, key = "/var/tmp/luks.img", ["--object", f"secret,id=key,file={KEY}"]
    argv = ["qemu-img", "create", "-q", "-f", "luks", *key, "-o", "key-secret=key,iter-time=10", path, "16M"]
    for left in range(20, -1, -1):
        # It times its key derivation, and gives up where a busy machine gives it no CPU just then.
        done = cloud.lab.fe.run(argv, user="root", check=False)
        if not done.returncode:
            break
        assert left and b"accurate CPU usage" in done.stderr, done.stderr.decode()
    into = f"driver=luks,key-secret=key,file.driver=file,file.filename={path}"
    cloud.lab.fe.run(["qemu-img", "convert", "-n", "-f", "raw", *key, "--target-image-opts", "/var/tmp/luks-plain", into], user="root")
    plain.unlink()
    cloud.give(cloud.upload_file("luks.img"))
    return path
