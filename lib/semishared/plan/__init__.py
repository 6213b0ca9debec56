# SPDX-License-Identifier: Apache-2.0
"""Decide: facts in, steps out. Pure: no I/O, no clock, no environment."""
