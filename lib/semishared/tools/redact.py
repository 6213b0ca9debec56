# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of text that leaves the machine, and rather too much than too little.

Secrets are known by their names (`PASSWORD = ...`), by their forms (the keys of Ceph, private keys, user and
query of a URL), and those that the caller has read somewhere are known word by word, in each form that
programs give them.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Iterable
from urllib.parse import quote, quote_plus

GONE = "***"
SHORTEST = 4
"""Characters of a known secret: a shorter one would take half of every text with it."""
LONGEST = 4000
"""Characters of one quoted value: it may have several lines."""
_WORD = r"[\w.-]{0,64}(?:passw|passphrase|pwd|secret|token|credential|apikey|api[_-]key|auth)[\w.-]{0,64}"
_NAME = re.compile(rf"{_WORD}|(?:[\w.-]{{0,64}}[_.-])?key", re.IGNORECASE)
_QUOTED = (
    rf'"(?:[^"\\]|\\.){{0,{LONGEST}}}"',
    rf"'[^']{{0,{LONGEST}}}'",
    rf"<!\[CDATA\[.{{0,{LONGEST}}}?\]\]>",
)
_NAMED = re.compile(
    # Behind the name: the end of a quoted one, and what stands before a value; of an option, a blank does.
    rf"""(?P<name>(?<![\w.-])(?:(?:{_NAME.pattern})(?:\\*["'])?[ \t]*[=:>]|--?(?:{_NAME.pattern})[ \t]))"""
    rf"""[ \t]*(?:{"|".join(_QUOTED)})?[^\n]*""",
    re.IGNORECASE | re.DOTALL,
)
"""A name, and all that follows in its line: where a value ends depends on a syntax that may be any."""
_URL = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,20}:/+)(?:[^\s\"'<>]*@)?(?P<rest>[^\s\"'<>?#]*)(?P<query>[?#]\S*)?"
)
"""Whatever a password has in it: all before the last @ goes."""
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)", re.DOTALL)
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/]{22,}={1,2}")
"""The keys of Ceph, and what else is random bytes with an end."""


class Redactor:
    """Knows the secrets that were read, and takes them and all others out of texts."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """`known`: passwords and keys as they are, without their names; `user:password` counts as both."""
        found = set()
        for secret in known:
            secret = secret.strip()
            for word in (secret, secret.partition(":")[2].strip()):
                if len(word) >= SHORTEST:
                    coded = base64.b64encode(word.encode("utf-8", "surrogateescape")).decode()
                    found |= {word, quote(word, safe=""), quote_plus(word), coded, coded.rstrip("=")}
                    found |= {json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]}
        # The longest first: one may be a part of another.
        words = sorted(filter(None, found), key=lambda word: (-len(word), word))
        self._known = re.compile("|".join(map(re.escape, words))) if words else None

    def text(self, text: str) -> str:
        """Return a text without secrets. What follows a secret's name in its line goes with it."""
        if self._known:
            text = self._known.sub(GONE, text)
        text = _PEM.sub(GONE, text)
        text = _URL.sub(_without_user, text)
        text = _NAMED.sub(lambda match: f"{match['name']} {GONE}", text)
        return _BASE64.sub(GONE, text)

    def data(self, value: Any) -> Any:
        """Return JSON data without secrets: strings everywhere, and all that a secret's name stands for."""
        if isinstance(value, dict):
            return {self.text(str(name)): self._of_name(str(name), below) for name, below in value.items()}
        if isinstance(value, list):
            return [self.data(below) for below in value]
        return self.text(value) if isinstance(value, str) else value

    def _of_name(self, name: str, value: Any) -> Any:
        return GONE if isinstance(value, (str, int, float)) and _NAME.fullmatch(name) else self.data(value)


def _without_user(match: re.Match[str]) -> str:
    """Return a URL without user, password and query; whose a path of ssh:// is, is no secret, but may be."""
    user = f"{GONE}@" if "@" in match[0][: match.start("rest") - match.start()] else ""
    return f"{match['scheme']}{user}{match['rest']}{f'?{GONE}' if match['query'] else ''}"
