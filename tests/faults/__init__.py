# SPDX-License-Identifier: Apache-2.0
"""Every fault we can make: death at each step, full disks, lost hosts, hostile input."""
