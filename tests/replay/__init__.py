# SPDX-License-Identifier: Apache-2.0
"""Recordings of a real oned against the simulated one, and against our drivers."""
