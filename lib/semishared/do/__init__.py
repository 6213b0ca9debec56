# SPDX-License-Identifier: Apache-2.0
"""Act: one module per tool or thing handled. Knows nothing about why."""
