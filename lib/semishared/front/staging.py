# SPDX-License-Identifier: Apache-2.0
"""Lead a staging session from the front-end, in rounds, until no host can be helped any more.

Each host has its own list of bases, which may be the same for all. A session leaves nothing behind: each
host's part, and what it has started, ends with its ssh (hostside.py).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterator, Mapping, Optional, Sequence

from ..config import NONE, Config
from ..errors import (
    HostFailed,
    HostUnreachable,
    ImageChanged,
    NoSpace,
    NotSupported,
    SemisharedError,
    TransferCorrupt,
)
from ..model.answers import reported
from ..model.base import steps as base_steps
from ..model.base.names import from_data, within
from ..model.refs import ImageRef
from ..model.steps import StageBase, Step
from ..model.store.image_steps import FreezeImage, NameGeneration
from ..opennebula.xml import Host
from ..plan.base import eviction, sharing
from ..plan.base import sharing as plan
from ..tools import extents
from ..wire.session import Session, first_answer
from . import questions, trail
from .staging_round import Hosts, Outcome, Round, Wanted, Wish

AT_ONCE = 8
"""Images whose extents are looked up at the same time."""


def waves(wants: Mapping[str, Sequence[Wanted]]) -> Iterator[dict[str, list[Wanted]]]:
    """Yield the wants in parts where no host gets two generations of an image: one place makes both."""
    left = {host: list(dict.fromkeys(items)) for host, items in wants.items() if items}
    while left:
        wave = {
            host: list({item.image.base_prefix: item for item in reversed(items)}.values())[::-1]
            for host, items in left.items()
        }
        yield wave
        left = {host: [item for item in items if item not in wave[host]] for host, items in left.items()}
        left = {host: items for host, items in left.items() if items}


class Staging:
    """A session: hosts, and the bases that each of them is to have."""

    def __init__(
        self,
        root: str,
        wants: Mapping[str, Sequence[Wanted]],
        hosts: Sequence[Host],
        wish: Wish,
        config: Config,
        tell: Callable[..., None],
    ) -> None:
        self.root, self.wants = root, wants
        self.hosts = Hosts([host for host in hosts if wants.get(host.name)], wish, config, tell)
        if config.network_bulk != NONE:
            from . import bulk_network

            self.hosts.addresses = bulk_network.addresses_of(config, hosts)
        self.images: dict[str, ImageRef] = {}
        """Images by the names of their bases."""
        self.generations: dict[ImageRef, str] = {}
        """Generations of the images asked for, as far as known."""
        self._contents: dict[str, Mapping[int, str]] = {}
        self.transports: list[str] = []
        self.sender = ""
        self.seconds = 0.0
        self.stream: Optional[base_steps.Streamed] = None
        self.common = self.unique = 0
        """Bytes that hosts lacked at first: those of several hosts, counted once, and the rest."""

    def run(self) -> dict[str, Outcome]:
        """Stage; return the result of each host."""
        started, bulk = time.monotonic(), self.hosts.config.network_bulk
        for name in self.hosts.all if bulk != NONE else ():
            if name not in self.hosts.addresses:
                self.hosts.note(name, f"no address in {bulk} ([network] bulk) is known of it: by its name")
        try:
            for wave in waves(self.wants):
                self._wave(wave)
        finally:
            self.hosts.close()
        for outcome in self.hosts.outcomes.values():
            outcome.ok, outcome.why = outcome.ok and not outcome.lacks, outcome.why or outcome.refused
        self.seconds = time.monotonic() - started
        return self.hosts.outcomes

    def brings(self, host: str, image: ImageRef) -> bool:
        """Tell whether a host has the base of an image, as that was asked for."""
        generation = self.generations.get(image)
        named = image._replace(generation=generation or "").base_name
        return generation is not None and named not in self.hosts.outcomes[host].lacks

    def _wave(self, wants: Mapping[str, Sequence[Wanted]]) -> None:
        asked = self._found({host: items for host, items in wants.items() if host in self.hosts.all})
        for host, images in asked.items():
            outcome = self.hosts.outcomes[host]
            outcome.ok, outcome.lacks = False, outcome.lacks | {image.base_name for image in images}
        names = {
            name: [host for host in asked if name in _names(asked[host])]
            for images in asked.values()
            for name in _names(images)
        }
        self._begin(names)
        try:
            for number in range(plan.ROUNDS):
                # Also hosts that did not answer before: a late one gets the base from the others.
                left = {host: images for host, images in asked.items() if not self.hosts.outcomes[host].ok}
                if not left or not self._round(left, asked, is_last=number == plan.ROUNDS - 1):
                    break
        finally:
            self._leave(names)

    def _begin(self, names: Mapping[str, list[str]]) -> None:
        """Note which hosts get which bases, for clones meanwhile."""
        for name, hosts in names.items():
            questions.begin(self.root, name, hosts)

    def _leave(self, names: Mapping[str, list[str]]) -> None:
        """Note which of these hosts have their bases."""
        for name, hosts in names.items():
            questions.leave(
                self.root, name, {host: name not in self.hosts.outcomes[host].lacks for host in hosts}
            )

    # -- before a round --------------------------------------------------------------------------------

    def _found(self, wants: Mapping[str, Sequence[Wanted]]) -> dict[str, list[ImageRef]]:
        """Return the images that hosts are to have, with generations; raise why none is available."""
        items = list(dict.fromkeys(item for wanted in wants.values() for item in wanted))
        frozen = [item for item in items if self._is_frozen(item, wants)]
        left = {host: [item for item in wanted if item in frozen] for host, wanted in wants.items()}
        left = {host: wanted for host, wanted in left.items() if wanted}
        described = self.hosts.describe(
            self.root, {host: [item.image for item in wanted] for host, wanted in left.items()}
        )

        def settled(item: Wanted) -> ImageRef | SemisharedError:
            try:
                return self._settled(
                    item,
                    {
                        host: said[left[host].index(item)]
                        for host, said in described.items()
                        if item in left[host]
                    },
                )
            except SemisharedError as e:
                return e

        found: dict[Wanted, ImageRef] = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for item, result in zip(frozen, pool.map(settled, frozen)):
                if not isinstance(result, SemisharedError):
                    found[item] = self.images[result.base_name] = result
                    self.generations[item.image] = result.generation
                else:
                    self._refuse(item, wants, result)
        asked = {host: [found[item] for item in wanted if item in found] for host, wanted in wants.items()}
        return {host: images for host, images in asked.items() if images}

    def _is_frozen(self, item: Wanted, wants: Mapping[str, Sequence[Wanted]]) -> bool:
        """Have an image's bridge freeze it, if it has one: hosts may not freeze, and read frozen content."""
        try:
            if item.changers:
                self._on_bridge(item, FreezeImage(item.image))
            return True
        except SemisharedError as e:
            self._refuse(item, wants, e)
            return False

    def _refuse(self, item: Wanted, wants: Mapping[str, Sequence[Wanted]], error: SemisharedError) -> None:
        """Note at its hosts why an image is not available; raise that if the session has no other image."""
        if all(other == item for wanted in self.wants.values() for other in wanted):
            raise error
        for host in (host for host, wanted in wants.items() if item in wanted):
            self.hosts.outcomes[host].fail(f"image {item.image.id}: {error.line()}", item.image.base_prefix)

    def _settled(self, item: Wanted, answers: Mapping[str, base_steps.DescribedBase]) -> ImageRef:
        """Return an image with the generation that hosts are to have; then its extents are known."""
        image = item.image
        knowing = [host for host, answer in answers.items() if answer.has or answer.manifest]
        if not image.generation:
            known = {answer.current for answer in answers.values() if answer.current}
            if len(known) > 1:
                raise ImageChanged(f"image {image.id} changes while it is to be staged")
            image = image._replace(generation=known.pop() if known else "")
        if not knowing or not image.generation:
            # No host can verify extents one by one: so one reads the whole image, and the others fetch from
            # it.
            host, generation = self._read_whole(item, answers)
            knowing, image = [host], image._replace(generation=generation)
        if image.base_name not in self._contents:
            self._contents[image.base_name] = self._extents(knowing, image)
        return image

    def _extents(self, knowing: Sequence[str], image: ImageRef) -> Mapping[int, str]:
        """Return a generation's extents from a host that knows them; raise the reason if none answers."""
        error: SemisharedError = NotSupported(f"no host knows the hashes of image {image.id}")
        for host in knowing:
            try:
                text = self.hosts.manifest(host, self.root, image)
                if extents.generation_of(text) == image.generation:
                    return extents.parse(text).extents
                error = TransferCorrupt(
                    f"{host} has sent hashes of another content than generation {image.generation}"
                )
            except SemisharedError as e:
                error = e
            self.hosts.note(host, error.line())
        raise error

    def _read_whole(self, item: Wanted, answers: Mapping[str, base_steps.DescribedBase]) -> tuple[str, str]:
        """Have one host stage an image from the store, as a clone does; return host and generation."""
        reaching = [name for name, answer in answers.items() if not answer.trouble]
        if not reaching:
            why = next((answer.trouble for answer in answers.values()), "no host answers")
            raise NotSupported(f"no host that answers reaches image {item.image.id} on its store ({why})")
        for host in reaching[:-1]:
            try:
                return self._read_by(host, item)
            except (HostUnreachable, HostFailed) as e:
                self.hosts.note(host, e.line())
        return self._read_by(reaching[-1], item)

    def _read_by(self, host: str, item: Wanted) -> tuple[str, str]:
        image = item.image
        self.hosts.note(host, "reads the image whole: nobody knows its hashes yet")
        with self.hosts.session(host) as session:
            staged = session.ask(
                StageBase(self.root, image), answer=lambda question: self._answer(host, question)
            )
        read = base_steps.FromSource(0, session.moved.get("store_read", 0))
        self.hosts.outcomes[host].add({"store": read})
        if staged.snapshot >= 0:
            self._on_bridge(item, NameGeneration(image, staged.snapshot, staged.generation))
        return host, staged.generation

    def _answer(self, host: str, question: dict[str, object]) -> dict[str, object]:
        """Return the bases to remove; the session decides from which hosts others fetch this base."""
        if question.get("question") != "base":
            return {}
        evict = self._room(host, reported(question), eviction.number(question, "needed"), ())
        trail.evicting(host, evict)
        return {"evict": evict}

    def _on_bridge(self, item: Wanted, step: Step) -> None:
        def ask(bridge: str) -> None:
            with Session(bridge, "stage", self.hosts.config) as session:
                session.run([step])

        first_answer(item.changers, ask, lambda bridge, e: self.hosts.note(bridge, e.line()))

    def _room(
        self, host: str, listed: base_steps.Listed, needed: int, keep: Sequence[str]
    ) -> tuple[str, ...]:
        config = self.hosts.config
        limit = eviction.limits_of(
            self.hosts.all[host], config.bases_size_limit, config.bases_free_floor, listed
        )
        return tuple(eviction.room(listed, limit, host, needed, *keep))

    # -- a round ---------------------------------------------------------------------------------------

    def _round(
        self, left: Mapping[str, list[ImageRef]], asked: Mapping[str, list[ImageRef]], is_last: bool
    ) -> bool:
        """Carry out a round for those hosts that are `left`; tell whether another round may help."""
        hosts = self.hosts
        said, evict, where = self._looked(left, asked)
        chosen = self._plan(said)
        if not chosen.hosts:
            return False
        for host, gone in evict.items():
            trail.evicting(host, gone)
        hosts.tell(
            event="plan",
            transport=chosen.transport,
            sender=chosen.sender,
            hosts=[item.host for item in chosen.hosts],
        )
        self.stream = (
            Round(hosts, self.root, self.images, chosen, evict, where, "all" if is_last else "rest").run()
            or self.stream
        )
        return not all(hosts.outcomes[host].ok for host in asked)

    def _looked(
        self, left: Mapping[str, list[ImageRef]], asked: Mapping[str, list[ImageRef]]
    ) -> tuple[list[sharing.Said], dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
        """Return what hosts have and lack; by host, the bases that go first, and devices of those that come.

        Hosts that have all, or no room, are noted.
        """
        hosts = self.hosts
        evict: dict[str, tuple[str, ...]] = {}
        where: dict[str, dict[str, str]] = {}
        said = []
        # Also hosts that are done: one that has gone since then must not be a sender.
        for host, answers in hosts.describe(self.root, asked).items():
            found = self._said(asked[host], host, answers)
            if host not in left:
                said.append(found._replace(lacks={}))
                continue
            hosts.outcomes[host].lacks -= found.has
            if not found.lacks:
                hosts.outcomes[host].ok, hosts.outcomes[host].why = True, ""
                hosts.tell(event="host", host=host, have=1, of=1, source="", done=True)
            else:
                try:
                    where[host] = {
                        image.base_name: answer.where for image, answer in zip(asked[host], answers)
                    }
                    keep = sorted(_names(asked[host]))
                    gone: list[str] = []
                    coming = 0
                    for listed, needed in eviction.of_session(answers):
                        gone += self._room(host, eviction.after(listed, gone, coming), needed, keep)
                        coming += needed
                    evict[host] = tuple(gone)
                except NoSpace as e:
                    hosts.outcomes[host].why = e.line()
                    hosts.note(host, e.line())
                    continue
            said.append(found)
        return said, evict, where

    def _said(
        self, images: Sequence[ImageRef], host: str, answers: Sequence[base_steps.DescribedBase]
    ) -> sharing.Said:
        lacks = {}
        for image, answer in zip(images, answers):
            if not answer.has:
                content = self._contents[image.base_name]
                lacks[image.base_name] = set(
                    content if answer.lacks is None else within(from_data(answer.lacks), content)
                )
        tools = self.hosts.tools[host] = frozenset(answers[0].tools)
        return sharing.Said(
            host, {"udp-sender", "udp-receiver"} <= tools, _names(images) - lacks.keys(), lacks
        )

    def _plan(self, said: Sequence[sharing.Said]) -> sharing.Plan:
        """Return how hosts get what they lack; what failed before is not tried again."""
        names = {name for item in said for name in item.lacks}
        elsewhere = {
            name: [host for host in questions.holders_of(self.root, name) if host not in self.hosts.all]
            for name in names
        }
        wish = self.hosts.wish.transport
        if self.transports and wish == "auto" and self.transports[-1] in ("multicast", "chain"):
            wish = "chain" if self.transports[-1] == "multicast" else "unicast"
        chosen = sharing.plan(said, self._contents, elsewhere, wish)
        if chosen.hosts:
            if not self.transports:
                self.common, self.unique = chosen.common * extents.EXTENT, chosen.unique * extents.EXTENT
            self.transports.append(chosen.transport)
            self.sender = chosen.sender
        return chosen


def _names(images: Sequence[ImageRef]) -> set[str]:
    return {image.base_name for image in images}
