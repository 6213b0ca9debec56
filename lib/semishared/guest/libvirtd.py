# SPDX-License-Identifier: Apache-2.0
"""The one way to libvirt where a guest runs: its Python binding, a limit per call, events, no polling.

A call of the binding returns only when libvirtd answers. So each call runs in a thread, and the caller waits
for a limited time. A thread without an answer is abandoned with its connection, and does not delay the end of
this process. A call without a limit (a live migration) ends with its connection: keepalives detect a libvirtd
that hangs or is cut off.

Questions about other things than running guests go through virsh (guest/virsh.py): only hosts with such
guests need the binding.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Dict, Generic, Iterator, List, Optional, Tuple, TypeVar

from ..errors import NoSpace, SemisharedError, ToolFailed, ToolMissing, ToolTimeout
from ..tools import progress, this_machine
from ..tools.beneath import readable
from .virsh import site

if TYPE_CHECKING:
    import queue  # most actions wait for nothing

    Heard = queue.SimpleQueue[Tuple[Any, ...]]

T = TypeVar("T")
HERE = ""
"""Stands for the URI of this host's own libvirt."""
ANSWER_S = 20
"""Limit for a quick call: libvirtd answers at once, or its host is gone."""
DEAF_S = 5
KEEPALIVE = (5, 6)
"""Seconds between two, and how many may stay unanswered: virsh's defaults."""
_loading = threading.Lock()
_loaded: list[Any] = []
_idle: Dict[str, List[Any]] = {}
"""Idle connections by URI. Each serves one call at a time: a hung call blocks those beside it."""


def binding() -> Any:
    """Return the module libvirt with its event loop running; raise ToolMissing."""
    with _loading:
        if not _loaded:
            this_machine.reach_bindings()
            try:
                import libvirt
            except ImportError:
                raise ToolMissing(f"python3-libvirt is not installed on {os.uname().nodename}") from None
            # Otherwise libvirt writes each error to stderr, which oned reads.
            libvirt.registerErrorHandler(lambda *_: None, None)
            libvirt.virEventRegisterDefaultImpl()
            threading.Thread(target=_hear, args=(libvirt,), daemon=True).start()
            atexit.register(_leave)
            _loaded.append(libvirt)
    return _loaded[0]


def _hear(libvirt: Any) -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def _leave() -> None:
    """Drop the idle connections without a close, which could hang, here or in the binding's destructors."""
    for connection in itertools.chain(*_idle.values()):
        connection._o = None


def _taken(uri: str) -> Any:
    idle = _idle.setdefault(uri, [])
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return _opened(uri)
        if connection.isAlive() == 1:
            return connection


def _opened(uri: str) -> Any:
    libvirt = binding()
    # Only libvirt's auth.conf can hold credentials; there is no user to ask for others.
    told = [libvirt.VIR_CRED_AUTHNAME, libvirt.VIR_CRED_PASSPHRASE, libvirt.VIR_CRED_REALM]
    connection = libvirt.openAuth(uri, [told, lambda *_: -1, None], 0)
    try:
        connection.setKeepAlive(*KEEPALIVE)
    except libvirt.libvirtError:
        pass  # libvirt's test driver has no connection
    return connection


@contextmanager
def connected(uri: str) -> Iterator[Any]:
    """Yield a connection to the libvirt at `uri`, for this block alone; it may hang, so only in a Call."""
    connection = _taken(uri)
    try:
        yield connection
    finally:
        _idle[uri].append(connection)


class Call(Generic[T]):
    """A call in progress: `do` runs with a connection to the libvirt at `uri`; `what` is for the error."""

    def __init__(self, what: str, do: Callable[[Any], T], uri: str = HERE) -> None:
        self._libvirt, self._what, self._uri = binding(), what, uri or site().uri
        self._where = (
            f"libvirt at {uri}" if uri and uri != site().uri else f"libvirt on {os.uname().nodename}"
        )
        self._ended = threading.Event()
        self._error: Optional[BaseException] = None
        self._answer: Any = None
        threading.Thread(target=self._run, args=(do,), daemon=True).start()

    def _run(self, do: Callable[[Any], T]) -> None:
        try:
            with connected(self._uri) as connection:
                self._answer = do(connection)
        except BaseException as e:  # noqa: BLE001 - `answer` raises it
            self._error = e
        self._ended.set()

    def is_over(self, within_s: float) -> bool:
        """Return True if the call ends within `within_s` seconds."""
        with progress.waiting():
            return self._ended.wait(within_s)

    def answer(self, timeout_s: float) -> T:
        """Return the result of `do`; raise ToolTimeout after `timeout_s` s, or ToolFailed, NoSpace."""
        if not self.is_over(timeout_s):
            raise ToolTimeout(f"{self._where} did not answer within {timeout_s:.0f} s: {self._what}")
        if isinstance(self._error, self._libvirt.libvirtError):
            raise self._failure(self._error)
        if self._error:
            raise self._error
        return self._answer  # type: ignore[no-any-return]

    def _failure(self, error: Any) -> SemisharedError:
        said = readable(" ".join((error.get_error_message() or str(error)).split()))
        if "No space left on device" in said or "Disk quota exceeded" in said:
            return NoSpace(f"{self._where}: {said}")
        return ToolFailed(f"{self._where}: {self._what}: error: {said}")


def call(what: str, do: Callable[[Any], T], uri: str = HERE, timeout_s: float = ANSWER_S) -> T:
    """Run `do` with a connection to libvirt, as Call, and return its result."""
    return Call(what, do, uri).answer(timeout_s)


@contextmanager
def hearing(what: str, event: str, domain: Callable[[Any], Any]) -> Iterator[Heard]:
    """Collect, within the block, VIR_DOMAIN_EVENT_ID_`event` of the domain that `domain` looks up."""
    from queue import SimpleQueue

    heard: Heard = SimpleQueue()
    number = getattr(binding(), f"VIR_DOMAIN_EVENT_ID_{event}")

    def note(_connection: Any, _domain: Any, *said: Any) -> None:
        heard.put(said[:-1])

    def listen(_: Any) -> Tuple[Any, int]:
        connection = _taken(site().uri)
        return connection, connection.domainEventRegisterAny(domain(connection), number, note, None)

    connection, callback = call(f"event {what}", listen)
    try:
        yield heard
    finally:
        try:
            call(f"event {what}", lambda _: connection.domainEventDeregisterAny(callback), timeout_s=DEAF_S)
            _idle[site().uri].append(connection)
        except SemisharedError:
            pass  # the event ends with its abandoned connection
