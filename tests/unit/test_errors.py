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
from semishared.model.device import classes
from semishared.model.disk.record import IO_CLASSES
from semishared.plan.base import staging
from semishared.plan.image import placement

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
    assert error("what happened").line() == f"what happened; {error.remedy} [{error.id}]"


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


def test_page_of_attributes_lists_what_placement_knows_and_nothing_else() -> None:
    page = (REFERENCE / "attributes.md").read_text()
    known = {
        "SEMISHARED_PLACE": set(placement.WHERE),
        "SEMISHARED_LOCAL": set(placement.LOCALS),
        "SEMISHARED_STAGE": set(staging.WHEN),
        "SEMISHARED_ON_HOST_FAILURE": set(placement.ON_HOST_FAILURE),
        "SEMISHARED_DETACH": set(placement.DETACH),
        "SEMISHARED_IO_CLASS": set(IO_CLASSES),
        "SEMISHARED_CLASS": set(classes.WORDS),
        "SEMISHARED_BASES": set(placement.BASES),
        "SEMISHARED_SHARE_ACCESS": set(placement.ACCESS),
    }
    sections = re.split(r"(?m)^## ", page)
    found: dict[str, set[str]] = {}
    for section in sections:
        name = section.split("\n", 1)[0].strip()
        if name.startswith("SEMISHARED_"):
            found[name] = set(re.findall(r"(?m)^\| `([^`]+)`", section))
    assert found == known
    of_ceph = set(
        re.findall(
            r'"(SEMISHARED_CEPH_[A-Z_]+)"', (ROOT / "lib/semishared/model/store/access.py").read_text()
        )
    )
    assert len(of_ceph) == 5
    written = {"SEMISHARED_STORE", "SEMISHARED_CLOUD"}
    of_shares = set(
        re.findall(r'"(SEMISHARED_FS[A-Z_]*)"', (ROOT / "lib/semishared/model/share/share.py").read_text())
    )
    assert len(of_shares) == 5
    of_hosts = {"SEMISHARED_BASES_LIMIT", "SEMISHARED_BASES_FLOOR", "SEMISHARED_FENCED", "SEMISHARED_POOL"}
    assert (
        set(re.findall(r"SEMISHARED_[A-Z_]+", page)) == set(known) | of_ceph | written | of_hosts | of_shares
    )


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
