# SPDX-License-Identifier: Apache-2.0
"""What a staging session would do, by the plan of its first round: nothing is changed on any machine.

Hosts are asked by a step that only looks, and no image is frozen. So one that has no noted hashes, or has to
be frozen first, has no plan of extents: one host would read it whole, and the others would fetch it from
there.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

from ..config import Config
from ..errors import MissingImage, SemisharedError
from ..model.base import steps as base_steps
from ..model.refs import ImageRef
from ..opennebula.xml import Host
from ..plan.base import sharing
from ..tools.extents import EXTENT
from ..units import human
from .staging import Staging
from .staging_round import Wanted, Wish


class Look(Staging):
    """A session that is only looked at; `would` of each host's outcome says what it would do."""

    def __init__(
        self,
        root: str,
        wants: Mapping[str, Sequence[Wanted]],
        hosts: Sequence[Host],
        wish: Wish,
        config: Config,
        tell: Callable[..., None],
    ) -> None:
        super().__init__(root, wants, hosts, wish, config, tell)
        self.hosts.described_by = base_steps.LookAtBase
        self._unread: dict[Wanted, str] = {}
        """Images whose hashes no machine knows, and the host that would read them."""
        self._coming: set[tuple[str, str]] = set()
        """Hosts, with the names of the bases that would come; of an image without hashes its prefix."""
        self._troubles: dict[tuple[str, str], str] = {}
        """By host and base: why the host does not reach the image on its store."""

    def brings(self, host: str, image: ImageRef) -> bool:
        """Tell whether a host has the base of an image, or would get it."""
        generation = self.generations.get(image)
        name = image._replace(generation=generation).base_name if generation else image.base_prefix
        return (host, name) in self._coming or super().brings(host, image)

    def _begin(self, names: Mapping[str, list[str]]) -> None:
        """Note nothing: no clone can follow these hosts."""

    def _leave(self, names: Mapping[str, list[str]]) -> None:
        """Note nothing."""

    def _is_frozen(self, item: Wanted, wants: Mapping[str, Sequence[Wanted]]) -> bool:
        return True

    def _read_by(self, host: str, item: Wanted) -> tuple[str, str]:
        """Note that this host would read the image; raise MissingImage: until then no extent is known."""
        self._unread[item] = host
        raise MissingImage(f"no machine knows the hashes of image {item.image.id} yet")

    def _refuse(self, item: Wanted, wants: Mapping[str, Sequence[Wanted]], error: SemisharedError) -> None:
        reader = self._unread.get(item)
        if reader is None:
            super()._refuse(item, wants, error)
            return
        for host in (host for host, wanted in wants.items() if item in wanted):
            outcome = self.hosts.outcomes[host]
            outcome.lacks.add(item.image.base_prefix)
            self._coming.add((host, item.image.base_prefix))
            first = "read it whole from the store" if host == reader else f"fetch it from {reader}"
            outcome.would.append(f"have the base of image {item.image.id}: {first}")

    def _said(
        self, images: Sequence[ImageRef], host: str, answers: Sequence[base_steps.DescribedBase]
    ) -> sharing.Said:
        for image, answer in zip(images, answers):
            self._troubles[host, image.base_name] = answer.trouble
        return super()._said(images, host, answers)

    def _round(
        self, left: Mapping[str, list[ImageRef]], asked: Mapping[str, list[ImageRef]], is_last: bool
    ) -> bool:
        """Note what a round would do; another one is for what fails in it."""
        said, evict, _ = self._looked(left, asked)
        chosen, lacks = self._plan(said), {one.host: one.lacks for one in said}
        for item in chosen.hosts:
            outcome = self.hosts.outcomes[item.host]
            outcome.would += [f"evict base {name}" for name in evict.get(item.host, ())]
            for way in item.ways:
                missing, trouble = len(lacks[item.host][way.name]), self._troubles[item.host, way.name]
                if trouble and missing and not way.holders and not item.sources:
                    outcome.why = trouble
                    continue
                how = _way(item, way, missing, chosen.transport)
                outcome.would.append(f"have base {way.name}: {how}")
                self._coming.add((item.host, way.name))
        return False


def _way(item: sharing.Assignment, way: sharing.Way, lacks: int, transport: str) -> str:
    """Return from where a host would get the `lacks` extents of a base."""
    shared = sum(end - first for first, end in way.shared)
    by = "the stream" if item.stream else " or ".join(item.sources) or "the store"
    parts = [f"{human(shared * EXTENT)} from {by} ({transport})"] if shared else []
    if lacks - shared:
        parts.append(f"{human((lacks - shared) * EXTENT)} from {' or '.join([*way.holders, 'the store'])}")
    return " and ".join(parts) or "from other bases there"
