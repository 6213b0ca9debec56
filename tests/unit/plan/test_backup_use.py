# SPDX-License-Identifier: Apache-2.0
"""Of which backups an image may be made: whose permissions let its owner use them, whatever its own template
says.
"""

from __future__ import annotations

import pytest

from semishared.errors import RestrictedPath
from semishared.opennebula.xml import Image
from semishared.plan.image import images

BACKUP = 6


def backup(rights: str = "", parts: str = "8e4cbd", store: int = 107, type: int = BACKUP) -> Image:
    """Return a backup of user 5, of group 100, whose increments are `parts`."""
    said = "".join(f"<{right}>1</{right}>" for right in rights.split())
    rows = "".join(f"<INCREMENT><SOURCE>{part}</SOURCE></INCREMENT>" for part in parts.split())
    return Image.parse(
        f"<IMAGE><ID>40</ID><UID>5</UID><GID>100</GID><TYPE>{type}</TYPE><DATASTORE_ID>{store}</DATASTORE_ID><SOURCE>8e4cbd</SOURCE>"
        f"<PERMISSIONS>{said}</PERMISSIONS><BACKUP_INCREMENTS>{rows}</BACKUP_INCREMENTS></IMAGE>"
    )


def wanted(user: int, group: int) -> Image:
    """Return an image that is to be made, in whose template its owner has written what he likes."""
    said = "<TEMPLATE><FROM_BACKUP_DS>107</FROM_BACKUP_DS></TEMPLATE>"
    return Image.parse(f"<IMAGE><ID>41</ID><UID>{user}</UID><GID>{group}</GID>{said}</IMAGE>")


@pytest.mark.fault(
    24, "a backup is read for whom its permissions let use it, whatever the template of his own image says"
)
@pytest.mark.parametrize(
    ("user", "group", "rights", "may"),
    [
        (5, 100, "OWNER_U", True),
        (5, 100, "", False),
        (6, 100, "GROUP_U", True),
        (6, 100, "OWNER_U", False),
        (6, 101, "OTHER_U", True),
        (6, 101, "OWNER_U GROUP_U OWNER_M OTHER_M", False),
        (0, 0, "", True),
    ],
)
def test_a_backup_is_for_who_may_use_it(user: int, group: int, rights: str, may: bool) -> None:
    if may:
        images.check_backup("url", 107, frozenset({"8e4cbd"}), wanted(user, group), [backup(rights)])
        return
    with pytest.raises(RestrictedPath, match=f"in no backup that user {user} may use"):
        images.check_backup("url", 107, frozenset({"8e4cbd"}), wanted(user, group), [backup(rights)])


@pytest.mark.fault(
    24,
    "a backup is an image of oned's of that datastore, with each increment that is named, and not "
    "what only begins so",
)
@pytest.mark.parametrize(
    ("parts", "known"),
    [
        ("8e4cb", backup("OTHER_U")),
        ("8e4cbd x", backup("OTHER_U")),
        ("8e4cbd", backup("OTHER_U", store=108)),
        ("8e4cbd", backup("OTHER_U", type=0)),
        ("8e4cbd", None),
    ],
)
def test_a_backup_is_one_that_oned_knows(parts: str, known: Image | None) -> None:
    with pytest.raises(RestrictedPath):
        images.check_backup("url", 107, frozenset(parts.split()), wanted(6, 101), [known] if known else [])


def test_an_increment_is_of_the_backup_that_has_it() -> None:
    images.check_backup(
        "url", 107, frozenset({"8e4cbd", "91aa02"}), wanted(6, 101), [backup("OTHER_U", "8e4cbd 91aa02")]
    )
