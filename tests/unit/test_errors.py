# SPDX-License-Identifier: Apache-2.0
"""The catalogue of errors, and the pages that are made from it or have to agree with the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared import errors
from semishared.model import attributes

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ids_are_unique_and_well_formed() -> None:
    ids = [error.id for error in errors.catalogue()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"SS[0-9]{3}", id) for id in ids)


def test_catalogue_holds_every_error_of_the_module() -> None:
    tree = ast.parse((ROOT / "lib" / "semishared" / "errors.py").read_text())
    assert {node.name for node in tree.body if isinstance(node, ast.ClassDef)} == {
        cls.__name__ for cls in errors.catalogue()
    }


def test_no_error_is_defined_elsewhere_and_all_are_raised_somewhere() -> None:
    texts = [path.read_text() for path in (ROOT / "lib").rglob("*.py") if path.name != "errors.py"]
    assert not any(re.search(r"class \w+\((SemisharedError|ToolFailed)\)", text) for text in texts)
    for cls in errors.catalogue():
        assert any(re.search(rf"\b{cls.__name__}\(", text) for text in texts), f"nobody raises {cls.__name__}"


@pytest.mark.parametrize("error", errors.catalogue(), ids=lambda error: error.id)
def test_error_says_what_it_is_and_what_to_do(error: type[errors.SemisharedError]) -> None:
    assert "id" in vars(error)
    assert "remedy" in vars(error), f"{error.__name__} has no remedy of its own"
    assert error.__doc__ is not None
    assert error.__doc__.rstrip().endswith(".")
    assert not error.remedy.endswith(".")
    assert error("what happened").line() == f"{error.id} what happened; {error.remedy}"


@given(st.text())
def test_detail_is_one_line_and_never_empty(detail: str) -> None:
    error = errors.ToolFailed(detail)
    assert error.detail
    assert "\n" not in error.line()


@pytest.mark.parametrize("error", errors.catalogue(), ids=lambda error: error.id)
def test_error_is_the_same_behind_ssh(error: type[errors.SemisharedError]) -> None:
    found = errors.from_id(error.id, "what happened")
    assert type(found) is error
    assert found.detail == "what happened"


def test_unknown_id_from_a_host_is_still_an_error() -> None:
    assert errors.from_id("SS999", "x").detail == "x"


def test_page_of_errors_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generator().main(["--check"]) == 0, capsys.readouterr().err


def test_generator_writes_a_page_and_check_notices_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = generator()
    vars(docs)["DOCS"] = tmp_path
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    (tmp_path / "reference" / "errors.md").write_text("old")
    assert docs.main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    for error in errors.catalogue():
        assert f"{error.id} " in docs.errors()


def test_page_of_attributes_has_a_row_of_each_and_lists_the_words_that_it_may_be() -> None:
    page = (REFERENCE / "attributes.md").read_text()
    known = attributes.known()
    rows = [name for name in re.findall(r"(?m)^\| \[?`(SEMISHARED_[A-Z_]+)`", page)]
    assert sorted(rows) == sorted(known) and set(re.findall(r"SEMISHARED_[A-Z_]+", page)) == set(known)
    found: dict[str, set[str]] = {}
    for section in re.split(r"(?m)^## ", page):
        name = section.split("\n", 1)[0].strip()
        if name.startswith("SEMISHARED_"):
            found[name] = set(re.findall(r"(?m)^\| `([^`]+)`", section))
    assert len(found) >= 9 and found == {name: set(known[name].values) for name in found}
    assert sum(name.startswith("SEMISHARED_CEPH_") for name in known) == 5
    assert sum(name.startswith("SEMISHARED_FS") for name in known) == 5


def test_rows_of_attributes_are_of_the_page_whatever_stands_around_them() -> None:
    docs = generator()
    text = "a\n<!-- rows *_CEPH_* -->\nold\n<!-- end -->\nb\n<!-- rows * -->\n<!-- end -->\n"
    made = docs.with_rows(text)
    first, second = made.split("\nb\n")
    assert first.startswith("a\n<!-- rows *_CEPH_* -->\n\n| attribute |") and "old" not in first
    assert "`SEMISHARED_CEPH_READER`" in first and "`SEMISHARED_CEPH_READER`" not in second
    assert "| `SEMISHARED_DETACH` | image, image datastore | `on-request` (default), `after-boot` |" in second
    assert docs.with_rows(made) == made


def test_code_knows_no_attribute_that_the_page_does_not() -> None:
    page = (REFERENCE / "attributes.md").read_text()
    variables = {
        "SEMISHARED_KILL_AT",
        "SEMISHARED_STOP_AT",
        "SEMISHARED_TRACE",
        "SEMISHARED_SHARE_",
        "SEMISHARED_SHARES",
    }
    for path in (ROOT / "lib").rglob("*.py"):
        for name in set(re.findall(r"\bSEMISHARED_[A-Z_]+\b", path.read_text())) - variables:
            assert name in page, f"{path} knows {name}, docs/reference/attributes.md does not"


def test_page_of_attributes_lists_the_attributes_the_datastore_driver_reads() -> None:
    page = (REFERENCE / "attributes.md").read_text()
    listed = set(re.findall(r"`([A-Z0-9_]{2,})`", page.split("datastore driver knows")[1]))
    texts = [
        (ROOT / "lib" / "semishared" / name).read_text()
        for name in ("front/upload.py", "plan/image/images.py")
    ]
    read = {name for text in texts for name in re.findall(r'attribute\("([A-Z0-9_]+)"\)', text)} - {"FS"}
    assert read | {"MD5", "SHA1", "SHA256"} == listed
