# SPDX-License-Identifier: Apache-2.0
"""The base cache of a host: verified bases, leases, room, copies in memory."""
