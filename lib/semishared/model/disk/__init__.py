# SPDX-License-Identifier: Apache-2.0
"""Names, records, places and steps of a VM's disks on a host."""
