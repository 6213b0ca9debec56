# SPDX-License-Identifier: Apache-2.0
"""curl, the one client for http and https: what measures a file asks as what fetches it does.

A URL may contain a password. curl reads it from stdin: command lines are for all users of a machine to read,
and so are the lines of errors.
"""

from __future__ import annotations

import re

from ..errors import BadArguments

_ARGV = [
    "curl",
    "--silent",
    "--show-error",
    "--fail",
    "--location",
    "--globoff",
    "--proto",
    "=http,https",
    "--connect-timeout",
    "30",
    "--config",
    "-",
]
"""`globoff`: brackets in a URL are its own. --config -: the URL comes on stdin."""
PLAIN = r"[A-Za-z0-9\-._~:/?#@!$&()*+,;=%]"
"""What stays as it is in a URL. A single quote does not: OpenNebula's downloader quotes with it."""
AUTHORITY = r"(https?)://(?:([^/?#]*)@)?(\[[0-9A-Fa-f:.]+\]|[^/?#@:\[\]]+)(:[0-9]{1,5})?(?=[/?#]|\Z)(.*)\Z"
"""Scheme, user and password, host, port; and what follows."""


def escaped(url: str) -> str:
    """Return a URL with what none may contain (blanks, quotes, brackets, other letters) percent-encoded.

    Raise BadArguments for what is no URL of http or https.
    """
    match = re.match(AUTHORITY, url)
    if not match:
        raise BadArguments(f"not a URL that can be fetched: {masked(url)!r}")
    scheme, user, host, port, rest = match.groups(default="")
    if not host.isascii():
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError:
            raise BadArguments(f"not a URL that can be fetched: {masked(url)!r}") from None
    if not re.fullmatch(r"[A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.]+\]", host):
        raise BadArguments(f"not a URL that can be fetched: {masked(url)!r}")
    return f"{scheme}://{_encoded(user) + '@' if user else ''}{host}{port}{_encoded(rest)}"


def _encoded(text: str) -> str:
    return "".join(
        letter if re.match(PLAIN, letter) else "".join(f"%{byte:02X}" for byte in letter.encode())
        for letter in text
    )


def masked(url: str) -> str:
    """Return a URL as lines show it: without a password, and without a query, which may be a signature."""
    scheme, slashes, rest = url.partition("://")
    if not slashes or scheme not in ("http", "https"):
        return url
    rest, mark, _ = rest.partition("?")
    authority, slash, path = rest.partition("/")
    # A password with a slash is no URL's, and is not shown for that.
    if "@" in path and "@" not in authority and ":" in authority:
        authority, slash, path = f"{authority}/{path}".rpartition("@")[2], "", ""
        authority = f"***@{authority}"
    elif "@" in authority:
        user, _, host = authority.rpartition("@")
        name, colon, _ = user.partition(":")
        authority = f"{name}{':***' if colon else ''}@{host}"
    return f"{scheme}://{authority}{slash}{path}{'?...' if mark else ''}"


def argv(trusting: bool = False) -> list[str]:
    """Return the words that fetch the URL of `config`; `trusting`: from a server with any certificate."""
    return [*_ARGV, *(["--insecure"] if trusting else [])]


def has_password(url: str) -> bool:
    match = re.match(AUTHORITY, url)
    return bool(match and match.group(2))


def config(url: str) -> bytes:
    """Return curl's stdin for a URL; raise BadArguments."""
    return f'url = "{escaped(url)}"\n'.encode()


def length(heads: bytes) -> int:
    """Return the bytes that the last of the heads of --dump-header says will follow, 0 if it does not."""
    last = re.split(rb"(?m)^HTTP/", heads)[-1]
    said = re.search(rb"(?im)^content-length:[ \t]*([0-9]{1,18})[ \t]*\r?$", last)
    return int(said.group(1)) if said else 0


def reason(detail: str, url: str) -> str:
    """Return why curl has failed, of the detail of its error: never with a password."""
    said = re.sub(r"\Acurl: [^:]*: (?:curl: )?", "", detail)
    for shown in (url, escaped(url)):
        said = said.replace(shown, masked(url))
    if "(60)" in said or "(77)" in said:
        said += (
            "; add the authority that signed it to those that the front-end knows, or give the image's "
            "SHA256 (then the certificate does not matter)"
        )
    return said
