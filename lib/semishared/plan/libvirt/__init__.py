# SPDX-License-Identifier: Apache-2.0
"""The XML that libvirt gets: disks, backing chains, I/O limits, file systems."""
