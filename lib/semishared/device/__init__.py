# SPDX-License-Identifier: Apache-2.0
"""The folders of a host and the devices that they lie on: labels, states, promised bytes, memory."""
