"""Collects the contents of small environments, and starts the collector only once for equal environments.

The collector takes 0.2 s of processor time, and many tests begin with the same environment. Its document depends on the
files and on the environment variables; equal ones in another folder give the same document with other paths.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.collected_environment import Holdings
from envbuild.runners import host_runner

_FOLDER = "/folder-of-the-test"
# These variables differ between all tests: they hold empty folders of the test and its name.
_OF_THE_TEST = ("HOME", "XDG_", "DOCKER_CONFIG", "PYTEST_CURRENT_TEST")
_documents: dict[str, str] = {}


def collect(python: Path, folder: Path) -> Holdings:
    """Return the contents of the environment of `python`. `folder`: an absolute path without links; it contains the
    environment and every file of the test."""
    key = _digest(python, folder)
    path = json.dumps(str(folder), ensure_ascii=False)[1:-1]
    known = _documents.get(key) if key else None
    if known is not None:
        return Holdings.model_validate_json(known.replace(_FOLDER, path))
    job = environment_audit.collector_job("", "")
    found = collected_environment.read(host_runner.run_on_host(python, job), job.nonce, "it")
    if key:
        _documents[key] = found.model_dump_json().replace(path, _FOLDER)
    return found


def _digest(python: Path, folder: Path) -> str | None:
    """Return a checksum of the variables and of the files in the folder, with their types and permissions, in which the
    folder's own path is replaced; None if there is bytecode, whose validity depends on the times of files."""
    own, common = str(folder).encode(), _FOLDER.encode()
    parts = [bytes(python), *(f"{name}={value}".encode(errors="surrogateescape") for name, value in _variables())]
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".pyc":
            return None
        parts += [bytes(path), b"%o" % path.lstat().st_mode]
        if path.is_symlink():
            parts.append(bytes(path.readlink()))
        elif path.is_file():
            parts.append(path.read_bytes())
    digest = hashlib.sha256()
    for part in parts:
        text = part.replace(own, common)
        digest.update(b"%d " % len(text) + text)
    return digest.hexdigest()


def _variables() -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in os.environ.items() if not name.startswith(_OF_THE_TEST))
