# SPDX-License-Identifier: Apache-2.0
"""Marks of fences: documents in oned, which all front-ends see, each signed by the front-ends' key.

A host's template is no place for them: what its probe prints is merged into it (Host::update_info), so that a
host could write its own mark, put an older one back, or take it away by an empty attribute. Monitoring writes
to no document. Users may make documents (oned's first ACL rule), which are not of oneadmin's group; whom a
rule lets manage all documents, as OneFlow's admins, has not the key.
"""

from __future__ import annotations

from typing import Sequence

from ..errors import NoKey
from ..named import NamedTuple
from ..opennebula.oned import Oned
from ..opennebula.xml import Host, View
from ..plan.care.fence import ATTRIBUTE, Mark, mark_of
from ..tools import key

TYPE = 5315
"""Of our documents; OpenNebula's own have 100 and more, of three digits."""


class _Noted(NamedTuple):
    """A document of ours."""

    id: int
    mark: Mark
    is_right: bool
    """Whether its code is."""


class Marks:
    """The marks that one front-end reads and writes; raise NoKey where it cannot tell them,
    OnedUnavailable.
    """

    def __init__(self, oned: Oned) -> None:
        self._oned = oned
        self._key, why = key.look(oned.key)
        if why:
            raise NoKey(f"{oned.key} {why}")

    def of(self, host: Host) -> Mark:
        """Return the mark of a host: an empty one if there is none, or none that is believed (`strange`)."""
        return self.of_all([host])[host.name]

    def of_all(self, hosts: Sequence[Host]) -> dict[str, Mark]:
        """Return the marks of hosts, by their names: oned is asked once."""
        documents = self._oned.documents(TYPE)
        return {host.name: self._believed(host, documents) for host in hosts}

    def _believed(self, host: Host, documents: Sequence[View]) -> Mark:
        noted = self._noted(host, documents)
        right = next((one.mark for one in noted if one.is_right), None)
        if right:
            return right
        why = ""
        if noted:
            why = (
                f"the mark of {host.name}'s fence (document {noted[0].id} in OpenNebula) has no code "
                f"by the key of this front-end"
            )
        elif mark_of(host).stands:
            why = (
                f"{host.name} has the mark of a fence in its template, as older versions wrote it and "
                f"its own monitoring can"
            )
        return Mark(
            strange=f"{why}: it says nothing; to have the host shut out: `semishared fence {host.name}`"
            if why
            else ""
        )

    def note(self, host: Host, mark: Mark) -> None:
        """Write a host's mark in the place of what is noted of it."""
        text = mark.template(host.id, key.code(self._key, words(mark, host.id)))
        # Of two that two front-ends have made at once both read the first.
        found = next((one.id for one in self._noted(host, self._oned.documents(TYPE)) if one.is_right), None)
        if found is None:
            self._oned.create_document(f'NAME = "semishared-fence-{host.id}"\n{text}', TYPE)
        else:
            self._oned.update_document(found, text)

    def _noted(self, host: Host, documents: Sequence[View]) -> list[_Noted]:
        """Return what oneadmin's group has noted of a host, the oldest document first."""
        found = []
        for document in documents:
            if document.number("GID") == 0 and document.number(f"TEMPLATE/{ATTRIBUTE}/HOST") == host.id:
                found.append(self._read(document, host.id))
        return sorted(found, key=lambda one: one.id)

    def _read(self, document: View, host: int) -> _Noted:
        mark = mark_of(document)
        right = key.is_right(self._key, words(mark, host), document.text(f"TEMPLATE/{ATTRIBUTE}/CODE"))
        return _Noted(document.number("ID"), mark, right)


def words(mark: Mark, host: int) -> list[str]:
    """Return what a code is made of."""
    return ["fence", *(word for pair in mark.values(host).items() for word in pair)]
