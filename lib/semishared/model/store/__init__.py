# SPDX-License-Identifier: Apache-2.0
"""How a datastore is reached, the names in it, and the steps on its images."""
