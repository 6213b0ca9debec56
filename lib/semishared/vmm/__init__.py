# SPDX-License-Identifier: Apache-2.0
"""Hypervisor actions: what libvirt is told about disks of ours, then the stock script."""
