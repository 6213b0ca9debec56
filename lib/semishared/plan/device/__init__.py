# SPDX-License-Identifier: Apache-2.0
"""Decisions about a host's pool: which device takes a layer or a base, which one is relieved."""
