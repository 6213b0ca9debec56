# SPDX-License-Identifier: Apache-2.0
"""Arguments of the transfer actions: what oned sends is understood, anything else is one clear refusal."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semishared.errors import BadArguments
from semishared.opennebula import args

VM_DIR = "/var/lib/one/datastores/101/2"
HOSTILE = [
    "",
    " ",
    "\n",
    "..",
    "../..",
    "-rf",
    "--",
    "-oProxyCommand=reboot:/x",
    "$(reboot)",
    "`reboot`",
    ";",
    "a b",
    "'",
    '"',
    "\0",
    "h1\n:/x",
    "h1:",
    ":/x",
    "h1:x",
    "h1:/var/lib/one/../../etc",
    "h1:/a\x1b[2J/disk.0",
    "h1:/a\u202e/disk.0",
    "h1:/\ud800",
    "ñ:/x",
    "h1:/var/lib/one/datastores/101/2/disk.",
    "h1:/var/lib/one/datastores/101/2/disk.-1",
    "h1:/var/lib/one/datastores/101/2/disk.1x",
    "h1:/var/lib/one/datastores/101/2/disk.1\n",
    "h1:/var/lib/one/datastores/101/2/disk.\u0661",
    "h1:/var/lib/one/datastores/\u0661/2/disk.1",
    "\u0661",
    "\u00b2",
    "1e3",
    "+1",
    "0x1",
    " 1",
    "1_0",
    "9" * 400,
    "user@h1:/var/lib/one/datastores/101/2",
    "h1/../x:/y",
]
text = st.one_of(st.text(), st.sampled_from(HOSTILE))
path = st.builds(
    "/".join,
    st.lists(
        st.one_of(
            st.sampled_from(["", ".", "..", "disk.1", "kernel", "2", "101", "a b"]), st.text(max_size=5)
        )
    ),
)
location = st.one_of(text, st.builds("{}:{}".format, st.sampled_from(["h1", "fe", "-h", "h 1", ""]), path))
argument = st.one_of(
    text, location, path, st.sampled_from(["2", "101", "-1", "raw", f"h1:{VM_DIR}", f"h1:{VM_DIR}/disk.1"])
)
PARSERS: list[Callable[[list[str]], Any]] = [
    args.FromImage.parse,
    args.NewDisk.parse,
    args.NewDisk.parse_swap,
    args.Context.parse,
    args.Move.parse,
    args.ToImage.parse,
    args.ToImage.parse_copy,
    args.Delete.parse,
    args.Migrate.parse,
]


def places(value: Any) -> list[args.VmPlace]:
    """Return all VM directories in a parsed request."""
    if isinstance(value, args.VmPlace):
        return [value]
    return [place for part in value if isinstance(part, tuple) for place in places(part)]


def is_plain(text: str) -> bool:
    return text.startswith("/") and ".." not in text.split("/") and "//" not in text and text.isprintable()


@pytest.mark.parametrize(
    "parser", PARSERS, ids=lambda parser: f"{parser.__self__.__name__}.{parser.__name__}"
)
@given(argv=st.lists(argument, max_size=7))
def test_arbitrary_arguments_are_a_safe_request_or_bad_arguments(
    parser: Callable[[list[str]], Any], argv: list[str]
) -> None:
    try:
        request = parser(argv)
    except BadArguments:
        return
    for place in places(request):
        assert is_plain(place.path), place
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", place.host), place
        assert re.fullmatch(rf"/.*/[0-9]+/{place.vm}", place.path), place
        assert place.datastore_location.startswith("/")


@given(text)
@example("0" * 16)
def test_number_is_a_small_natural_number_or_bad_arguments(value: str) -> None:
    try:
        found = args.number(value, "size")
    except BadArguments as e:
        assert "size" in e.detail
        return
    assert re.fullmatch("[0-9]{1,15}", value)
    assert found == int(value)


@given(st.one_of(text, path))
def test_absolute_is_a_plain_path_or_bad_arguments(value: str) -> None:
    try:
        found = args.absolute(value, "source")
    except BadArguments as e:
        assert "source" in e.detail
        return
    assert is_plain(found)
    assert [part for part in value.split("/") if part not in ("", ".")] == [
        part for part in found.split("/") if part
    ]


@given(location)
def test_location_has_a_host_that_is_no_option_and_a_plain_path(value: str) -> None:
    try:
        found = args.Location.parse(value)
    except BadArguments:
        return
    assert not found.host.startswith("-")
    assert is_plain(found.path)


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_locations_of_a_vm_are_refused(value: str) -> None:
    with pytest.raises(BadArguments):
        args.Delete.parse([value, "2", "101"])
    with pytest.raises(BadArguments):
        args.Delete.parse([f"h1:{VM_DIR}", value, "101"])
    with pytest.raises(BadArguments):
        args.Delete.parse([f"h1:{VM_DIR}", "2", value])


@pytest.mark.parametrize(
    "host",
    [
        "",
        "-oProxyCommand=x",
        "--",
        "h 1",
        "h\n1",
        "h1\n",
        "h;reboot",
        "$(x)",
        "ü",
        "u@h",
        "h:1",
        "/h",
        ".h",
        "\0",
    ],
)
def test_hosts_that_ssh_or_a_shell_might_misread_are_refused(host: str) -> None:
    for argv in ([host, "h2", VM_DIR, "2", "101"], ["h1", host, VM_DIR, "2", "101"]):
        with pytest.raises(BadArguments, match="not a host name"):
            args.Migrate.parse(argv)
    with pytest.raises(BadArguments):
        args.Delete.parse([f"{host}:{VM_DIR}", "2", "101"])


def test_double_slashes_of_oned_are_one() -> None:
    found = args.Location.parse("h1:/var/lib/one//datastores/101/2/")
    assert found == args.Location("h1", "/var/lib/one/datastores/101/2")


@pytest.mark.parametrize(
    "path",
    ["/1/2", "/2", "/datastores/2", "/var/datastores/x/2", "/var/101/3", "/var/101/02", "/var/101/2/3"],
)
def test_vm_place_is_a_directory_of_that_vm_in_a_system_datastore(path: str) -> None:
    with pytest.raises(BadArguments, match="VM 2"):
        args.VmPlace.at(args.Location("h1", path), "2")


def test_vm_place_knows_where_its_datastores_lie() -> None:
    place = args.VmPlace.at(args.Location("h1", "/srv/one/101/2"), "2")
    assert place.datastore_location == "/srv/one"


@pytest.mark.parametrize(
    ("name", "disk"), [("disk.0", 0), ("disk.12", 12), ("kernel", None), ("initrd", None)]
)
def test_disk_place_is_a_disk_or_a_kernel(name: str, disk: object) -> None:
    place = args.DiskPlace.at(args.Location("h1", f"{VM_DIR}/{name}"), "2")
    assert (place.disk, place.path, place.host) == (disk, f"{VM_DIR}/{name}", "h1")


@pytest.mark.parametrize(
    "name", ["disk", "disk.a", "disk.1.snap", ".disk.1", "context.sh", "disk.1234567890"]
)
def test_disk_place_is_nothing_else(name: str) -> None:
    with pytest.raises(BadArguments, match="neither a disk nor a kernel"):
        args.DiskPlace.at(args.Location("h1", f"{VM_DIR}/{name}"), "2")


def test_context_is_parsed_from_its_end() -> None:
    found = args.Context.parse(["/v/context.sh", "/v/a:'b c'", f"h1:{VM_DIR}/disk.4", "2", "101"])
    assert found.files == ("/v/context.sh", "/v/a:'b c'")
    assert found.target.disk == 4


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
def test_wrong_number_of_arguments_says_how_many_belong(count: int) -> None:
    with pytest.raises(BadArguments, match=f"{count} arguments where 4 belong"):
        args.FromImage.parse(["x"] * count)


def test_migrate_names_the_driver_that_calls() -> None:
    argv = ["h1", "h2", VM_DIR, "2", "101"]
    assert args.Migrate.parse(argv).caller == ""
    assert args.Migrate.parse([*argv, "ssh"]).caller == "ssh"
    assert args.Migrate.parse(argv).target.host == "h2"
