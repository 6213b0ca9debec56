# SPDX-License-Identifier: Apache-2.0
"""What a plan yields and gets back: one exchange after the other with the machines, oned and the log.

A plan is a generator. It yields the work of a machine, gets one answer per step, and decides what comes next:

    def clone(host: str, bridge: str, image: ImageRef, disk: DiskRef) -> Plan:
        seen = yield from ask(host, SeeImage(image))
        if not seen.frozen:
            yield On(bridge, (FreezeImage(image),))
        yield On(host, (PrepareVm(disk.vm, disk.vm_dir), CopyImage(disk, image, 0)))

A failure on a machine is raised in the plan, at its `yield`. So an undo is an `except SemisharedError` around
that `yield`, which yields the undo and raises again; never a `finally` or a `with`, which a rehearsal would
run through too.

front/action.py and vmm/on_host.py carry plans out, rehearsal.py only lets them look. A rehearsal ends where
a plan reads the answer of a step that acts; one that it merely hands on (to Say) does not end it. Plans of
parts return what they found: `generation = yield from staged(...)`.
"""

from __future__ import annotations

from typing import Any, Callable, Generator, Iterable, Tuple, TypeVar, Union

from ..named import NamedTuple
from .refs import Step

Lines = Iterable[Tuple[str, str]]
"""Lines of the log: (level, text), level as Report calls it: info, warn, error."""


class On(NamedTuple):
    """One message to one machine: it carries out `steps`, one after the other, and answers each."""

    machine: str
    steps: tuple[Step, ...]


class While(NamedTuple):
    """Two machines at once: the only step of `first` waits (RestGuest) until `then` is done. Given (answers,
    answers).
    """

    first: On
    then: On


class File(NamedTuple):
    """A file on the front-end, whose bytes a step is to get, and their hash."""

    path: str
    sha256: str


class Download(NamedTuple):
    """The output of OpenNebula's downloader for `url`, streamed to the front-end."""

    url: str


class Feed(NamedTuple):
    """Like On, and the bytes of `source` follow, to the last step, which receives; no step can ask."""

    target: On
    source: Union[File, Download]


class Fetch(NamedTuple):
    """Like On, and the front-end keeps what its only step sends, for a Feed. Given (answers, File)."""

    source: On


class Relay(NamedTuple):
    """The only step of `source` sends to the only step of `target`. Given what the source says (`sent`).

    The target waits for an End: until it is told that it has the whole, it has nothing.
    """

    source: On
    target: On
    most: int = 0
    """Most bytes that may come, by the sizes in oned; 0 for no limit."""


class End(NamedTuple):
    """Tell the target of a Relay the expected hash; on any other, or none, it gives up. Given its answers."""

    machine: str
    sha256: str


class Here(NamedTuple):
    """Work of this very process: a step of model/store/datastore_steps.py, on a host of
    model/vm/hypervisor_steps.py. Given what that returns.
    """

    step: Step


class AskOned(NamedTuple):
    """A question to oned in the middle of a plan: `what` is vm, image or datastore. Given that object.

    Or it is front_ends: given the addresses of the other front-ends of this zone.
    """

    what: str
    id: int


class Say(NamedTuple):
    """Lines for the log, made by `lines` from answers. Given nothing; a rehearsal passes over it."""

    lines: Callable[..., Lines]
    about: Tuple[Any, ...] = ()


Exchange = Union[On, While, Feed, Fetch, Relay, End, Here, AskOned, Say]
Plan = Generator[Exchange, Any, None]
T = TypeVar("T")
Part = Generator[Exchange, Any, T]
"""Part of a plan, which returns a T to the plan that yields from it."""


def ask(machine: str, step: Step[T], after: tuple[Step, ...] = ()) -> Part[T]:
    """Have a machine carry out steps; return the answer to the last."""
    answers = yield On(machine, (*after, step))
    answer: T = answers[-1]
    return answer


def here(step: Step[T]) -> Part[T]:
    """Have this process carry out a step; return its answer."""
    answer: T = yield Here(step)
    return answer


def agree(machine: str) -> On:
    """Return the message without a step: a machine of another version refuses it before any work is done."""
    return On(machine, ())


def warn(text: str) -> Say:
    """Return a warning that is known already."""
    return Say(lambda: [("warn", text)])


def drive(plan: Part[T], do: Callable[[Exchange], Any]) -> T:
    """Give a plan the results, or exceptions, of `do` for all that it yields; return the plan's result."""
    given: Any = None
    error: Exception | None = None
    try:
        while True:
            wanted = plan.throw(error) if error else plan.send(given)
            given, error = None, None
            try:
                given = do(wanted)
            except Exception as e:  # noqa: BLE001 - the plan decides what to make of it
                error = e
    except StopIteration as e:
        return e.value  # type: ignore[no-any-return]
    finally:
        plan.close()
