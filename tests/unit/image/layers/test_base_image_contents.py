"""What is read from the layers of a base image: its Python, and its CUDA toolkit."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch.archive_spec import COMPAT, TOOLKIT
from envbuild.image.layers import base_image_contents
from envbuild.image.layers.base_image_contents import BaseContents, base_contents
from envbuild.image.layers.file_tree_of_layers import FolderOwnership
from envbuild.util import user_folders
from envbuild.util.errors import BuildError
from envbuild.util.untrusted_input_errors import Malformed, Refusal
from unit.image.base_images import (
    ACTIVATE,
    CSH,
    Blobs,
    Entries,
    Entry,
    debian,
    layers_in,
    official,
    python_file,
    templates,
)

NVCC = b"x" * 100 + b"Cuda compilation tools, release 12.6, V12.6.85\0"


def contents(*layers: Entries, environment: Mapping[str, str] | None = None, python: str = "3.11") -> BaseContents:
    blobs = Blobs()
    return base_contents(blobs, layers_in(blobs, *layers), python, environment or {})


# Python


def test_debians_python_is_found_behind_links() -> None:
    found = contents(debian())
    assert (found.interpreter, found.executable) == ("/usr/bin/python3.11", "/usr/bin/python3.11")
    assert found.version == "3.11.2"
    assert found.templates == {"activate": ACTIVATE.decode(), "activate.csh": CSH.decode()}
    assert (found.nvcc, found.library_folder, found.libraries, found.lib64) == ("", "", (), "")
    assert found.folders == {TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"}
    linked = contents(debian(), environment={"PATH": "/bin"})
    assert (linked.interpreter, linked.executable) == ("/bin/python3.11", "/usr/bin/python3.11")


def test_the_version_may_be_in_the_library() -> None:
    found = contents(official())
    assert (found.interpreter, found.version) == ("/usr/local/bin/python3.11", "3.11.9")
    assert found.templates.keys() == {"activate", "activate.csh"}


def test_condas_python_is_found_by_path() -> None:
    conda: dict[str, Entry] = {
        "opt/conda/bin/python3.11": python_file("3.11.8"),
        **templates("opt/conda/lib/python3.11/venv/scripts"),
    }
    path = {"PATH": "/opt/conda/bin:/usr/local/sbin:/usr/bin"}
    found = contents(debian(), conda, environment=path)
    assert (found.interpreter, found.version) == ("/opt/conda/bin/python3.11", "3.11.8")
    assert contents(debian(), conda).interpreter == "/usr/bin/python3.11"


def test_a_python_in_another_place_has_its_library_there() -> None:
    store = "root/.local/share/uv/python/cpython-3.11"
    uv: dict[str, Entry] = {
        f"{store}/bin/python3.11": python_file("3.11.5"),
        "usr/local/bin/python3.11": f"-> /{store}/bin/python3.11",
        **templates(f"{store}/lib/python3.11/venv/scripts"),
    }
    found = contents(uv)
    assert (found.interpreter, found.executable) == ("/usr/local/bin/python3.11", f"/{store}/bin/python3.11")


def test_a_virtual_environment_in_the_path_is_not_the_home_of_another() -> None:
    environment: dict[str, Entry] = {
        "app/.venv/bin/python3.11": "-> /usr/bin/python3.11",
        "app/.venv/pyvenv.cfg": b"home = /usr/bin\n",
    }
    found = contents(debian(), environment, environment={"PATH": "/app/.venv/bin:/usr/bin"})
    assert (found.interpreter, found.executable) == ("/usr/bin/python3.11", "/usr/bin/python3.11")


def test_red_hats_standard_library_is_in_lib64() -> None:
    entries: dict[str, Entry] = {
        "usr/bin/python3.11": b"\x7fELF",
        "usr/lib64/libpython3.11.so.1.0": python_file("3.11.7"),
        **templates("usr/lib64/python3.11/venv/scripts"),
    }
    found = contents(entries)
    assert (found.version, sorted(found.templates)) == ("3.11.7", ["activate", "activate.csh"])


def test_an_interpreter_may_be_a_hard_link() -> None:
    entries = {**debian(), "usr/bin/python3": python_file("3.11.4")}
    del entries["usr/bin/python3.11"]
    assert contents({**entries, "usr/bin/python3.11": "=> usr/bin/python3"}).version == "3.11.4"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "+", "rc1"])
def test_the_version_is_read_across_blocks(suffix: str) -> None:
    """A file is read in blocks of 1 MiB; the version must not be a part of a longer text."""
    whole = python_file(f"3.11.12{suffix}")
    for shift in range(len(whole) + 2):
        content = b"p" * ((1 << 20) - shift) + whole
        assert contents({**debian(), "usr/bin/python3.11": content}).version == "3.11.12"


def test_a_part_of_a_longer_text_is_not_the_version() -> None:
    for before in (b"", b"p" * ((1 << 20) - 257), b"p" * ((1 << 20) - 256), b"p" * ((1 << 20) - 255)):
        content = before + b"x3.11.7\0" + b"p" * 300 + b"\x003.11.2\0"
        assert contents({**debian(), "usr/bin/python3.11": content}).version == "3.11.2"


@pytest.mark.slow
def test_the_version_of_the_python_of_this_test_is_found() -> None:
    """The version is found in the real file of this Python, or in the library of this Python."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    real = Path(sys.executable).resolve()
    entries: dict[str, Entry] = {f"usr/bin/python{minor}": real.read_bytes()}
    for file in real.parents[1].glob(f"lib/**/libpython{minor}*.so*"):
        entries[f"usr/lib/{file.name}"] = file.read_bytes()
    venv = Path(sysconfig.get_paths()["stdlib"], "venv", "scripts")
    for script in (*venv.glob("common/*"), *venv.glob("posix/*")):
        entries[f"usr/lib/python{minor}/venv/scripts/{script.parent.name}/{script.name}"] = script.read_bytes()
    found = contents(entries, python=minor)
    assert found.version == ".".join(map(str, sys.version_info[:3]))
    assert found.templates["activate"] == (venv / "common" / "activate").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"usr/bin/python3.10": b""}, r"no python3\.11 in /usr/local/sbin:.*:/bin$"),
        ({"usr/bin/python3.11": "-> gone"}, "no python3"),
        ({"usr/bin/python3.11": "-> python3.11"}, "no python3"),
        ({"usr/bin/python3.11/x": b""}, "no python3"),
        ({"usr/bin/python3.11": python_file("3.11.2")}, "no module venv for /usr/bin/python3.11"),
        ({**debian(), "usr/bin/python3.11": python_file("3.12.2")}, "version of /usr/bin/python3.11"),
        ({**debian(), "usr/bin/python3.11": b"#!/bin/sh\n"}, "version of /usr/bin/python3.11"),
    ],
)
def test_a_base_image_without_the_python_is_refused(entries: dict[str, Entry], message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        contents(entries)
    assert caught.value.hint


def test_files_that_a_layer_removed_are_not_found() -> None:
    with pytest.raises(BuildError, match="no python3"):
        contents(debian(), {"usr/bin/.wh.python3.11": b""})
    with pytest.raises(BuildError, match="no module venv"):
        contents(debian(), {"usr/lib/python3.11/.wh.venv": b""})


def test_templates_that_are_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may have many large templates, which need little space in the blob of the layer."""
    monkeypatch.setattr(base_image_contents, "_LARGEST_TEMPLATE", len(ACTIVATE))
    large: dict[str, Entry] = {"usr/lib/python3.11/venv/scripts/posix/activate.fish": ACTIVATE + b"\n"}
    assert contents({**debian(), **large}).templates.keys() == {"activate", "activate.csh"}
    monkeypatch.setattr(base_image_contents, "_ALL_TEMPLATES", len(ACTIVATE))
    assert contents({**debian("3.11.3"), **large}).templates.keys() == {"activate"}


# the folder of the virtual environment


@pytest.mark.parametrize(
    "layers",
    [
        [{"opt/venv/pyvenv.cfg": b""}],
        [{"opt/venv": b""}],
        [{"./opt//venv/x": b""}],
        [{"//opt/venv/x": b""}],
        [{"opt/venv": "-> /elsewhere"}],
        [{"opt/venv": "=> usr/bin/python3.11"}],
        [{"opt/.wh.venv": b"", "opt/venv/x": b""}],
        [{"opt/venv/x": b"", "opt/.wh.venv": b""}],
        [{"opt/venv/x": b""}, {"opt/venv/.wh.x": b""}],
        [{"opt/venv/x": b""}, {"opt/.wh..wh.venv": b""}],
        [{"x": "-> opt", "x/venv/y": b""}],
        [{"x/y": "-> /opt/venv", "x/y/z": b""}],
    ],
)
def test_an_occupied_folder_is_refused(layers: list[Entries]) -> None:
    with pytest.raises(BuildError, match="has /opt/venv already"):
        contents(debian(), *layers)


@pytest.mark.parametrize(
    "layers",
    [
        [{"opt/venv/x": b""}, {"opt/.wh.venv": b""}],
        [{"opt/venv/x": b""}, {"opt/.wh..wh..opq": b""}],
        [{"opt/venv/x": b""}, {".wh.opt": b""}],
        [{"x": "-> opt"}, {"x/venv/y": b""}],  # the folder x replaces the link
        [{"opt/venv2": b""}],
    ],
)
def test_a_free_folder_is_accepted(layers: list[Entries]) -> None:
    assert contents(debian(), *layers).version == "3.11.2"


@pytest.mark.parametrize("entry", ["-> /elsewhere", b"a file"])
def test_an_opt_that_is_not_a_folder_is_refused(entry: Entry) -> None:
    entries = {**debian(), "elsewhere": None}
    del entries["opt"]
    with pytest.raises(BuildError, match="/opt of the base image is not a folder"):
        contents({**entries, "opt": entry})


# the CUDA toolkit


def cuda(**entries: Entry) -> dict[str, Entry]:
    return {
        "usr/local/cuda": "-> /etc/alternatives/cuda",
        "etc/alternatives/cuda": "-> /usr/local/cuda-12.6",
        "usr/local/cuda-12.6/bin/nvcc": NVCC,
        "usr/local/cuda-12.6/targets/x86_64-linux/lib/libcudart.so.12": b"",
        "usr/local/cuda-12.6/targets/x86_64-linux/lib/libcudart.so.12.6.77": b"",
        "usr/local/cuda-12.6/targets/x86_64-linux/lib/stubs/libcuda.so": b"",
        "usr/local/cuda-12.6/targets/x86_64-linux/lib/\udcff.so": b"",
        **entries,
    }


def test_the_toolkit_is_found_behind_links() -> None:
    found = contents({**debian(), **cuda(**{"usr/local/cuda-12.6/lib64": "-> targets/x86_64-linux/lib"})})
    assert (found.nvcc, found.lib64) == ("12.6", "")
    assert found.library_folder == "/usr/local/cuda-12.6/targets/x86_64-linux/lib"
    assert found.libraries == ("libcudart.so.12", "libcudart.so.12.6.77")
    assert found.folders == {TOOLKIT: "/usr/local/cuda-12.6", COMPAT: "/usr/local/cuda-12.6/compat"}


def test_a_missing_lib64_is_named() -> None:
    found = contents({**debian(), **cuda(**{"usr/local/cuda-12.6/lib": "-> targets/x86_64-linux/lib"})})
    assert found.lib64 == "/usr/local/cuda-12.6/lib64"
    assert found.library_folder == "/usr/local/cuda-12.6/targets/x86_64-linux/lib"


@pytest.mark.parametrize(("nvcc", "release"), [(NVCC, "12.6"), (b"#!/bin/sh\n", ""), ("-> gone", ""), (None, "")])
def test_an_nvcc_without_libraries_has_only_its_release(nvcc: Entry, release: str) -> None:
    found = contents({**debian(), "usr/local/cuda/bin/nvcc": nvcc})
    assert (found.nvcc, found.library_folder, found.libraries, found.lib64) == (release, "", (), "")


def test_archives_go_where_a_link_leads_also_if_it_is_missing() -> None:
    found = contents({**debian(), "usr/local": "-> /srv/local"})
    assert found.folders == {TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"}
    found = contents({**debian("3.11.3"), "srv/local": None, "usr/local": "-> /srv/local"})
    assert found.folders == {TOOLKIT: "/srv/local/cuda", COMPAT: "/srv/local/cuda/compat"}


# the cache


def entries_of_cache() -> list[Path]:
    return sorted(user_folders.cache_folder("image-contents").iterdir())


def test_layers_are_read_once_for_each_python_and_path() -> None:
    blobs = Blobs()
    layers = layers_in(blobs, debian(), {"opt/x": b""})
    first = base_contents(blobs, layers, "3.11", {})
    assert blobs.read == [layer.digest for layer in layers]
    assert base_contents(blobs, layers, "3.11", {"HOME": "/"}) == first
    assert len(blobs.read) == 2
    base_contents(blobs, layers, "3.11", {"PATH": "/usr/bin"})
    assert len(blobs.read) == 4
    with pytest.raises(BuildError):
        base_contents(blobs, layers, "3.12", {})
    with pytest.raises(BuildError):
        base_contents(blobs, layers[1:], "3.11", {})
    assert len(entries_of_cache()) == 2


@pytest.mark.parametrize(
    ("before", "after"), [(b"3.11.2", b"3.11.3"), (b"{", b""), (b'"nvcc"', b'"other"'), (b'"check":"', b'"check":"0')]
)
def test_a_damaged_cache_entry_is_read_again(before: bytes, after: bytes) -> None:
    blobs = Blobs()
    layers = layers_in(blobs, debian())
    first = base_contents(blobs, layers, "3.11", {})
    (file,) = entries_of_cache()
    raw = file.read_bytes()
    assert before in raw
    file.write_bytes(raw.replace(before, after, 1))
    assert base_contents(blobs, layers, "3.11", {}) == first
    assert (len(blobs.read), file.read_bytes()) == (2, raw)


def test_an_entry_of_other_layers_is_not_taken() -> None:
    blobs = Blobs()
    for version in ("3.11.2", "3.11.3"):
        base_contents(blobs, layers_in(blobs, debian(version)), "3.11", {})
    one, two = entries_of_cache()
    one.write_bytes(two.read_bytes())
    for version in ("3.11.2", "3.11.3"):
        assert base_contents(blobs, layers_in(blobs, debian(version)), "3.11", {}).version == version


# invalid and hostile layers


@pytest.mark.parametrize("blob", [b"", b"x" * 2000, b"\x1f\x8b\x08\0"])
def test_an_invalid_layer_is_refused(blob: bytes) -> None:
    blobs = Blobs()
    (layer,) = layers_in(blobs, debian())
    blobs.held[layer.digest] = blob
    with pytest.raises(Refusal):
        base_contents(blobs, [layer], "3.11", {})
    assert not user_folders.cache_folder("image-contents", make=False).exists()


def test_a_layer_with_another_tar_is_refused() -> None:
    blobs = Blobs()
    one, two = layers_in(blobs, debian(), {"a": b""})
    blobs.held[one.digest] = blobs.held[two.digest]
    with pytest.raises(Refusal, match="does not match the image's configuration"):
        base_contents(blobs, [one], "3.11", {})


def test_the_number_of_files_of_a_layer_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_image_contents, "MAX_FILES", 5)
    with pytest.raises(Refusal, match="has more than 5 files"):
        contents(debian())


@pytest.mark.parametrize("count", [1000, 1001])
def test_the_number_of_folders_in_path_is_limited(count: int) -> None:
    path = ":".join([*(f"/{number}" for number in range(count - 1)), "/usr/bin"])
    if count == 1000:
        assert contents(debian(), environment={"PATH": path}).interpreter == "/usr/bin/python3.11"
    else:
        with pytest.raises(Malformed, match="PATH of the base image has more than 1000 folders"):
            contents(debian(), environment={"PATH": path})


@pytest.mark.parametrize("path", ["", ":::", "usr/bin", "/gone:/usr/bin/python3.11:/usr/lib"])
def test_odd_search_paths_give_no_python_or_that_of_the_default(path: str) -> None:
    if not path:
        assert contents(debian(), environment={"PATH": path}).interpreter == "/usr/bin/python3.11"
    else:
        with pytest.raises(BuildError, match="no python3"):
            contents(debian(), environment={"PATH": path})


def test_messages_have_no_control_characters_of_the_image() -> None:
    with pytest.raises(BuildError) as caught:
        contents(debian(), environment={"PATH": "/\x1b[2J" + "x" * 3000})
    assert "\x1b" not in caught.value.message and len(caught.value.message) < 1000


def test_a_path_that_is_not_utf_8_is_refused() -> None:
    odd: dict[str, Any] = {"usr/\udcff/python3.11": python_file("3.11.2"), "usr/bin": "-> \udcff"}
    entries = {**debian(), **templates("usr/lib/python3.11/venv/scripts")}
    del entries["usr/bin"], entries["usr/bin/python3.11"], entries["usr/bin/python3"]
    with pytest.raises(Malformed, match="not UTF-8"):
        contents({**entries, **odd})


def test_deep_paths_and_long_links_end() -> None:
    deep = "/".join("d" * 2000)
    loop = {f"l{number}": f"-> {'x/../' * 700}l{number + 1}" for number in range(60)}
    with pytest.raises(BuildError, match="no python3"):
        contents({deep: b"", "x": None, **loop, "usr/bin/python3.11": "-> /l0"})


# the modes and owners of folders


def test_folders_with_another_mode_or_owner_are_noted() -> None:
    """Noted are the folders that a layer of envbuild would list, except missing folders and folders with mode 0755 and
    owner root."""
    mine, shared = FolderOwnership(0o700, 1000, 1001), FolderOwnership(0o2775, 0, 50)
    sticky = FolderOwnership(0o1777, 2**32 - 2, 0)
    below: dict[str, Entry] = {
        "usr/local": mine,
        "usr/local/lib": shared,  # no layer of envbuild lists it
        "usr/local/cuda": "-> cuda-12.6",
        "usr/local/cuda-12.6": shared,
        "usr/local/cuda-12.6/compat": None,
        "usr/local/cuda-12.6/bin/nvcc": NVCC,
        "usr/local/cuda-12.6/lib": mine,
        "usr/local/cuda-12.6/lib/libcudart.so.12": b"",
    }
    expected = {
        "/opt": sticky,
        "/usr/local": shared,
        "/usr/local/cuda-12.6": shared,
        "/usr/local/cuda-12.6/lib": mine,
    }
    layers: tuple[Entries, ...] = ({**debian(), "opt": sticky}, below, {"usr/local": shared})
    blobs = Blobs()
    refs = layers_in(blobs, *layers)
    found = base_contents(blobs, refs, "3.11", {})
    assert {folder.path: folder.ownership for folder in found.odd_folders} == expected
    blobs.held.clear()
    assert base_contents(blobs, refs, "3.11", {}) == found, "from the cache"
    assert contents(debian()).odd_folders == ()


@pytest.mark.parametrize("owner", [-1, 2**32 - 1, 2**40])
def test_an_owner_that_linux_does_not_have_is_refused(owner: int) -> None:
    with pytest.raises(Malformed, match="invalid owner"):
        contents({**debian(), "opt": FolderOwnership(0o755, 0, owner)})


@pytest.mark.parametrize(("mode", "allowed"), [(0o700, False), (0o750, False), (0o754, False), (0o711, True)])
def test_an_opt_that_other_users_cannot_enter_is_refused(mode: int, allowed: bool) -> None:
    """The self-test runs as another user."""
    entries: dict[str, Entry] = {**debian(), "opt": FolderOwnership(mode, 1000)}
    if allowed:
        assert [folder.ownership.mode for folder in contents(entries).odd_folders] == [mode]
        return
    with pytest.raises(BuildError, match=f"/opt of the base image has mode {mode:04o}"):
        contents(entries)
