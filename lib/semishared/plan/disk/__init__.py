# SPDX-License-Identifier: Apache-2.0
"""Plans for the disks of a VM: clone, snapshot, commit, detach, back up, remove, save as."""
