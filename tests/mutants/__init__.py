# SPDX-License-Identifier: Apache-2.0
"""Mutants: small faults put into the package one at a time, to see whether tests notice. `python3 -m
mutants`, or `make mutants`.
"""
