# SPDX-License-Identifier: Apache-2.0
"""One stream of packets to many hosts at once: udp-sender and udp-receiver of udpcast.

What was measured of them (docs/explanation/staging.md), and what this module does about it:

    their exit codes say nothing about receivers     each receiver counts its packets
    a port that is used twice delivers foreign data  every packet has the session's id and MAC
                                                     (wire/packets.py)
    a dead receiver stalls all                       --retries-until-drop, and a slow receiver leaves
                                                     by itself
    they wait for ever in many ways                  every wait here has a limit; the programs die with their
                                                     session
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Callable

from ..errors import HostUnreachable, SemisharedError, StreamFailed, ToolTimeout
from ..model.base.steps import FetchBases, StreamBases, Streamed
from ..tools import compress, progress
from ..tools.effects import point
from ..tools.program import Program, started
from ..tools.rate_limit import stand_back
from ..tools.run import run, widen
from ..wire import packets
from . import manifests, peers
from .bases_in_progress import Account, Orders, Targets

TICK_S = 0.03
LATE_S = 0.06
"""A longer tick measures how busy the host's processors are, not its network; it is ignored."""
WINDOW = 50
"""Ticks that count: the last 1.5 s."""
LEAST = 64 << 10
"""Bytes in the window below which there is no speed: other multicast traffic may account for them."""
NETSTAT = "/proc/net/netstat"
MOST = 32 << 10


def octets(text: bytes) -> int:
    """Return the bytes of multicast and broadcast in the text of /proc/net/netstat (snmp counters)."""
    _, _, rest = text.partition(b"\nIpExt:")
    names, _, rest = rest.partition(b"\nIpExt:")
    counts = dict(zip(names.split(), rest.partition(b"\n")[0].split()))
    return int(counts.get(b"InMcastOctets", 0)) + int(counts.get(b"InBcastOctets", 0))


class Arrival:
    """Measures, within a `with` block, the speed at which multicast data arrives.

    udp-sender sends a slice of packets and waits until every receiver has it. So on average all hosts receive
    at the pace of the slowest. A fast host receives each slice in a burst and then waits; a slow one receives
    all the time. Only the speed within bursts tells them apart.
    """

    def __init__(self) -> None:
        self._ticks: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Arrival:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        fd = os.open(NETSTAT, os.O_RDONLY)
        try:
            before, at = octets(os.pread(fd, MOST, 0)), time.monotonic()
            while not self._ended.wait(TICK_S):
                count, now = octets(os.pread(fd, MOST, 0)), time.monotonic()
                self.note(count - before, now - at)
                before, at = count, now
        finally:
            os.close(fd)

    def note(self, count: int, seconds: float) -> None:
        """Note that `count` bytes came within the last `seconds`."""
        if seconds < LATE_S:
            self._ticks.append((count, seconds))

    def speed(self) -> int:
        """Return bytes per second, weighted by bytes so that pauses do not count; 0 below LEAST bytes."""
        ticks = list(self._ticks)
        total = sum(count for count, _ in ticks)
        return int(sum(count * count / seconds for count, seconds in ticks) / total) if total >= LEAST else 0


START_S = 20
"""Seconds until the first packet that receiver and sender wait for each other."""
SILENT_S = 15
"""Seconds without data after which a receiver goes on without the stream."""
MAX_WAIT_S = 3
"""Seconds that the sender waits for receivers which do not show up, from the first that does."""
HELLO_MS = 200
"""Milliseconds between two of the sender's looks for receivers; udp-sender's default is two seconds."""
SLICE, SMALL_SLICE = 512, 128
"""Packets that all receivers must acknowledge; `--full-duplex` sends the next slice meanwhile."""
RETRIES = 11
"""How often udp-sender asks a silent receiver before it drops it: 10 took one second, 12 three."""
LEAVE_S = 1.0
"""Seconds that a receiver has to sign off: on SIGINT it does, and the others do not wait for it."""
STALLED_S = 20
"""Seconds without reading its input after which udp-sender is given up."""
RECEIVE_BUFFER = 4 << 20
QUEUE = 12
"""Packets between the network and this host's disk. A receiver leaves the stream when they overflow."""


def device(host: str) -> str:
    """Return the network interface that leads to `host`; raise HostUnreachable."""
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
    except OSError as e:
        raise HostUnreachable(f"{host} has no IPv4 address: {e}") from None
    routes = json.loads(run(["ip", "-json", "route", "get", str(address)]) or "[]")
    name = str(routes[0].get("dev", "")) if routes else ""
    if not name or name == "lo":
        raise HostUnreachable(f"no network leads from {os.uname().nodename} to {host}")
    return name


def slice_size() -> int:
    """Return the packets of a slice: a busy receiver's socket buffer has to hold a whole one.

    Linux limits a socket's buffer to net.core.rmem_max (socket(7)). The sender takes its own limit for that
    of its receivers. With the default, 208 KiB, a third of large slices was sent again.
    """
    try:
        with open("/proc/sys/net/core/rmem_max", encoding="ascii") as file:
            return SLICE if int(file.read()) >= RECEIVE_BUFFER // 2 else SMALL_SLICE
    except (OSError, ValueError):
        return SMALL_SLICE


def send(step: StreamBases, poll: Callable[[], object]) -> Streamed:
    """Multicast the shared extents; return codec, plain and packed bytes, and the share that was resent."""
    stand_back()
    options: dict[str, object] = {
        "--interface": device(step.toward),
        "--portbase": step.portbase,
        "--min-receivers": step.receivers,
        "--max-wait": MAX_WAIT_S,
        "--start-timeout": START_S,
        "--retries-until-drop": RETRIES,
        "--rexmit-hello-interval": HELLO_MS,
        "--default-slice-size": slice_size(),
        **({"--max-bitrate": step.rate * 8} if step.rate else {}),
    }
    argv = ["udp-sender", "--nokbd", "--nopointopoint", "--full-duplex", *_words(options)]
    sealer = packets.Sealer(packets.Session.of(step.session), compress.NONE)
    name, plain, packed = step.codec, 0, 0
    with started(argv, feed=True) as program:
        point("stream sender started")
        for text, group in manifests.shared(step):
            if text:
                pieces = sealer.manifest(text)
            else:
                if not plain:
                    first = b"".join(item.content for item in group)
                    name = sealer.compressor = compress.choose(step.codec, step.unpacks, first, step.rate)
                plain += sum(len(item.content) for item in group)
                pieces = sealer.extents(group)
            for piece in pieces:
                program.write(piece, _given_up(program, poll))
                packed += len(piece)
                progress.count("sent", len(piece))
        program.end_of_input()
        _wait(program, poll)
    return Streamed(name, plain, packed, *_statistics(program.last))


def _words(options: dict[str, object]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


def _given_up(program: Program, poll: Callable[[], object]) -> Callable[[float], None]:
    def stalled(seconds: float) -> None:
        progress.touch()
        if program.code is not None:
            raise StreamFailed(f"udp-sender ended with code {program.code}: {program.said(300)}")
        _check(poll)
        if seconds > STALLED_S:
            raise ToolTimeout(f"udp-sender took nothing for {STALLED_S} s: {program.said(300)}")

    return stalled


def _check(poll: Callable[[], object]) -> None:
    message = poll()
    if isinstance(message, dict) and message.get("end") == "stream":
        raise StreamFailed("the session was ended")


def _wait(program: Program, poll: Callable[[], object]) -> None:
    """Wait until udp-sender ends; raise ToolTimeout if it reports no progress for STALLED_S seconds."""
    seen, since = "", time.monotonic()
    while program.wait(0.5) is None:
        progress.touch()
        _check(poll)
        said = program.said(200)
        if said != seen:
            seen, since = said, time.monotonic()
        if time.monotonic() - since > STALLED_S:
            raise ToolTimeout(f"udp-sender does not end: {said}")


def _statistics(said: str) -> tuple[float, int]:
    """Return the percentage of packets that udp-sender sent again, and how many receivers it dropped."""
    found = re.findall(r"re-xmits=\d+ \( *([0-9.]+)%\)", said)
    dropped = sorted(set(re.findall(r"[Dd]ropp(?:ing|ed) client #(\d+)", said)))
    return float(found[-1]) if found else 0.0, len(dropped)


def receive(step: FetchBases, target: Targets, account: Account, orders: Orders) -> None:
    """Receive the session's stream; raise StreamFailed if this host leaves it or it is incomplete."""
    portbase, sender = step.stream
    options = {"--interface": device(str(sender)), "--portbase": portbase, "--rcvbuf": RECEIVE_BUFFER}
    argv = ["udp-receiver", "--nokbd", "--no-progress", *_words(options)]
    opener = packets.Opener(packets.Session.of(step.session))
    with started(argv, feed=False) as program, Arrival() as arrival:
        point("stream receiver started")
        account.tell("stream", now=True, ready=True)
        try:
            _take(program, arrival, opener, target, account, orders)
        except BaseException:
            program.interrupt(LEAVE_S)
            raise
        code = program.wait(10)
        if code:
            raise StreamFailed(f"udp-receiver ended with code {code}: {program.said(300)}")
        if not target.has_shared:
            raise StreamFailed("the stream ended before all had come")


def _take(
    program: Program,
    arrival: Arrival,
    opener: packets.Opener,
    target: Targets,
    account: Account,
    orders: Orders,
) -> None:
    """Store the packets of the stream until it ends; raise StreamFailed if this host leaves it."""
    coming = _Packets(program, opener)
    had, came = target.count, 0
    while True:
        packet = coming.next(0.25)
        orders.hear()
        if orders.stream_ended:
            raise StreamFailed("left the stream: this host, or the stream, is too slow")
        if packet:
            peers.take(target, opener, packet)
        # Also bytes of an incomplete packet: at a low rate one takes a while.
        more, came = coming.came - came, coming.came
        progress.count("received", more)
        account.came("stream", had, more, speed=arrival.speed())
        had = target.count
        if coming.over():
            return
        # udp-receiver's own timeouts would cost it one more system call for each packet.
        limit = SILENT_S if came else START_S
        if time.monotonic() - coming.heard > limit:
            raise StreamFailed(f"nothing of the stream came for {limit} s")


class _Packets:
    """Packets that a program writes, read ahead by a thread: a slow disk does not slow the sender."""

    def __init__(self, program: Program, opener: packets.Opener) -> None:
        self._program, self._opener = program, opener
        self.came, self.heard = 0, time.monotonic()
        """Bytes so far, and when the last arrived (time.monotonic())."""
        self._error: SemisharedError | None = None
        self._has_ended = False
        self._queue: queue.Queue[packets.Packet | None] = queue.Queue(QUEUE)
        widen(program.fd)
        self._fd = os.dup(program.fd)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                count = os.readv(self._fd, [self._opener.get_buffer()])
                if not count:
                    break
                self.came, self.heard = self.came + count, time.monotonic()
                packet = self._opener.buffer_updated(count)
                if packet:
                    self._queue.put(packet, timeout=3)
        except queue.Full:
            self._error = StreamFailed("left the stream: this host's disk is slower than it")
            self._program.interrupt(LEAVE_S)
        except SemisharedError as e:
            self._error = e
        finally:
            os.close(self._fd)
            self._has_ended = True
            if not self._queue.full():
                self._queue.put(None)

    def next(self, within_s: float) -> packets.Packet | None:
        """Return the next packet; None if none came within `within_s` seconds, or the stream is over."""
        try:
            return self._queue.get(timeout=within_s)
        except queue.Empty:
            return None

    def over(self) -> bool:
        """Return True if every packet was taken and no more will come; raise the reader's error, if any."""
        if not self._has_ended or not self._queue.empty():
            return False
        if self._error:
            raise self._error
        return True
