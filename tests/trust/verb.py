# SPDX-License-Identifier: Apache-2.0
"""`semishared WORD...` as the user of the drivers runs it: some verbs do nothing for root."""

import os
import sys

from semishared.cli.main import main

os.geteuid = lambda: 9869
sys.exit(main(sys.argv[1:]))
