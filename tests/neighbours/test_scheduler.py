# SPDX-License-Identifier: Apache-2.0
"""Where the scheduler sends VMs of our images and of others', and what setup and doctor do about it."""

from __future__ import annotations

import json

import pytest

from lab.oned import Refused
from neighbours.conftest import Site
from semishared.plan.care.checks import BROKEN, WARNING

SETUP = "semishared setup --apply --image semi_img --system semi_sys"
REFUSED = "Image Datastore does not support transfer mode: semishared"


def system(site: Site, number: int, driver: str = "semishared", **more: str) -> None:
    words = " ".join(f'{name}="{value}"' for name, value in more.items())
    site.oned.datastore_create(f'NAME="sys{number}" TYPE="SYSTEM_DS" TM_MAD="{driver}" {words}', number)


def images(site: Site, number: int, driver: str = "semishared", store_driver: str = "semishared") -> None:
    site.oned.datastore_create(
        f'NAME="img{number}" TYPE="IMAGE_DS" DS_MAD="{store_driver}" TM_MAD="{driver}"', number
    )


def compatible(site: Site, number: int) -> object:
    return site.oned.datastores[number].template.get("COMPATIBLE_SYS_DS")


@pytest.mark.fault(53, "a site's own VMs go home beside our system datastore, and ours are not starved")
def test_a_stock_vm_goes_home_and_ours_behind_it_is_not_starved(site: Site) -> None:
    site.setup("--apply", "--stock-compatible")
    stock, ours = site.vm(site.image(1, "stock")), site.vm(site.image(100, "ours"))
    assert site.round() == {stock: (0, 0, ""), ours: None}
    assert site.round() == {ours: (0, 101, "")}


def test_without_the_attribute_oned_refuses_again_and_again(site: Site) -> None:
    """What was seen with real schedulers; else the test above would prove nothing."""
    system(site, 101)
    images(site, 100)
    stock, ours = site.vm(site.image(1, "stock")), site.vm(site.image(100, "ours"))
    for _ in range(3):
        assert site.round() == {stock: (0, 101, REFUSED), ours: None}
    # On ours alone it changes nothing.
    site.setup("--apply", "--image", "img100", "--system", "sys101")
    assert compatible(site, 100) == "101" and compatible(site, 1) is None
    assert site.round() == {stock: (0, 101, REFUSED), ours: None}
    # A VM that waits keeps the requirements that it was made with.
    site.setup("--apply", "--image", "img100", "--system", "sys101", "--stock-compatible")
    assert site.round() == {stock: (0, 101, REFUSED), ours: None}
    site.oned.vm_hold(stock)
    site.oned.vm_release(stock)
    assert site.round()[stock] == (0, 0, "")


def test_setup_writes_ours_always_and_others_when_asked(site: Site) -> None:
    said = site.setup()
    assert "--apply also writes COMPATIBLE_SYS_DS" in said
    said = site.setup("--apply")
    assert "datastore 100 (semi_img): COMPATIBLE_SYS_DS = 101" in said and "--stock-compatible" in said
    assert (compatible(site, 100), compatible(site, 1)) == ("101", None)
    assert "datastore 1 (default): COMPATIBLE_SYS_DS = 0" in site.setup("--stock-compatible")
    assert compatible(site, 1) is None
    assert "datastore 1 (default): COMPATIBLE_SYS_DS = 0" in site.setup("--apply", "--stock-compatible")
    assert (compatible(site, 100), compatible(site, 1)) == ("101", "0")
    again = json.loads(site.setup("--apply", "--stock-compatible", "--json"))
    assert again["compatible"] == []


def test_a_choice_that_is_there_stays(site: Site) -> None:
    system(site, 102)
    site.setup("--apply", "--set", "COMPATIBLE_SYS_DS=102", "--system", "sys102")
    system(site, 120, "qcow2")
    site.oned.datastore_update(1, 'COMPATIBLE_SYS_DS="120"')
    site.setup("--apply", "--stock-compatible", "--system", "sys102")
    # 0 was named by nobody, which is what datastores made later are like.
    assert compatible(site, 103) == "102" and compatible(site, 1) == "0,120"


def test_datastores_made_later_are_listed_and_taken_up(site: Site) -> None:
    site.setup("--apply", "--stock-compatible")
    assert site.findings() == []
    system(site, 110)
    system(site, 111, "qcow2")
    images(site, 112)
    found = {one.what.split(":")[0]: one for one in site.findings()}
    # 110 is reached from 112, which names none yet.
    assert set(found) == {"datastore 111 (sys111)", "datastore 112 (img112)"}
    assert {one.severity for one in found.values()} == {WARNING}
    site.image(112, "first")
    (broken,) = [one for one in site.findings() if one.severity == BROKEN]
    assert (
        "datastore 112 (img112): the scheduler may send its VMs to system datastore 0 (system), 111"
        in broken.what
    )
    assert broken.mend.startswith("semishared setup --apply --image img112 --system semi_sys (")
    site.setup("--apply", "--image", "img112", "--system", "semi_sys", "--stock-compatible")
    assert (compatible(site, 100), compatible(site, 112), compatible(site, 1)) == ("101", "101,110", "0,111")
    assert site.findings() == []


def test_doctor_says_broken_with_the_command(site: Site) -> None:
    site.setup("--apply")
    assert [one.severity for one in site.findings()] == [WARNING]
    site.image(1, "stock")
    (found,) = site.findings()
    assert found.severity == BROKEN
    assert "may send its VMs to system datastore 101 (semi_sys), where oned does not" in found.what
    assert found.mend == SETUP + " --stock-compatible (docs/how-to/beside-stock.md)"


def test_clusters_that_have_nothing_in_common_need_nothing(site: Site) -> None:
    """Our pair is in cluster 100, the stock one in the default."""
    system(site, 101)
    images(site, 100)
    for number in (100, 101):
        site.oned.datastores[number].clusters = [100]
    site.oned.hosts[site.oned.host_create("h2")].cluster = 100
    ours, stock = site.image(100, "ours"), site.image(1, "stock")
    assert site.findings() == []
    assert site.round() == {} and site.vm(stock) + 1 == site.vm(ours)
    assert site.round() == {0: (0, 0, ""), 1: (1, 101, "")}
    assert "stock" not in site.setup("--apply", "--image", "img100", "--system", "sys101")
    # In both clusters it is in the way.
    site.oned.datastores[101].clusters = [0, 100]
    assert [one.severity for one in site.findings()] == [BROKEN]


def test_pairs_in_two_clusters(site: Site) -> None:
    for cluster, numbers in ((100, (110, 111)), (200, (120, 121))):
        images(site, numbers[0])
        system(site, numbers[1])
        for number in numbers:
            site.oned.datastores[number].clusters = [cluster]
        site.oned.hosts[site.oned.host_create(f"h{cluster}")].cluster = cluster
    site.setup("--apply", "--image", "img110", "--system", "sys111")
    assert compatible(site, 110) == compatible(site, 120) == "111,121"
    first, second = site.vm(site.image(110, "a")), site.vm(site.image(120, "b"))
    assert site.round() == {first: (1, 111, ""), second: (2, 121, "")}
    assert site.findings() == []
    # One that excludes all of its clusters is seen.
    site.oned.datastore_update(110, 'COMPATIBLE_SYS_DS="121"')
    (found,) = [one for one in site.findings() if one.severity == BROKEN]
    assert "its VMs are sent to no system datastore of semishared" in found.what


def test_a_stock_datastore_with_targets_for_our_driver_may_use_ours(site: Site) -> None:
    system(site, 101)
    site.oned.datastore_update(
        1,
        'CLONE_TARGET_SEMISHARED="SYSTEM" LN_TARGET_SEMISHARED="SYSTEM" DISK_TYPE_SEMISHARED="FILE"',
    )
    images(site, 100)
    vm = site.vm(site.image(1, "stock"))
    assert not [one for one in site.findings() if one.severity == BROKEN]
    assert site.round() == {vm: (0, 101, "")}


def test_a_vm_of_both_is_refused_when_it_is_made(site: Site) -> None:
    site.setup("--apply", "--stock-compatible")
    with pytest.raises(Refused, match="Incompatible system datastore in DISK"):
        site.vm(site.image(1, "stock"), site.image(100, "ours"))


def test_a_full_host_gets_no_vm(site: Site) -> None:
    site.setup("--apply")
    site.oned.hosts[0].free_mb[101] = 7
    vm = site.vm(site.image(100, "ours"))
    assert site.round() == {vm: None}
    site.oned.hosts[0].free_mb[101] = 8
    assert site.round() == {vm: (0, 101, "")}
