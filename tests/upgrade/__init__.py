# SPDX-License-Identifier: Apache-2.0
"""From an older version to this one: what the older one made, and machines that have not got the same version
yet.
"""
