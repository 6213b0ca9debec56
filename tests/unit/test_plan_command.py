# SPDX-License-Identifier: Apache-2.0
"""What `semishared plan` prints."""

from __future__ import annotations

from semishared.cli.plan import without_passwords


def test_no_password_of_an_upload_is_printed() -> None:
    step = {
        "step": "Upload",
        "path": "https://user:secret@h/x?sign=1",
        "more": [{"path": "http://a:b@h/y"}],
        "n": 3,
    }
    assert without_passwords({"plan": [{"steps": (step,)}], "stdout": None}) == {
        "plan": [
            {
                "steps": [
                    {
                        "step": "Upload",
                        "path": "https://user:***@h/x?...",
                        "more": [{"path": "http://a:***@h/y"}],
                        "n": 3,
                    }
                ]
            }
        ],
        "stdout": None,
    }
