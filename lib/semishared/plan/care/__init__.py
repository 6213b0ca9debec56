# SPDX-License-Identifier: Apache-2.0
"""Decisions of an operator's commands: garbage collection, doctor, fencing, clusters."""
