# SPDX-License-Identifier: Apache-2.0
"""The words of `semishared stage`: which images go where, whatever their names are; and sessions of hosts
that want several.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.cli.stage import gone_of, wanted
from semishared.errors import BadArguments, NotSupported, OnedUnavailable
from semishared.front.staging import waves
from semishared.front.staging_round import Wanted
from semishared.model.refs import ImageRef
from semishared.opennebula.xml import Datastore, Host, Image, parse

STORES = {
    100: Datastore(parse("<DATASTORE><ID>100</ID><TM_MAD>semishared</TM_MAD></DATASTORE>", "DATASTORE"))
}
KNOWN = [Host(parse(f"<HOST><NAME>{name}</NAME></HOST>", "HOST")) for name in ("h1", "h2", "h3")]


def image(number: int, name: str, persistent: int = 0) -> Image:
    return Image(
        parse(
            f"<IMAGE><ID>{number}</ID><NAME>{name}</NAME><TYPE>0</TYPE><STATE>1</STATE><SOURCE>/x</SOURCE><PERSISTENT>{persistent}</PERSISTENT>"
            "<DATASTORE_ID>100</DATASTORE_ID></IMAGE>",
            "IMAGE",
        )
    )


IMAGES = [
    image(1, "os"),
    image(2, "web,db"),
    image(3, "me@home"),
    image(4, "twice"),
    image(5, "twice"),
    image(6, "3"),
    image(7, "mine", 1),
]


def meant(*words: str) -> List[Tuple[int, str]]:
    found = wanted(IMAGES, STORES, list(words), KNOWN[2:], KNOWN)
    return [(item.id, " ".join(host.name for host in hosts)) for item, _, hosts in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("os",), [(1, "h3")]),
        (("os@h1",), [(1, "h1")]),
        (("1,2@h1,h2",), [(1, "h1 h2"), (2, "h1 h2")]),
        (("os@h1", "2@h2", "4"), [(1, "h1"), (2, "h2"), (4, "h3")]),
        (("web,db",), [(2, "h3")]),
        (("web,db@h1",), [(2, "h1")]),
        (("me@home",), [(3, "h3")]),
        (("3",), [(3, "h3")]),
        (("os, 4@h2",), [(1, "h2"), (4, "h2")]),
    ],
)
def test_images_and_where_they_go(words: Tuple[str, ...], expected: List[Tuple[int, str]]) -> None:
    assert meant(*words) == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("os@", "none was named"),
        ("os@h9", "no such host in OpenNebula: h9"),
        ("@h1", "no image ''"),
        ("os,@h1", "no image ''"),
        ("twice", "2 images are called 'twice' in OpenNebula: name one by its id"),
        ("os@h1@h2", "no such host in OpenNebula: h1@h2"),
        ("mine", "image 7: it is persistent"),
    ],
)
def test_what_is_not_there_is_said(word: str, said: str) -> None:
    with pytest.raises((BadArguments, NotSupported)) as caught:
        meant(word)
    assert said in caught.value.detail


refs = st.builds(
    lambda number, generation: Wanted(ImageRef(100, number, "raw", "/x", generation)),
    st.integers(1, 3),
    st.sampled_from("abc"),
)


@given(st.dictionaries(st.sampled_from(["h1", "h2"]), st.lists(refs, max_size=6)))
def test_no_host_makes_two_generations_of_an_image_at_once(wants: Dict[str, List[Wanted]]) -> None:
    found = list(waves(wants))
    for wave in found:
        for items in wave.values():
            assert len({item.image.base_prefix for item in items}) == len(items) > 0
    for host, items in wants.items():
        brought = [item for wave in found for item in wave.get(host, ())]
        assert sorted(brought) == sorted(set(items)), "each once"


class Later:
    """What oned has of the images when a session is over."""

    def __init__(self, *images: Image) -> None:
        self._images = {image.id: image for image in images}

    def image(self, number: int) -> Image:
        if number not in self._images:
            raise OnedUnavailable(f"one.image.info {number}: no such image")
        return self._images[number]


@pytest.mark.fault(49, "a session whose image was deleted meanwhile is not said to be complete")
def test_images_that_are_gone_when_they_are_staged() -> None:
    orders = wanted(IMAGES, STORES, ["os", "me@home", "3"], KNOWN, KNOWN)
    gone = [number for number in (1, 3, 6) if number in gone_of(Later(IMAGES[0]), orders)]  # type: ignore[arg-type]
    assert gone == sorted({image.id for image, _, _ in orders} - {1})
    assert gone_of(Later(*IMAGES), orders) == []  # type: ignore[arg-type]
