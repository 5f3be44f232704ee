"""Programs of others read the layout that `export oci` writes, and find the same files and digests in it.

The programs are Debian's, from the mirror that apt already uses. They are unpacked to a folder, not installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import engines
from .support import Project, command
from .test_toolchain import named, toolkit

pytestmark = pytest.mark.engine

PACKAGES = ("skopeo", "umoci", "buildah", "podman", "pigz")
Tree = dict[str, tuple[object, ...]]


@dataclass(frozen=True)
class Programs:
    """The unpacked programs. `folder`: for their settings and images."""

    unpacked: Path
    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        libraries = self.unpacked / "usr" / "lib" / "x86_64-linux-gnu"
        settings = {
            "LD_LIBRARY_PATH": str(libraries),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "HOME": str(self.folder),
        }
        return command(self.unpacked / "usr" / "bin" / program, *arguments, env=settings)


@pytest.fixture(scope="module")
def programs(workplace: Path) -> Iterator[Programs]:
    if not shutil.which("apt-get") or os.geteuid():
        pytest.skip("the programs are unpacked on Debian only, as root")
    folder = workplace / "readers"
    (folder / "debs" / "partial").mkdir(parents=True)
    options = ("-o", f"Dir::Cache::archives={folder / 'debs'}", "-o", "Debug::NoLocking=1")
    install = ("apt-get", "install", "-qq", "-y", "--no-install-recommends", "--reinstall", "--download-only")
    done = subprocess.run([*install, *options, *PACKAGES], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        error = done.stderr.strip().rpartition("\n")[2]  # empty if apt was killed
        pytest.skip(f"apt cannot fetch {', '.join(PACKAGES)}: {error}")
    for deb in (folder / "debs").glob("*.deb"):
        command("dpkg", "-x", deb, folder / "unpacked")
    storage = f'driver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/images"\n'
    (folder / "storage.conf").write_text(f"[storage]\n{storage}")
    conmon = folder / "unpacked" / "usr" / "bin" / "conmon"
    (folder / "containers.conf").write_text(f'[engine]\nconmon_path = ["{conmon}"]\n')
    policy = folder / ".config" / "containers" / "policy.json"  # of HOME
    policy.parent.mkdir(parents=True)
    policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    yield Programs(folder / "unpacked", folder)
    engines.unmount(folder)


@dataclass(frozen=True)
class Layout:
    """An exported image. `id` and `digest`: as envbuild reports them; `files`: as GNU tar with gzip unpacks them."""

    folder: Path
    name: str
    id: str
    digest: str
    files: Tree

    @property
    def tagged(self) -> str:
        return f"{self.folder}:{self.name}"


@pytest.fixture(scope="module")
def layout(indexed_cache: Project, workplace: Path, images: None, run_id: str) -> Layout:
    """An image with a Debian base, a toolkit from an archive, and wheels."""
    project = indexed_cache
    keys = {"torch": "2.7.1", "gpus": ["a100"], "variant": "devel", "toolchain": toolkit(workplace)}
    name = named(project, f"e2e-layout-{run_id}", **keys)
    assert project.run("lock", name).code == 0
    done = project.run("export", "oci", name, str(workplace / "oci"), "--json")
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    found = done.document
    unpack(workplace / "oci", found["digest"], workplace / "gzip", "gzip")
    files = tree(workplace / "gzip")
    return Layout(workplace / "oci", name, found["image"], found["digest"], files)


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def unpack(layout: Path, digest: str, target: Path, decompressor: str | Path) -> None:
    """Unpack the layers with GNU tar. An image without removed files needs no more."""
    target.mkdir()
    for layer in json.loads(blob(layout, digest).read_bytes())["layers"]:
        how = ("--same-owner", "--same-permissions", "--numeric-owner", f"--use-compress-program={decompressor}")
        command("tar", "-x", *how, "-C", target, "-f", blob(layout, layer["digest"]))
    assert not list(target.rglob(".wh.*"))


def tree(root: Path) -> Tree:
    """Return each path with its type, mode, owner, time and content. The root itself is left out: its mode is that of
    the folder in which a program unpacks."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        known = (stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid)
        name, written = str(path.relative_to(root)), int(about.st_mtime)
        if path.is_symlink():
            found[name] = (*known, written, str(path.readlink()))
        elif path.is_file():
            found[name] = (*known, written, hashlib.sha256(path.read_bytes()).hexdigest())
        else:
            found[name] = known
    return found


def umoci(programs: Programs, layout: Layout, scratch: Path) -> Tree:
    programs.run("umoci", "unpack", "--image", layout.tagged, scratch / "bundle")
    return tree(scratch / "bundle" / "rootfs")


def pigz(programs: Programs, layout: Layout, scratch: Path) -> Tree:
    unpack(layout.folder, layout.digest, scratch / "pigz", programs.unpacked / "usr" / "bin" / "pigz")
    return tree(scratch / "pigz")


def buildah(programs: Programs, layout: Layout, scratch: Path) -> Tree:
    assert f"sha256:{programs.run('buildah', 'pull', f'oci:{layout.tagged}').split()[-1]}" == layout.id
    container = programs.run("buildah", "from", "--pull-never", layout.id).strip()
    return tree(Path(programs.run("buildah", "mount", container).strip()))


def podman(programs: Programs, layout: Layout, scratch: Path) -> Tree:
    command("tar", "-c", "-C", layout.folder, "-f", scratch / "layout.tar", ".")
    programs.run("podman", "load", "--input", scratch / "layout.tar")
    assert layout.id in programs.run("podman", "image", "inspect", "--format", "sha256:{{.Id}}", layout.id)
    return tree(Path(programs.run("podman", "image", "mount", layout.id).strip()))


def containerd(programs: Programs, layout: Layout, scratch: Path) -> Tree:
    if lacking := engines.lacking():
        pytest.skip(lacking)
    command("tar", "-c", "-C", layout.folder, "-f", scratch / "layout.tar", ".")
    with engines.own_engine() as own:
        daemon = engines.dockerd()
        assert daemon
        ctr = (daemon.parents[1] / "bin" / "ctr", "-a", own.folder / "exec" / "containerd" / "containerd.sock")
        command(*ctr, "images", "import", "--digests", "--base-name", "layout", scratch / "layout.tar")
        name = f"layout@{layout.digest}"
        assert layout.digest in command(*ctr, "images", "ls")
        (scratch / "mounted").mkdir()
        with mounted(ctr, name, scratch / "mounted"):
            return tree(scratch / "mounted")


@contextlib.contextmanager
def mounted(ctr: tuple[str | Path, ...], name: str, folder: Path) -> Iterator[None]:
    command(*ctr, "images", "mount", name, folder)
    try:
        yield
    finally:
        command(*ctr, "images", "unmount", folder)


# `make test` reads the layout with containerd, and skopeo, which has containers/image of buildah and podman, copies it.
_ONLY_IMAGES = [pytest.param(read, marks=pytest.mark.images) for read in (umoci, buildah, podman)]


@pytest.mark.parametrize("read", [pigz, containerd, *_ONLY_IMAGES])
def test_a_program_finds_the_same_files(
    programs: Programs, layout: Layout, scratch: Path, read: Callable[[Programs, Layout, Path], Tree]
) -> None:
    found = read(programs, layout, scratch)
    assert len(found) > 5000
    assert {path: what for path, what in found.items() if layout.files.get(path) != what} == {}
    assert found.keys() == layout.files.keys()


def test_skopeo_copies_it_with_its_digests(programs: Programs, layout: Layout, scratch: Path) -> None:
    programs.run("skopeo", "copy", "--preserve-digests", f"oci:{layout.tagged}", f"oci:{scratch / 'copy'}:image")
    (manifest,) = json.loads((scratch / "copy" / "index.json").read_bytes())["manifests"]
    assert manifest["digest"] == layout.digest


def test_a_damaged_layer_is_noticed(programs: Programs, layout: Layout, scratch: Path) -> None:
    shutil.copytree(layout.folder, scratch / "oci")
    last = json.loads(blob(layout.folder, layout.digest).read_bytes())["layers"][-1]["digest"]
    file = blob(scratch / "oci", last)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(AssertionError, match=r"(?i)digest|checksum|gzip|flate|corrupt"):
        programs.run("skopeo", "copy", f"oci:{scratch / 'oci'}:{layout.name}", f"oci:{scratch / 'copy'}:image")
