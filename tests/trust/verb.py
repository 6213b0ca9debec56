# SPDX-License-Identifier: Apache-2.0
"""`semishared WORD...` as the user of the drivers runs it: some verbs do nothing for root."""

import os
import sys

from semishared.cli.main import main

AS = 9869

if __name__ == "__main__":
    os.geteuid = lambda: AS
    sys.exit(main(sys.argv[1:]))
