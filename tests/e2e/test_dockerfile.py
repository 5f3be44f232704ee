"""The Dockerfile that stands alone: built without envbuild, it gives the environment of the written layers."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envbuild.image import debian_base_tar
from envbuild.image.container_definition_export import UV_VERSION
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock

from .support import Proved, docker

pytestmark = pytest.mark.engine


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def lock(with_apt: Proved) -> Lock:
    found = lock_file.read(with_apt.project.lock(with_apt.name))
    assert found
    return found


@pytest.fixture
def pip_configuration(with_apt: Proved, lock: Lock, tmp_path: Path) -> Iterator[Path]:
    """A configuration of pip whose only index is a folder with the locked wheels and uv, served on this machine."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for locked in lock.wheels:
        shutil.copy(with_apt.project.cached("wheels") / locked.wheel.sha256 / locked.wheel.file, folder)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        f"uv=={UV_VERSION}",
    ]
    subprocess.run(download, check=True, timeout=300)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "pip.conf"
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    file.write_text(f"[global]\nno-index = true\nfind-links = {address}\n", encoding="utf-8")
    yield file
    server.shutdown()
    server.server_close()


def environment(image: str) -> dict[str, tuple[object, ...]]:
    """What is in /opt/venv of an image: path -> kind, mode, target, sha256."""
    container = docker("create", image).strip()
    try:
        raw = subprocess.run(["docker", "cp", f"{container}:/opt/venv", "-"], capture_output=True, check=True).stdout
    finally:
        docker("rm", container)
    found: dict[str, tuple[object, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            content = hashlib.sha256(stream.read()).hexdigest() if stream else ""
            found[member.name] = (member.type, member.mode, member.linkname, content)
    return found


def test_it_gives_the_environment_of_the_written_layers(
    with_apt: Proved, lock: Lock, pip_configuration: Path, tmp_path: Path
) -> None:
    """The base has the Debian packages that the Dockerfile installs otherwise, python3-venv among them."""
    plain, name = with_apt.project, with_apt.name
    base, made = f"{name}:base", f"{name}:made"
    exported = plain.run("export", "dockerfile", name, "-o", str(tmp_path / "Dockerfile"))
    assert exported.code == 0, exported.stderr
    assert (tmp_path / "Dockerfile").read_text() == plain.dockerfile(name).read_text()
    docker("import", debian_base_tar.tar_file(lock, apt=True), base)
    try:
        docker(
            "build", "--quiet", "--network=host", "--secret", f"id=pip,src={pip_configuration}",
            "--build-arg", f"BASE={base}", "--build-arg", "DEBIAN_VERSIONS=none", "--tag", made, "-",
            stdin=(tmp_path / "Dockerfile").read_text(),
        )  # fmt: skip
        ours, theirs = environment(with_apt.tag), environment(made)
        assert len(ours) > 10_000
        assert {path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)} == set()
        assert docker("run", "--rm", "--network", "none", made, "python", "-c", "import torch, numpy") == ""
        assert "127.0.0.1" not in docker("history", "--no-trunc", made)
    finally:
        docker("image", "rm", "--force", made, base)
