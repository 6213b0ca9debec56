# SPDX-License-Identifier: Apache-2.0
"""Names, classes and steps of the devices of a host's pool."""
