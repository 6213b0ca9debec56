# SPDX-License-Identifier: Apache-2.0
"""A real OpenNebula in the lab: built by root.sh, run in the lab's nodes, asked by XML-RPC."""
