# SPDX-License-Identifier: Apache-2.0
"""A tree of recorder scripts in place of drivers: they note what they get, and succeed or fail as recorded.

That is honest for one purpose only: seeing what the simulated oned generates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

# Hundreds of calls: it starts without site packages and speaks XML-RPC by hand (20 ms instead of 100).
SCRIPT = r"""#!/usr/bin/python3 -ISB
import binascii, fcntl, json, os, re, socket, sys
path, argv = sys.argv[0], sys.argv[1:]
action, driver, kind = path.split("/")[-1], path.split("/")[-2], path.split("/")[-3]
data = sys.stdin.read()
home = os.environ["RECORDER_ROOT"] + "/" + os.environ["RECORDER_NODE"]
call = {"kind": kind, "driver": driver, "action": action, "argv": argv, "stdin": data,
        "host": os.environ["RECORDER_NODE"], "script": path[len(home):], "cwd": os.getcwd()[len(home):],
        "env": {k: v for k, v in os.environ.items()
                if not k.startswith("RECORDER_") and k not in ("ONE_XMLRPC", "LC_CTYPE", "PWD", "SHLVL", "_")}}
def ask(vm):
    body = ("<methodCall><methodName>one.vm.info</methodName><params><param><value><string>oneadmin:password"
            "</string></value></param><param><value><int>%d</int></value></param></params></methodCall>" % vm)
    port = int(os.environ["ONE_XMLRPC"].split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(("POST /RPC2 HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)).encode())
        with server.makefile(encoding="utf-8", newline="") as stream:
            answer = stream.read()
    assert "<boolean>1</boolean>" in answer, answer
    text = answer.split("<string>", 1)[1].split("</string>", 1)[0]
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
if kind == "tm":
    call["vm_info"] = ask(int(argv[-2]))
with open(os.environ["RECORDER_LOG"], "a+") as log:
    fcntl.flock(log, fcntl.LOCK_EX)
    log.seek(0)
    number = sum(json.loads(line)["action"] != "monitor" for line in log)
    log.write(json.dumps(call) + "\n")
with open(os.environ["RECORDER_LOG"] + ".failures") as failures:
    failure = json.load(failures).get(str(number))
if failure:
    text = failure[1]
    for recorded, given in zip(failure[2], argv):
        text = text.replace(recorded, given) if len(recorded) > 8 else text
    sys.stderr.write(text)
    sys.exit(failure[0])
message = binascii.a2b_base64(data).decode() if kind == "datastore" else data
def found(pattern):
    match = re.search(pattern, message)
    return match.group(1) if match else ""
source = found(r"<BASE_PATH><!\[CDATA\[(.*?)\]\]>") + "/" + os.urandom(16).hex()
if action == "stat":
    print(16)
elif action == "cp":
    print(source, "qcow2" if found(r"<PATH><!\[CDATA\[(.*?)\]\]>").endswith(".qcow2") else "raw")
elif action == "mkfs" and kind == "datastore":
    print(source)
elif action == "clone" and kind == "datastore":
    print(source, found(r"<FORMAT><!\[CDATA\[(.*?)\]\]>"))
elif action == "monitor":
    print("USED_MB=300\nTOTAL_MB=1000\nFREE_MB=700")
elif action == "deploy":
    print(found("<uuid>(.*?)</uuid>"))
"""  # noqa: E501

_TM = (
    "clone ln mkimage mkswap context mv mvds cpds delete resize premigrate postmigrate failmigrate"
    " snap_create snap_create_live snap_delete snap_revert"
)
_DATASTORE = "stat cp mkfs clone rm monitor snap_delete snap_revert snap_flatten"
_VMM = "deploy cancel shutdown save restore reset reboot attach_disk detach_disk migrate resize_disk"


def plant(
    root: Path, hosts: Sequence[str], drivers: Sequence[str] = ("semishared",), vmm: str = "kvm"
) -> None:
    """Fill a tree with recorders, as `<root>/<node>/...`."""
    places = [("fe/var/lib/one/remotes/tm/" + driver, _TM) for driver in drivers]
    places += [("fe/var/lib/one/remotes/datastore/" + driver, _DATASTORE) for driver in drivers]
    places += [(f"{host}/var/tmp/one/vmm/{vmm}", _VMM) for host in hosts]
    for directory, actions in places:
        (root / directory).mkdir(parents=True)
        for action in actions.split():
            script = root / directory / action
            script.write_text(SCRIPT)
            script.chmod(0o755)


def fail(log: Path, failures: Dict[int, Tuple[int, str, List[str]]]) -> None:
    """Let the calls of these numbers (not counting monitor) fail as recorded: exit code, stderr, argv."""
    Path(f"{log}.failures").write_text(json.dumps(failures))


def read(log: Path) -> List[Dict[str, Any]]:
    """Read what the recorders noted, in order."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
