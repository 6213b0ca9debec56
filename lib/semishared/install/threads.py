# SPDX-License-Identifier: Apache-2.0
"""How many transfers oned's driver does at once: -t of TM_MAD. Text in, edits out.

one_tm has a queue for all VMs and datastores: a transfer begins when one of its threads has nothing to do,
and each has one until its last script has ended (mad/ruby/ActionManager.rb:165-230, tm_mad/one_tm.rb:71-88).
Nothing overtakes. A clone has ended when its disk is there, and not before; so with 15 threads, as oned.conf
comes, 15 clones that wait for one base keep every other VM's delete waiting as long. oned's own scheduler
begins up to 30 for each cluster (MAX_ACTIONS_PER_CLUSTER). Threads are made for what is to be done, and cost
nothing while there is nothing.
"""

from __future__ import annotations

import json
import re

from .oned_conf import Arguments, Edit

OPTIONS = {"t": "threads", "d": "tm-types", "w": "timeout"}
"""Of one_tm, by letter."""
LEAST = 64
"""What two clusters can have waiting, and four more."""
STOCK = 15
"""What one_tm takes if it is not told."""
NOTE = re.compile(r'^# before: TM_MAD -t: (".*")\n', re.MULTILINE)
"""What the value was, as JSON; of an option that was not there nothing."""


def raised(arguments: Arguments, noted: bool) -> "tuple[list[Edit], list[str], list[str]]":
    """Return the edits of TM_MAD's ARGUMENTS for LEAST threads, what to note of before, and what the
    administrator should know.

    Whoever has put it back afterwards (`noted`) is told, and heard.
    """
    word = arguments.last("t")
    count = STOCK if word is None else int(word.text) if word.text.isascii() and word.text.isdigit() else 0
    if count >= LEAST or (word is not None and not word.text):
        return [], [], []
    if noted:
        return (
            [],
            [],
            [
                f"TM_MAD: with -t {count} that many clones that wait for a base keep all other "
                f"VMs' transfers waiting"
            ],
        )
    edit = (
        Edit(0, 0, f"-t {LEAST} " if arguments.text else f"-t {LEAST}")
        if word is None
        else Edit(word.start, word.end, str(LEAST))
    )
    return [edit], [f"# before: TM_MAD -t: {json.dumps(word.text if word else '')}\n"], []


def lowered(arguments: Arguments, block: str) -> list[Edit]:
    """Return the edits that undo that, if the value is still ours; `block` is what is written between our
    lines in oned.conf.
    """
    note, word = NOTE.search(block), arguments.last("t")
    if not note or word is None or word.text != str(LEAST):
        return []
    before = str(json.loads(note.group(1)))
    if before:
        return [Edit(word.start, word.end, before)]
    whole = arguments.whole["t"][-1]
    return [Edit(whole.start, whole.end + (len(arguments.text) > whole.end), "")]
