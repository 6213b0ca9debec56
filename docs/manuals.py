# SPDX-License-Identifier: Apache-2.0
"""Manual pages of the operator's command, and what completes it in shells: all from its parser (`make docs`).

What is written depends on the parser alone, not on the version of Python: a test compares it.
"""

from __future__ import annotations

import argparse
import re
from typing import Iterator, List

from semishared import NAME
from semishared.cli.main import COMMANDS, parser

NAMES = {f"{NAME}.1": "", **{f"{NAME}-{verb}.1": verb for verb in COMMANDS}}
"""Page -> its verb, '' for that of the command itself."""
SHELLS = {
    "bash": f"bash-completion/completions/{NAME}",
    "zsh": f"zsh/site-functions/_{NAME}",
    "fish": f"fish/vendor_completions.d/{NAME}.fish",
}
"""Shell -> its file below share/."""
CODES = "exit codes: "
WAYS = """It is run as oneadmin on the front-end. Names from OpenNebula may be given as they are; ids are
numbers. A table is as wide as the terminal, or as COLUMNS says; a program gets one line for each row, or
JSON with \\-\\-json.
"""


def _escaped(text: str) -> str:
    """Return a text that groff prints as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def _sub(verb: str) -> argparse.ArgumentParser:
    top = parser(verb)
    choices = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    found: argparse.ArgumentParser = choices[verb]
    return found


def _word(action: argparse.Action) -> str:
    """Return how an argument is given: `--rate R`, `[IMAGE ...]`."""
    metavar = action.metavar or ("|".join(action.choices) if action.choices else action.dest)
    name = f"\\fI{_escaped(str(metavar))}\\fR"
    if action.option_strings:
        option = f"\\fB{_escaped(action.option_strings[-1])}\\fR"
        return option if action.nargs == 0 else f"{option} {name}"
    return {"?": f"[{name}]", "*": f"[{name} ...]", argparse.REMAINDER: f"[{name} ...]"}.get(
        str(action.nargs), name
    )


def _synopsis(sub: argparse.ArgumentParser) -> str:
    """Return how the verb is called; of what excludes each other one may be given, with ( ) one must."""
    words: List[str] = []
    grouped = {
        id(action): group for group in sub._mutually_exclusive_groups for action in group._group_actions
    }
    for action in _actions(sub):
        group = grouped.get(id(action))
        if group is None:
            is_optional = bool(action.option_strings) and not action.required
            words.append(f"[{_word(action)}]" if is_optional else _word(action))
        elif action is group._group_actions[0]:
            either = " | ".join(_word(one).strip("[]") for one in group._group_actions)
            words.append(f"({either})" if group.required else f"[{either}]")
    return " ".join(words)


def _actions(sub: argparse.ArgumentParser) -> List[argparse.Action]:
    return [action for action in sub._actions if not isinstance(action, argparse._HelpAction)]


def _described(text: str) -> Iterator[str]:
    """Yield the description: paragraphs are filled, lines that are set in stay as they are."""
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith(" "):
            yield f".PP\n.EX\n{_escaped(paragraph)}\n.EE"
        else:
            yield f".PP\n{_escaped(paragraph)}"


HEAD = """.\\" SPDX-License-Identifier: Apache-2.0
.\\" Generated from lib/semishared/cli by `make docs`.
.TH {} 1 "" "{}" "OpenNebula"
.nh
.ad l
.SH NAME
{} \\- {}
"""


def _head(name: str, line: str) -> str:
    return HEAD.format(_escaped(name.upper()), NAME, _escaped(name), _escaped(line))


def page(verb: str) -> str:
    """Return the manual page of a verb, or of the command for ''."""
    return _of_verb(verb) if verb else _of_all()


def _of_verb(verb: str) -> str:
    sub = _sub(verb)
    described, _, codes = (sub.description or "").partition(CODES)
    options = [f".TP\n{_word(action)}\n{_escaped(action.help or '')}" for action in _actions(sub)]
    parts = [
        _head(f"{NAME}-{verb}", COMMANDS[verb]) + f".SH SYNOPSIS\n\\fB{NAME} {verb}\\fR {_synopsis(sub)}",
        ".SH DESCRIPTION",
        *_described(described),
        ".SH ARGUMENTS",
        *options,
        ".SH EXIT STATUS",
        _escaped(codes.strip()),
        f".SH SEE ALSO\n.BR {NAME} (1)",
    ]
    return "\n".join(parts) + "\n"


def _of_all() -> str:
    rows = [f".TP\n.BR {_escaped(f'{NAME}-{verb}')} (1)\n{_escaped(line)}" for verb, line in COMMANDS.items()]
    line = "storage drivers for OpenNebula: the operator's command"
    parts = [
        _head(NAME, line) + f".SH SYNOPSIS\n\\fB{NAME}\\fR \\fICOMMAND\\fR [\\fIARGUMENT\\fR ...]",
        ".br",
        f"\\fB{NAME}\\fR \\fICOMMAND\\fR \\fB\\-\\-help\\fR",
        f".SH DESCRIPTION\n{WAYS}",
        ".SH COMMANDS",
        *rows,
        ".SH ERRORS\nA line begins with the id of its error;",
        f"\\fB{NAME} explain\\fR \\fIID\\fR says what it means and what to do.",
    ]
    return "\n".join(parts) + "\n"


def completion(shell: str) -> str:
    """Return what completes the command in a shell, as shtab makes it."""
    import shtab

    top = parser(every=True)
    choices = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    for verb, line in COMMANDS.items():
        choices[verb].description = line
    return str(shtab.complete(top, shell=shell))
