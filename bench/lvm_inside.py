# SPDX-License-Identifier: Apache-2.0
"""What extents.py has a kernel host do: volumes of LVM whose extents lie where it says, read, written, moved.
Orders in, answers out.

Run by `python3 -I`, so nothing of this repository is imported.
"""

import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time

MiB = 1 << 20
CONFIG = """devices { use_devicesfile=0 types=["virtblk",64] external_device_info_source="none" obtain_device_list_from_udev=0 scan_lvs=0 }
activation { udev_sync=0 udev_rules=0 monitoring=0 } global { use_lvmpolld=0 } backup { backup=0 archive=0 }"""  # noqa: E501
GROUP = "pool"
TEXT = "/run/volumes"
SEEKERS = 3
"""Threads that seek, as Bonnie has them."""


def lvm(command, *words):
    argv, env = (
        ["lvm", command, "-q", "--config", CONFIG, *words],
        {**os.environ, "LVM_SUPPRESS_FD_WARNINGS": "1"},
    )
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join([command, *words])}: {done.stderr[-500:]}")
    return done.stdout


def group(devices):
    """Make a volume group of devices, in extents of 1 MiB."""
    for module in ("dm-mod", "dm-mirror"):
        subprocess.run(["modprobe", module], check=True)
    os.makedirs("/run/lvm", exist_ok=True)
    lvm("pvcreate", "-y", *devices)
    lvm("vgcreate", "-s", "1M", GROUP, *devices)


def volumes(maps):
    """Let there be volumes whose extents lie as `maps` says: {name: [[device, extent of it], ...]}; none of
    them is active.
    """
    lvm("vgchange", "-an", GROUP)
    lvm("vgcfgbackup", "-f", TEXT, GROUP)
    with open(TEXT) as file:
        text = file.read()
    if "\tlogical_volumes {" in text:
        start = text.index("\tlogical_volumes {")
        text = text[:start] + text[text.index("\n\t}\n", start) + 4 :]
    # physical_volumes { pv0 { id = ... device = "/dev/vda" ...
    names, last = {}, ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[1] == "{":
            last = words[0]
        elif words[:2] == ["device", "="]:
            names[words[2].strip('"')] = last
    said = ["\tlogical_volumes {\n"]
    for number, (name, extents) in enumerate(maps.items()):
        ident = f"{number:06d}-0000-0000-0000-0000-0000-{number:06d}"
        said.append(
            f'{name} {{\nid = "{ident}"\nstatus = ["READ", "WRITE", "VISIBLE"]\nflags = '
            f"[]\nsegment_count = {len(extents)}\n"
        )
        for at, (device, extent) in enumerate(extents):
            said.append(
                f"segment{at + 1} {{\nstart_extent = {at}\nextent_count = 1\ntype = "
                f'"striped"\nstripe_count = 1\n'
            )
            said.append(f'stripes = ["{names[device]}", {extent}]\n}}\n')
        said.append("}\n")
    said.append("}\n")
    # Before the end of the group: what follows it are the creator's name and the time.
    end = text.index("\n}\n") + 1
    with open(TEXT, "w") as file:
        file.write(text[:end] + "".join(said) + text[end:])
    lvm("vgcfgrestore", "-f", TEXT, "--force", "-y", GROUP)


def activate(name):
    """Give a volume's map to the kernel; return the seconds."""
    began = time.monotonic()
    lvm("lvchange", "-ay", f"{GROUP}/{name}")
    subprocess.run(["dmsetup", "mknodes"], check=True)
    return time.monotonic() - began


def path_of(name):
    return name if name.startswith("/") else f"/dev/mapper/{GROUP}-{name}"


def write(name, mib):
    """Write blocks of 1 MiB through the page cache, until all have arrived; return MiB per second."""
    block = os.urandom(MiB)
    fd = os.open(path_of(name), os.O_WRONLY)
    began = time.monotonic()
    for at in range(mib):
        os.pwrite(fd, block, at * MiB)
    os.fsync(fd)
    seconds = time.monotonic() - began
    os.close(fd)
    return mib / seconds


def read(name, mib):
    """Read all through the page cache, which knows nothing of it yet; return MiB per second."""
    fd = os.open(path_of(name), os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    for at in range(mib):
        os.pread(fd, MiB, at * MiB)
    seconds = time.monotonic() - began
    os.close(fd)
    return mib / seconds


def seek(name, mib, seconds):
    """Let three threads read 4 KiB anywhere; return how often they did per second."""
    counts, began = [0] * SEEKERS, time.monotonic()

    def one(number):
        draw, buffer = random.Random(number), mmap.mmap(-1, 4096)
        fd = os.open(path_of(name), os.O_RDONLY | os.O_DIRECT)
        while time.monotonic() < began + seconds:
            os.preadv(fd, [buffer], draw.randrange(mib * 256) * 4096)
            counts[number] += 1
        os.close(fd)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(SEEKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def characters(name, mib, program, start=0):
    """Have a program (characters.c) write each character by itself; return MiB per second."""
    began = time.monotonic()
    subprocess.run([program, path_of(name), str(start), str(mib)], check=True)
    return mib / (time.monotonic() - began)


def transferred(name, mib, program=""):
    """Write to a volume that exists, from when its map goes to the kernel on; return MiB per second."""
    lvm("lvchange", "-an", f"{GROUP}/{name}")
    began = time.monotonic()
    activate(name)
    if program:
        characters(name, mib, program)
    else:
        write(name, mib)
    return mib / (time.monotonic() - began)


def clean(extents, program=""):
    """Write to a volume of which each extent is allocated when it is written for the first time; return MiB
    per second.
    """
    began = time.monotonic()
    for at, (device, extent) in enumerate(extents):
        where = f"{device}:{extent}"
        if at == 0:
            lvm("lvcreate", "-y", "-Zn", "-Wn", "-n", "clean", "-l", "1", GROUP, where)
            subprocess.run(["dmsetup", "mknodes"], check=True)
        else:
            lvm("lvextend", "-l", "+1", f"{GROUP}/clean", where)
        if program:
            characters("clean", 1, program, at)
            continue
        fd = os.open(path_of("clean"), os.O_WRONLY)
        os.pwrite(fd, os.urandom(MiB), at * MiB)
        os.fsync(fd)
        os.close(fd)
    seconds = time.monotonic() - began
    lvm("lvremove", "-y", f"{GROUP}/clean")
    return len(extents) / seconds


def move(name, mib, more, moves, seed):
    """Let a device come, and extents go where they are to be, while somebody writes and reads; return
    {"seconds", "ios", "wait", "wrong"}.

    It is drawn by `seed` where. `moves`: [[from, [extents there], to], ...].
    """
    written: dict[int, bytes] = {}
    ended, found = threading.Event(), {"ios": 0, "wait": 0.0, "wrong": 0}
    blocks = mib * 16

    def stand_in():
        draw, buffer = random.Random(seed), mmap.mmap(-1, 65536)
        fd = os.open(path_of(name), os.O_RDWR | os.O_DIRECT)
        while not ended.is_set():
            at, began = draw.randrange(blocks), time.monotonic()
            if at in written and draw.random() < 0.5:
                os.preadv(fd, [buffer], at * 65536)
                found["wrong"] += buffer[:8] != written[at]
            else:
                mark = int(found["ios"]).to_bytes(8, "little")
                buffer[:] = mark * 8192
                os.pwritev(fd, [buffer], at * 65536)
                written[at] = mark
            found["ios"] += 1
            found["wait"] = max(found["wait"], time.monotonic() - began)
        for at, mark in written.items():
            os.preadv(fd, [buffer], at * 65536)
            found["wrong"] += buffer[:] != mark * 8192
        os.close(fd)

    thread = threading.Thread(target=stand_in)
    thread.start()
    began = time.monotonic()
    try:
        lvm("vgextend", "-y", GROUP, more)
        for source, extents, target in moves:
            ranges = "".join(f":{extent}-{extent}" for extent in extents)
            lvm("pvmove", "--atomic", "-i", "1", "--alloc", "anywhere", f"{source}{ranges}", target)
    finally:
        found["seconds"] = time.monotonic() - began
        ended.set()
        thread.join()
    return found


def shrink(name, device):
    """Let a volume go, and a device after it."""
    lvm("lvremove", "-y", f"{GROUP}/{name}")
    lvm("vgreduce", GROUP, device)
    lvm("pvremove", "-y", device)


def lies(name):
    """Return on which device each extent of a volume lies."""
    said = lvm(
        "lvs",
        "--noheadings",
        "--separator",
        "|",
        "-o",
        "seg_start_pe,seg_size_pe,devices",
        "--segments",
        f"{GROUP}/{name}",
    )
    found = {}
    for line in said.splitlines():
        start, size, device = line.strip().split("|")
        for at in range(int(start), int(start) + int(size)):
            found[at] = device.split("(")[0]
    return [found[at] for at in range(len(found))]


for number, order in enumerate(sys.stdin):
    words = json.loads(order)
    print(json.dumps(globals()[words[0]](*words[1:])), f"== {number}", sep="\n", flush=True)
