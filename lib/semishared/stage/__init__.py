# SPDX-License-Identifier: Apache-2.0
"""How a host gets a base: from its store, from peers or by multicast, each extent verified."""
