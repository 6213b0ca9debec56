# SPDX-License-Identifier: Apache-2.0
"""The life of VMs, by the tests that run with the simulated oned: here a real one calls the drivers."""

from __future__ import annotations

from importlib import import_module
from typing import Dict, Tuple

import pytest

from real.front_end import version

SAME: Dict[str, Tuple[str, ...]] = {
    "vm": (
        "hot",
        "scratch_system",
        "test_disk_when_attached_holds_the_image_and_keeps_what_is_written",
        "test_volatile_disk_when_attached_is_there_and_gone_after",
        "test_terminated_vm_leaves_nothing_behind",
        "test_mixed_vm_through_power_off_undeploy_and_migration",
        "test_stopped_vm_when_resumed_goes_on_where_it_was",
        "test_image_when_flipped_is_a_new_generation_and_never_an_old_base",
        "test_saved_disk_when_running_or_off_is_what_the_guest_wrote",
        "test_vm_with_all_disks_in_place_when_migrated_live_loses_nothing",
        "test_attribute_when_it_cannot_be_followed_is_refused_in_one_line",
        "test_image_from_another_machine_only_where_the_datastore_says_so",
    ),
    "snapshots": (
        "test_live_snapshots_of_every_kind_of_disk_under_a_guest_that_writes",
        "test_snapshots_of_a_suspended_guest",
        "test_snapshots_are_deleted_while_the_guest_runs_after_others_were",
        "test_disks_grow_running_off_and_undeployed",
    ),
    "migration": ("test_mixed_vm_when_moved_live_loses_nothing",),
    # The others ask the simulated oned what a driver said.
    "commit": (
        "test_a_guest_that_writes_is_committed_and_moves",
        "test_a_stopped_guest_goes_on_over_the_base_that_came_along",
    ),
    "detach": (
        "test_running_vms_let_go_of_the_store_and_their_disks_are_overlays_to_every_action",
        "test_vm_that_is_off_lets_go_by_its_headers_and_one_in_between_is_left_alone",
    ),
}
"""Tests, and their fixtures, of tests/system, which are collected here with a cloud of another oned."""
if version() < (7, 2):
    del SAME["migration"]  # it moves between datastores, too, which older ones refuse while a VM runs

for _name, _chosen in SAME.items():
    pytest.register_assert_rewrite(f"system.test_{_name}")
    _module = import_module(f"system.test_{_name}")
    globals().update({one: getattr(_module, one) for one in _chosen})
