# SPDX-License-Identifier: Apache-2.0
"""Between front-end and host: messages, the session they make up, packets of extents."""
