# SPDX-License-Identifier: Apache-2.0
"""All devices of a host's pool: labels, memory, moves between devices, removal."""
