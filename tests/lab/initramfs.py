# SPDX-License-Identifier: Apache-2.0
"""Boot Debian's kernel on an emulated processor: what it need not do, which of its modules are needed, in
which order, its initramfs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
SIGNED = b"~Module signature appended~\n"
# Left out, since each takes an emulated processor long: certificates, patches of the kernel, tests of it by
# itself, addresses that differ each time, types for BPF (of the kernel and of each module), probes, files
# that say what can be traced (it looks through all of it again for each module), giving back the memory of
# what it booted from. no_timer_check: an emulated timer that a busy machine lets wait is not a broken one,
# for which Linux would panic.
QUICK = (
    "mitigations=off nokaslr no_timer_check random.trust_cpu=on tsc=reliable cryptomgr.notests "
    "init_on_alloc=0 noreplace-smp"
    " retain_initrd initcall_blacklist=load_system_certificate_list,load_revocation_certificate_list"
    ",btf_module_init,cubictcp_register,init_kprobe_trace,tracer_init_tracefs"
    ",bpf_rstat_kfunc_init,kfunc_init,bpf_prog_test_run_init,bpf_tcp_ca_kfunc_init,bpf_key_sig_kfuncs_init"
)


def modules(release: str, wanted: Sequence[str]) -> list[Path]:
    """Return the files of the modules `wanted` and of what they need, in the order to load them."""
    top = Path("/lib/modules", release)
    needs: dict[str, list[str]] = {}
    for line in (top / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    files = {Path(path).stem: path for path in needs}
    order: list[str] = []
    for name in wanted:
        if name not in files:
            continue  # built in, or unknown to this kernel version
        # modules.dep lists the nearest need first, so the reverse is the order to load in
        order += [path for path in [*reversed(needs[files[name]]), files[name]] if path not in order]
    return [top / path for path in order]


def put(modules: Sequence[Path], folder: Path) -> None:
    """Put modules into a folder of an initramfs that is there, and into its file `order` their names."""
    for module in modules:
        (folder / module.name).write_bytes(_unsigned(module.read_bytes()))
    (folder / "order").write_text("".join(module.stem + "\n" for module in modules))


def _unsigned(module: bytes) -> bytes:
    """Return a module without the signature at its end, which an emulated processor would take long to
    verify; a kernel asks for none.
    """
    if not module.endswith(SIGNED):
        return module
    # struct module_signature (include/linux/module_signature.h): its last four bytes are how long the
    # signature is.
    header = len(module) - len(SIGNED) - 12
    return module[: header - int.from_bytes(module[header + 8 : header + 12], "big")]


def pack(tree: Path) -> bytes:
    """Return a directory as initramfs, not compressed: a guest would take longer to unpack it than QEMU to
    read it.
    """
    names = "\n".join(sorted(str(path.relative_to(tree)) for path in tree.rglob("*")))
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"],
        input=names.encode(),
        cwd=tree,
        check=True,
        capture_output=True,
    )
    return packed.stdout
