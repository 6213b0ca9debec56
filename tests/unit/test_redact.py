# SPDX-License-Identifier: Apache-2.0
"""What leaves the machine has no secret in it, however it is written, and hostile text costs no more."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.tools.redact import GONE, Redactor

SECRET = "s3cr3t-W0rd"
CEPH = "AQBhN2ZlAAAAABAAq4VoM0yO5c3S9hV7mFZ2Kw=="

LINES = [
    f'PASSWORD = "{SECRET}"',
    f"PASSWORD={SECRET}",
    f'DB = [ BACKEND = "mysql", PASSWD = "{SECRET}", DB_NAME = "one" ]',
    f'PASSWORD = "first\n{SECRET}"',
    f"PASSWORD = 'first\n{SECRET}'",
    f'PASSWORD = "a\\"b {SECRET}"',
    f'{{"password": "{SECRET}"}}',
    f'{{\\"password\\": \\"{SECRET}\\"}}',
    f'{{"password": "a\\"{SECRET}"}}',
    f"<PASSWORD>{SECRET}</PASSWORD>",
    f"<PASSWORD><![CDATA[{SECRET}]]></PASSWORD>",
    f"<PASSWORD><![CDATA[first\n{SECRET}]]></PASSWORD>",
    f"mysql --password {SECRET} one",
    f"mysql --password={SECRET} one",
    f"rbd --id x --key {SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"authorization: Basic {SECRET}",
    f"X-Auth-Token : {SECRET}",
    f"10.0.0.1:/ /mnt ceph rw,name=x,secret={SECRET},acl 0 0",
    f"key = {CEPH}",
    f"said {CEPH} and went on",
    f"https://user:{SECRET}@host/image.qcow2",
    f"https://{SECRET}@host/image.qcow2",
    f"https://user:p@{SECRET}@host/image.qcow2",
    f"https://host/image.qcow2?X-Amz-Signature={SECRET}&x=1",
    f"s3://user:{SECRET}@bucket/x",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}",
    f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"api-key: {SECRET}",
    f"PassPhrase:{SECRET}",
]


@pytest.mark.parametrize("line", LINES)
def test_secrets_go_by_their_names_and_forms(line: str) -> None:
    said = Redactor().text(f"before\n{line}\nafter")
    assert SECRET not in said and CEPH not in said and GONE in said
    assert said.startswith("before\n") and (said.endswith("\nafter") or "BEGIN RSA" in line)


@pytest.mark.parametrize(
    "line",
    [
        "SS082 image 7: the key of the front-ends differs",
        "/var/lib/one/.one/one_auth",
        'TM_MAD = [ EXECUTABLE = "one_tm", ARGUMENTS = "-t 64 -d dummy,semishared" ]',
        "AUTH_MAD",
        "https://host/image.qcow2",
        "host h1: 0.2.0+3f9a1c0b2d4e",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "12345678-1234-1234-1234-123456789012",
        "monkey = 3",
    ],
)
def test_what_is_none_stays(line: str) -> None:
    assert Redactor().text(line) == line


@given(st.text(min_size=4, max_size=40), st.text(max_size=30), st.text(max_size=30))
def test_what_was_read_goes_in_each_form(secret: str, before: str, after: str) -> None:
    secret = secret.strip()
    if len(secret) < 4 or secret in GONE or "\ud800" <= max(secret) <= "\udfff":
        return
    redactor = Redactor([f"oneadmin:{secret}\n"])
    coded = base64.b64encode(f"oneadmin:{secret}".encode()).decode()
    for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1], coded):
        assert form not in redactor.text(f"{before} {form} {after}") or form in f"{before}  {after}"


def test_json_goes_by_its_names_at_any_depth() -> None:
    data = {
        "a": [{"password": SECRET, "n": 1}],
        "TOKEN": 12345678,
        "url": f"http://u:{SECRET}@h/",
        SECRET: None,
    }
    said = Redactor([SECRET]).data(data)
    assert SECRET not in json.dumps(said) and "12345678" not in json.dumps(said)
    assert said["a"][0]["n"] == 1 and said["url"] == "http://***@h/"


@pytest.mark.parametrize(
    "text",
    [
        'key="',
        "passw",
        "://",
        "A",
        "http://a",
        "-----BEGIN PRIVATE KEY-----",
        "<![CDATA[",
        "a.",
        "key = <![CDATA[",
        "\\",
    ],
)
def test_hostile_text_costs_no_more_than_its_length(text: str) -> None:
    redactor, sizes = Redactor([SECRET]), []
    for size in (20_000, 80_000):
        began = time.process_time()
        redactor.text(text * (size // len(text)))
        sizes.append(time.process_time() - began)
    assert sizes[1] < 8 * sizes[0] + 0.5, sizes
