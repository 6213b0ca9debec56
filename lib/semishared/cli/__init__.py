# SPDX-License-Identifier: Apache-2.0
"""The operator's command: one module per subcommand, imported only when it is the one called."""
