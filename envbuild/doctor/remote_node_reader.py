"""Describes the nodes of a cluster: runs `doctor --json` on each node with ssh or srun, or reads saved descriptions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envbuild.doctor.machine_readings import clean
from envbuild.doctor.node_comparison import MAX_BYTES, Node, parse
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import EnvbuildError, FileError, UsageError
from envbuild.util.host_processes import ProcessMissing, Stop, run

SLURM = "slurm"
PARALLEL = 32
MAX_NODES = 4096
SECONDS = 40.0
"""Seconds for one node. doctor takes 5, a connection takes at most 10, and a busy scheduler needs time to start a job
step."""
# Excludes words that ssh could take for an option, and characters that a remote shell would interpret.
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9._:-]{0,252}")
_PROGRAM = re.compile(r"[A-Za-z0-9_~./][A-Za-z0-9_./+-]{0,500}")


def gather_nodes(source: str) -> list[Node]:
    """Describes the nodes that `source` names: `slurm` (the current allocation), a YAML file, or a folder of JSON
    files.

    The YAML file has the keys `hosts` (a list) and `envbuild` (the path of the program on the nodes). Raises FileError
    for any other source, and UsageError for `slurm` outside of an allocation.
    """
    if source == SLURM:
        return _run(_slurm())
    path = Path(source)
    if path.is_dir():
        return _read(path)
    if not path.is_file():
        hint = "name a YAML file with hosts: [...], a folder of files that doctor -o wrote, or slurm"
        raise FileError(f"cluster not found: {source!r}", hint=hint)
    return _run(_ssh(path))


def _ssh(file: Path) -> dict[str, list[str]]:
    """Returns node name -> the command that describes the node, for the nodes in a YAML file."""
    found = yaml_and_project_paths.read(file, FileError)
    hosts, program = found.data.get("hosts"), found.data.get("envbuild", "envbuild")
    faults = [found.fault((key,), "unknown key (known: hosts, envbuild)") for key in sorted(set(found.data) - _KEYS)]
    listed = hosts if isinstance(hosts, list) and hosts else []
    if not listed or len(listed) > MAX_NODES:
        faults.append(found.fault(("hosts",), f"must be a list of 1 to {MAX_NODES} hosts"))
    for index, host in enumerate(listed):
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            faults.append(found.fault(("hosts", index), "must be a name or an address, optionally with user@ in front"))
    if not isinstance(program, str) or not _PROGRAM.fullmatch(program):
        faults.append(found.fault(("envbuild",), "must be the path of the program on the nodes, without blanks"))
    if faults:
        raise FileError(f"{found.file} does not name a cluster", faults=faults)
    before = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T", "--"]
    return {host: [*before, host, f"{program} doctor --json"] for host in dict.fromkeys(listed)}


_KEYS = {"hosts", "envbuild"}


def _slurm() -> dict[str, list[str]]:
    """Returns node name -> the command that describes the node, for the nodes of the allocation. The commands use the
    path of this Python interpreter, because the nodes of a cluster share their file system."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UsageError("not in a Slurm allocation", hint="salloc -N 4 envbuild doctor --cluster slurm")
    done = run(["scontrol", "show", "hostnames", listed], timeout=SECONDS, limit=MAX_BYTES)
    names = done.stdout.split()
    if done.code != 0 or not names or not all(map(_HOST.fullmatch, names)):
        raise UsageError(
            f"scontrol could not list the nodes of the allocation: {clean(done.stderr)}", hint="scontrol ping"
        )
    one = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet"]
    doctor = [sys.executable, "-m", "envbuild", "doctor", "--json"]
    if len(names) > MAX_NODES:
        raise UsageError(f"the allocation has {len(names)} nodes, more than {MAX_NODES}")
    return {name: [*one, f"--nodelist={name}", *doctor] for name in names}


def _run(commands: dict[str, list[str]]) -> list[Node]:
    """Runs all commands, and returns the nodes in the same order. An exception, such as an interrupt, ends the running
    commands and starts no more."""
    stop = Stop()
    with ThreadPoolExecutor(PARALLEL) as pool:
        futures = [pool.submit(_one, name, command, stop) for name, command in commands.items()]
        try:
            return [node.result() for node in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise


def _one(name: str, command: Sequence[str], stop: Stop) -> Node:
    """Runs one command. Exit code 5 is valid too: doctor returns it if a check fails."""
    try:
        done = run(command, timeout=SECONDS, limit=MAX_BYTES, stop=stop)
    except ProcessMissing:
        raise
    except EnvbuildError as error:
        return Node(name, fault=clean(error.message))
    if done.cut:
        return Node(name, fault=f"its output is larger than {MAX_BYTES} bytes")
    if done.code not in (0, 5) or not done.stdout.strip():
        return Node(name, fault=f"{command[0]} ended with exit code {done.code}: {clean(done.stderr) or 'no message'}")
    return parse(name, done.stdout)


def _read(folder: Path) -> list[Node]:
    """Returns one node for each JSON file, named after the file, because several machines may report the same name."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileError(f"no JSON files in {folder}", hint="on each node: envbuild doctor -o FOLDER/$(hostname).json")
    if len(files) > MAX_NODES:
        raise FileError(f"{folder} holds {len(files)} JSON files, more than {MAX_NODES}")
    return [_file(file) for file in files]


def _file(file: Path) -> Node:
    name = clean(file.stem)
    if not file.is_file():
        return Node(name, fault=f"{clean(file.name)} is not a file")
    try:
        with file.open("rb") as stream:
            return parse(name, stream.read(MAX_BYTES + 1))
    except OSError as error:
        return Node(name, fault=f"{clean(file.name)} cannot be read: {error.strerror}")
