"""A child image of a verified image that replaces locked code without writing to its path, and ordinary child
images."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from unit.evidence.runs import run_on
from unit.site import LAYER, LAYER_TYPE, Site, config_of, new_key, proved
from unit.support import envbuild

from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import wheel_file_hashes_and_contents
from envbuild.registry import oci_types
from envbuild.selftest.inventory import startup_files

VENV = "opt/venv"
SITE = f"{VENV}/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
LIBRARY = "usr/lib/python3.11"
GIT = ("usr/bin/git", "usr/lib/git-core/git-add", "usr/lib/x86_64-linux-gnu/libcurl-gnutls.so.4", "var/lib/dpkg/status")

Entry = tuple[str, str | bytes]
"""(path, content): bytes of a file, "dir", "-> TARGET" of a symbolic link or "= TARGET" of a hard one."""


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A verified image that contains a libcublas.so.12; its torch is a package, and its numpy a module of one file."""
    whole = wheel_file_hashes_and_contents.roots
    monkeypatch.setattr(wheel_file_hashes_and_contents, "roots", lambda wheel: (*whole(wheel), *_packages(wheel)))
    with proved(project, monkeypatch) as found:
        Path("team.pub").write_bytes(new_key(monkeypatch).pem)
        found.prove(run_on("NVIDIA H20"))
        assert found.push().code == 0
        yield found


def _packages(wheel: Path) -> tuple[str, ...]:
    return ("torch",) if wheel.name.startswith("torch-") else ()


def layer(entries: Sequence[Entry], **attributes: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, what in entries:
            member = tarfile.TarInfo(path)
            member.pax_headers = dict(attributes)
            if isinstance(what, bytes):
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what))
                continue
            kind, _, member.linkname = what.partition(" ")
            member.type = {"dir": tarfile.DIRTYPE, "->": tarfile.SYMTYPE, "=": tarfile.LNKTYPE}[kind]
            archive.addfile(member)
    return buffer.getvalue()


def reasons(site: Site, *layers: bytes, env: list[str] | None = None) -> list[str]:
    """Return the ids of the reasons why `verify` refuses an image with these layers on top of the verified image."""
    config = config_of([LAYER, *map(oci_types.digest_of, layers)], {LOCK_LABEL: site.lock.id}, env)
    blobs = [LAYER, *(site.registry.add_blob(gzip.compress(one)) for one in layers)]
    document = {
        "mediaType": oci_types.MANIFEST,
        "config": {"digest": site.registry.add_blob(config)},
        "layers": [{"digest": digest, "mediaType": LAYER_TYPE} for digest in blobs],
    }
    site.registry.put(oci_types.MANIFEST, document, "app")
    options = ("--key", "team.pub", "--base", f"{site.registry.host}/team/sample", "--json")
    done = envbuild("verify", f"{site.registry.host}/team/app:app", *options)
    assert done.code == (5 if done.document["reasons"] else 0), done.stderr
    return [reason["id"] for reason in done.document["reasons"]]


def each(site: Site, cases: Mapping[str, Sequence[Entry]]) -> dict[str, list[str]]:
    """Return the reasons for each case, a layer on top of the verified image: pushing that image takes longer than to
    verify a child."""
    return {name: reasons(site, layer(entries)) for name, entries in cases.items()}


def files(*paths: str, content: str | bytes = b"") -> dict[str, list[Entry]]:
    """Return a case for each path."""
    return {path: [(path, content)] for path in paths}


LINKED: dict[str, list[Entry]] = {
    "absolute": [("x", f"-> /{TORCH}"), ("x/version.py", b"")],
    "relative": [("srv/x", f"-> ../{TORCH}"), ("srv/x/version.py", b"")],
    "to a link": [("y", f"-> /{TORCH}"), ("x", "-> y"), ("x/version.py", b"")],
    "to a folder above": [("x", "-> /opt"), ("x/venv/lib/python3.11/site-packages/torch/version.py", b"")],
    "up through a link": [
        ("x", f"-> /{TORCH}"),
        ("x/../torch/version.py", b""),
        ("z", "-> x/.."),
        ("z/numpy.py", b""),
    ],
    "of the base": [(f"{VENV}/lib64/python3.11/site-packages/torch/version.py", b"")],
    "a removal": [("x", f"-> /{TORCH}"), ("x/.wh.version.py", b"")],
    "in place of a folder": [(f"{VENV}/lib", "-> /srv/lib")],
    "in place of a library": [("usr/lib/x86_64-linux-gnu/libc.so.6", "-> /srv/libc.so")],
    "hard": [("srv/x.py", f"= {TORCH}/version.py")],
}


@pytest.mark.attack("writer of a child", "writes to a locked package through a link of its layer", "exit 5: replaced")
def test_a_link_into_a_locked_package(site: Site) -> None:
    found = each(site, LINKED)
    assert {name: set(ids) for name, ids in found.items()} == {name: {"replaced"} for name in LINKED}


@pytest.mark.attack("writer of a child", "writes through a link of a layer below, which then goes", "exit 5: replaced")
def test_a_link_of_a_layer_below(site: Site) -> None:
    layers: list[list[Entry]] = [[("x", f"-> /{TORCH}")], [("x/version.py", b"")], [(".wh.x", b""), ("x", "dir")]]
    assert reasons(site, *map(layer, layers)) == ["replaced"]


@pytest.mark.attack("writer of a child", "a whiteout whose name means its folder, or one above", "exit 5: replaced")
def test_a_whiteout_of_its_own_folder(site: Site) -> None:
    cases = files(*(f"{TORCH}/nn/{name}" for name in (".wh.", ".wh..", ".wh...")))
    assert each(site, cases) == {name: ["replaced"] for name in cases}


@pytest.mark.attack("writer of a child", "a layer that ends within a file that is read", "exit 5: malformed")
def test_a_layer_that_ends_within_a_file(site: Site) -> None:
    assert reasons(site, layer([(f"{SITE}/a.pth", b"#" * 5000)])[:2000]) == ["malformed"]


@pytest.mark.attack("writer of a child", "links without end", "exit 5: layer")
def test_links_without_end(site: Site) -> None:
    loop = "/".join(["x"] * 40)
    assert reasons(site, layer([("x", f"-> {loop}"), ("x/a", b"")])) == ["layer"]


@pytest.mark.legitimate("writer of a child", "links of its own, and one to the locked packages", "exit 0")
def test_ordinary_links(site: Site) -> None:
    entries: list[Entry] = [
        ("app/current", "-> releases/7"), ("app/current/main.py", b""), ("app/packages", f"-> /{SITE}"),
        ("usr/bin/vi", "-> vim"), ("loop", "-> loop"), ("app/copy.py", "= app/current/main.py"),
    ]  # fmt: skip
    assert reasons(site, layer(entries)) == []


COMPILED = [
    f"{TORCH}/__pycache__/version.cpython-311.pyc",
    f"{TORCH}/nn/__pycache__/functional.cpython-311.opt-1.pyc",
    f"{SITE}/__pycache__/numpy.cpython-311.pyc",
    f"{LIBRARY}/__pycache__/os.cpython-311.pyc",
]


@pytest.mark.attack("writer of a child", "compiled code that Python takes for a locked module's", "exit 5: replaced")
def test_compiled_code_of_a_locked_module(site: Site) -> None:
    unchecked = b"\xa7\r\r\n" + struct.pack("<I8x", 0b01)
    assert each(site, files(*COMPILED, content=unchecked)) == {name: ["replaced"] for name in COMPILED}


@pytest.mark.attack(
    "writer of a child", "PYTHONPYCACHEPREFIX: compiled code from another folder", "exit 5: environment"
)
def test_compiled_code_from_another_folder(site: Site) -> None:
    assert reasons(site, env=["PATH=/bin", "PYTHONPYCACHEPREFIX=/srv"]) == ["environment"]


SHADOWS = [
    f"{SITE}/numpy/__init__.py",
    f"{SITE}/numpy.cpython-311-x86_64-linux-gnu.so",
    f"{LIBRARY}/torch/__init__.py",
    f"{LIBRARY}/lib-dynload/torch.so",
    "usr/lib/python311.zip",
]


@pytest.mark.attack("writer of a child", "a module that Python finds before a locked one", "exit 5: replaced")
def test_a_module_before_a_locked_one(site: Site) -> None:
    assert each(site, files(*SHADOWS)) == {name: ["replaced"] for name in SHADOWS}


BELOW = [
    f"{VENV}/bin/python",
    f"{VENV}/pyvenv.cfg",
    f"{VENV}/bin/pyvenv.cfg",
    "usr/bin/pybuilddir.txt",
    "lib/x86_64-linux-gnu/libz.so.1.2.13",
    "usr/lib/x86_64-linux-gnu/libexpat.so.1",
    "usr/local/lib/libutil.so.1",
    "usr/bin/python3.11",
    f"{LIBRARY}/os.py",
    "etc/python3.11/sitecustomize.py",
    "lib64/ld-linux-x86-64.so.2",
    "lib/x86_64-linux-gnu/libstdc++.so.6.0.30",
    "usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libm.so.6",
    "usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libcuda.so.1",
    "usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.1",
    "usr/lib/x86_64-linux-gnu/libffi.so.8",
    "usr/lib/x86_64-linux-gnu/libffi.so.8.1.2",
    "usr/local/lib/libcrypto.so.3",
    "usr/lib/x86_64-linux-gnu/libssl.so.3",
    "usr/lib/x86_64-linux-gnu/libdb-5.3.so",
    "etc/ssl/openssl.cnf",
    "usr/lib/ssl/openssl.cnf",
    "usr/bin/X11/python3.11",
]


@pytest.mark.attack("writer of a child", "another Python, loader or C library below the packages", "exit 5: replaced")
def test_files_that_packages_depend_on_must_not_be_replaced(site: Site) -> None:
    assert each(site, files(*BELOW)) == {name: ["replaced"] for name in BELOW}


@pytest.mark.attack("writer of a child", "a folder in place of a locked file or folder", "exit 5: replaced")
def test_a_folder_in_place_of_a_file(site: Site) -> None:
    cases = files(f"{TORCH}/version.py", f"{SITE}/numpy.py", "lib64/ld-linux-x86-64.so.2", content="dir")
    assert each(site, cases) == {name: ["replaced"] for name in cases}


def cache(found: dict[str, str]) -> bytes:
    """Return /etc/ld.so.cache as ldconfig writes it: name -> file."""
    texts = [text.encode() + b"\0" for item in found.items() for text in item]
    start = 48 + 24 * len(found)
    at = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
    entries = [struct.pack("<i2I12x", 0x303, at[index], at[index + 1]) for index in range(0, len(texts), 2)]
    return struct.pack("<20s2I20x", b"glibc-ld.so.cache1.1", len(found), 0) + b"".join((*entries, *texts))


STARTED: dict[str, list[Entry]] = {
    "a .pth file": [(f"{SITE}/a.pth", b"/app\nimport os; os.environ.clear()\n")],
    "a .pth file with old line ends": [(f"{SITE}/a.pth", b"/app\rimport os\r")],
    "a .pth file behind a link": [(f"{SITE}/a.pth", "-> /srv/a.pth")],
    "a .pth file with a form feed": [(f"{SITE}/a.pth", b"a\x0cimport os\n")],
    "a .pth file with a folder that has a form feed": [
        ("app/\x0c/sitecustomize.py", b""),
        (f"{SITE}/a.pth", b"/app/\x0c\n"),
    ],
    "a .pth file without a name": [(f"{SITE}/.pth", b"import os\n")],
    "a .pth file in Debian's folder": [(f"{VENV}/lib/python3/dist-packages/a.pth", b"import os\n")],
    "a .pth file that names an archive": [("app/a.zip", b"PK"), (f"{SITE}/a.pth", b"/app/a.zip\n")],
    "a .pth file that names a folder of an archive": [(f"{SITE}/a.pth", b"/app/a.zip/x\n"), ("app/a.zip", b"PK")],
    "a ._pth file by the environment's Python": [(f"{VENV}/bin/python._pth", b"/srv\n")],
    "a ._pth file by Debian's Python": [("usr/bin/python3.11._pth", b"/srv\n")],
    **{
        f"{module} as {how}": [(f"{SITE}/{module}{suffix}", b"")]
        for module in startup_files.MODULES
        for how, suffix in (
            ("a file", ".py"),
            ("a package", "/__init__.py"),
            ("compiled", ".pyc"),
            ("a library", ".cpython-311-x86_64-linux-gnu.so"),
        )
    },
    "sitecustomize in a folder of a .pth file, by a link": [
        ("srv/sitecustomize.py", b""),
        ("app", "-> srv"),
        (f"{SITE}/a.pth", b"/app\n"),
    ],
    "sitecustomize in a folder of a .pth file": [("app/sitecustomize.py", b""), (f"{SITE}/a.pth", b"/app\n")],
    "ld.so.preload": [("etc/ld.so.preload", b"/srv/x.so")],
    "a folder of the loader": [("etc/ld.so.conf.d/a.conf", b"/srv/lib\n")],
    "a conf of the loader behind a link": [("etc/ld.so.conf.d/a.conf", "-> /srv/a.conf")],
    "a cache with another C++ library": [("etc/ld.so.cache", cache({"libstdc++.so.6": "/srv/libstdc++.so.6"}))],
    "a cache with a file of another name": [("etc/ld.so.cache", cache({"libz.so.1": "/usr/lib/evil.so"}))],
    "a cache with another cuBLAS": [("etc/ld.so.cache", cache({"libcublas.so.12": "/srv/libcublas.so.12"}))],
    "a cache that ends early": [("etc/ld.so.cache", cache({"libz.so.1": "/usr/lib/libz.so.1"})[:60])],
}


@pytest.mark.attack("writer of a child", "code that Python or the loader takes at every start", "exit 5: environment")
def test_code_at_every_start(site: Site) -> None:
    assert each(site, STARTED) == {name: ["environment"] for name in STARTED}


@pytest.mark.attack("writer of a child", "an overlay attribute that puts another folder in a package's place", "exit 5")
def test_an_attribute_of_the_overlay(site: Site) -> None:
    redirect = layer([(TORCH, "dir")], **{"SCHILY.xattr.trusted.overlay.redirect": "/srv/torch"})
    assert reasons(site, redirect) == ["layer"]


ORDINARY: dict[str, list[Entry]] = {
    "pip install": [
        (SITE, "dir"), (f"{SITE}/einops", "dir"), (f"{SITE}/einops/__init__.py", b""),
        (f"{SITE}/einops/__pycache__/__init__.cpython-311.pyc", b""), (f"{SITE}/__pycache__/six.cpython-311.pyc", b""),
        (f"{SITE}/einops-0.8.2.dist-info/RECORD", b""), (f"{SITE}/six.py", b""), (f"{VENV}/bin/tool", b"#!python"),
        (f"{SITE}/ddtrace/bootstrap/sitecustomize.py", b""), (f"{SITE}/x.libs/libgfortran-91cc3cb1.so.5.0.0", b""),
    ],
    "pip install --editable": [
        (f"{SITE}/__editable__.mine-1.0.pth", b"/app/src\r\n# \xc3\xa9\n/app/current\n"),
        ("app/src/mine/__init__.py", b""), ("app/current", "-> src"),
    ],
    "apt-get install": [
        *((path, b"") for path in GIT), ("etc/ld.so.conf.d/fakeroot.conf", b"# from Debian\n/usr/lib/libfakeroot\n"),
        ("etc/ld.so.cache", cache({name: f"/lib/x86_64-linux-gnu/{name}" for name in ("libc.so.6", "libz.so.1")})),
        ("usr/lib/gcc/x86_64-linux-gnu/12/libstdc++.so", "-> ../../../x86_64-linux-gnu/libstdc++.so.6"),
        ("usr/lib/python3/dist-packages/apt/__init__.py", b""), (f"{LIBRARY}/.wh.EXTERNALLY-MANAGED", b""),
        (f"{LIBRARY}/config-3.11-x86_64-linux-gnu/Makefile", b""),
    ],
    "apt-get install ffmpeg openmpi-bin libssl-dev": [
        *((f"usr/lib/x86_64-linux-gnu/{name}", b"") for name in ("libnuma.so.1", "libibverbs.so.1", "libsslcommon.so")),
        ("usr/lib/x86_64-linux-gnu/libssl.so", "-> libssl.so.3"), ("etc/ssl", "dir"), ("etc/ssl/certs/a.pem", b""),
        ("usr/lib/x86_64-linux-gnu/stubs/libcuda.so", b""),
    ],
    "COPY . /app": [("app", "dir"), ("app/main.py", b""), ("app/torch/version.py", b""), ("app/lib/libc.so.6", b"")],
}  # fmt: skip


@pytest.mark.legitimate("writer of a child", "pip install, apt-get install, COPY . /app", "exit 0")
def test_an_ordinary_child(site: Site) -> None:
    assert each(site, ORDINARY) == {name: [] for name in ORDINARY}
