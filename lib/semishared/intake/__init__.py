# SPDX-License-Identifier: Apache-2.0
"""An upload before it is an image: fetched, inspected, unpacked."""
