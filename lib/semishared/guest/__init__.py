# SPDX-License-Identifier: Apache-2.0
"""A running guest's disks, through libvirt."""
