"""Resolution and download by the real uv, with tiny wheels from a folder or a small local index."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from packaging.utils import InvalidWheelFilename
from urllib3.util.retry import Retry

from envbuild.facts import database
from envbuild.fetch import index_config, index_pages, sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.fetch.wheel_resolution_and_download import Resolved
from envbuild.util.errors import EnvbuildError, HashMismatch, NetworkError, ProfileError, SettingsError
from envbuild.util.host_processes import Completed
from unit.conftest import forget
from unit.support import Index, configure, quick_pip, serving, sha, write_wheel

PYTHON, GLIBC = "3.11", "2.36"
LINUX = "manylinux_2_28_x86_64"


@pytest.fixture
def folder(tmp_path: Path, served: Index, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A find-links folder, in addition to an index that is empty so far."""
    found = tmp_path / "links"
    found.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(found))
    return found


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    (tmp_path / "served").mkdir()
    with serving(Index(tmp_path / "served")) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_pip(monkeypatch)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are tried as often as ever, without the pauses."""
    monkeypatch.setattr(index_config, "Retry", lambda **options: Retry(**{**options, "backoff_factor": 0.0}))


@pytest.mark.parametrize("work", ["resolve", "locate"])
def test_leftovers_of_a_killed_uv_are_swept(
    work: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, uv creates temporary folders. The kernel kills uv together with envbuild, so these folders
    remain."""
    write_wheel(folder, "one", "1.0")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    binary = tmp_path / "uv"
    binary.write_text(
        '#!/bin/sh\nmkdir "$TMPDIR/.tmpleft"\ncd "$TMPDIR" && pwd >> "$NOTED"\nkill -9 $$\n', encoding="utf-8"
    )
    binary.chmod(0o755)
    monkeypatch.setattr(wheel_resolution_and_download, "uv_binary", lambda: binary)
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises(EnvbuildError):
        resolve("one") if work == "resolve" else locate_one("one", "1.0")
    used = [Path(line) for line in (tmp_path / "noted").read_text(encoding="utf-8").splitlines()]
    assert used and all(path.parent == temporary and path.name.startswith("envbuild-tmp-uv-") for path in used)
    assert not list(temporary.iterdir())


def resolve(*requirements: str, keep: dict[str, str] | None = None, python: str = PYTHON) -> Resolved:
    return wheel_resolution_and_download.resolve_wheels(requirements, python, GLIBC, keep or {})


def locate_one(name: str, version: str, python: str = PYTHON, glibc: str = GLIBC) -> tuple[Wheel, str]:
    ((found, address),) = wheel_resolution_and_download.locate({name: version}, python, glibc).items()
    return found, address


LOCKED_SIZES: dict[str, int] = {}
"""sha256 -> size of each file of as_locked."""


def as_locked(file: Path) -> Wheel:
    name, version = file.name.split("-")[:2]
    sha256 = sha256_file_store.file_digest(file)
    LOCKED_SIZES[sha256] = file.stat().st_size
    return Wheel(name.replace("_", "-"), version, file.name, sha256)


def fetch(*wanted: Wheel, size: int | None = None) -> int:
    """Fetch files whose locked size is `size`, else that of as_locked."""
    locked = [LockedWheel(wheel, size or LOCKED_SIZES.get(wheel.sha256, 1_000_000), "x") for wheel in wanted]
    return wheel_resolution_and_download.fetch_wheels(
        locked, PYTHON, GLIBC, sha256_file_store.wheel_store(), lambda file, count: None
    )


def stored() -> list[str]:
    return sorted(file.name for file in sha256_file_store.wheel_store().folder.rglob("*") if file.is_file())


# resolving


def test_the_newest_versions_that_fit_are_chosen(folder: Path) -> None:
    for version in ("1.0", "1.1", "2.0"):
        write_wheel(folder, "alpha", version)
    write_wheel(folder, "beta", "3.0", ["alpha<2"])
    found = resolve("beta")
    assert found.versions == {"alpha": "1.1", "beta": "3.0"}
    assert found.wanted_by == {"alpha": frozenset({"beta"}), "beta": frozenset({""})}


def test_versions_to_keep_are_kept_where_they_fit(folder: Path) -> None:
    for version in ("1.0", "1.1", "2.0"):
        write_wheel(folder, "alpha", version)
    assert resolve("alpha", keep={"alpha": "1.0"}).versions == {"alpha": "1.0"}
    assert resolve("alpha>=1.1", keep={"alpha": "1.0"}).versions == {"alpha": "2.0"}
    assert resolve("alpha", keep={"gone": "1.0"}).versions == {"alpha": "2.0"}


def test_a_version_that_is_not_there_brings_the_newest_that_is(folder: Path) -> None:
    for version in ("1.0", "1.2", "1.10"):
        write_wheel(folder, "alpha", version)
    with pytest.raises(ProfileError) as caught:
        resolve("alpha==9", "beta")
    assert str(caught.value.hint).splitlines()[-1] == f"the newest alpha for Python {PYTHON} is 1.10"
    with pytest.raises(ProfileError) as caught:
        resolve("beta")  # it has no releases
    assert "the newest" not in str(caught.value.hint)


def test_a_python_that_this_machine_lacks_is_not_fetched(
    served: Index, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wheels are chosen for that Python; uv would download that Python if this were allowed."""
    write_wheel(folder, "alpha", "1.0")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "automatic")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "pythons"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", served.address.replace("/simple", "/pythons"))
    assert resolve("alpha", python="3.14").versions == {"alpha": "1.0"}
    assert [line for line in served.requests if "/pythons" in line] == []


def test_the_closure_is_all_that_is_needed() -> None:
    wanted = {"a": frozenset({""}), "b": frozenset({"a"}), "c": frozenset({"b", "x"}), "x": frozenset({""})}
    found = Resolved(dict.fromkeys(wanted, "1"), wanted)
    assert found.closure(["a"]) == {"a", "b", "c"}
    assert found.closure(["x"]) == {"c", "x"}
    assert found.closure([]) == set()


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        (["alpha==9.0"], "alpha"),
        (["alpha", "gamma"], "gamma"),
        (["alpha<1"], "alpha"),
        (["alpha==1.0", "alpha==1.1"], "alpha"),
    ],
)
def test_requirements_that_cannot_be_met_are_a_fault_of_the_profile(
    folder: Path, requirements: list[str], words: str
) -> None:
    for version in ("1.0", "1.1"):
        write_wheel(folder, "alpha", version)
    with pytest.raises(ProfileError) as caught:
        resolve(*requirements)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_local_version_that_no_place_has_names_find_links(folder: Path) -> None:
    write_wheel(folder, "torch", "2.12.0")
    with pytest.raises(NetworkError, match=r"torch==2\.13\.0\+cpu") as caught:
        resolve("torch==2.13.0+cpu")
    assert "find-links" in str(caught.value.hint)


@pytest.fixture
def pytorch(tmp_path: Path) -> Iterator[Index]:
    """A mirror of PyTorch's own index, which also has packages that must not be taken from there."""
    for name, version in (("torch", "2.13.0+cpu"), ("alpha", "9.0")):
        write_wheel(tmp_path / "pytorch", name, version)
    with serving(Index(tmp_path / "pytorch")) as found:
        yield found


@pytest.mark.parametrize("way", ["variable", "setting"])
def test_a_local_build_comes_from_pytorchs_index_where_that_is_asked_for(
    folder: Path, pytorch: Index, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    write_wheel(folder, "alpha", "1.0")
    with pytest.raises(NetworkError) as caught:
        resolve("torch==2.13.0+cpu", "alpha")
    hint = str(caught.value.hint)
    assert pytorch.requests == []  # never queried without a request
    assert "--torch-index pytorch" in hint and "make PROFILE TORCH_INDEX=pytorch" in hint
    assert "torch_index: pytorch in " in hint and "config.yaml" in hint
    if way == "variable":
        monkeypatch.setenv("ENVBUILD_TORCH_INDEX", pytorch.address)
    else:
        configure(f"torch_index: {pytorch.address}\n")
    assert resolve("torch==2.13.0+cpu", "alpha").versions == {"torch": "2.13.0+cpu", "alpha": "1.0"}
    found, address = locate_one("torch", "2.13.0+cpu")
    assert address == f"{pytorch.address[:-6]}files/{found.file.replace('+', '%2B')}" or found.file in address
    assert fetch(found) == 1
    assert not [line for line in pytorch.requests if "alpha" in line]


def test_pytorchs_own_index_is_a_fact_and_asked_for_such_builds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch==2.13.0+cpu", "torchvision==0.28.0+cu126", "numpy==1.0+mkl", "torch", "alpha"]
    assert index_config.torch_pages(lines) == []
    monkeypatch.setenv("ENVBUILD_TORCH_INDEX", "pytorch")
    root = database.torch_index().address.replace("/{build}", "")
    assert index_config.torch_pages(lines) == [f"{root}/cpu/torch/", f"{root}/cu126/torchvision/"]
    monkeypatch.setenv("ENVBUILD_TORCH_INDEX", "yes")
    with pytest.raises(SettingsError, match="torch_index: 'yes' is invalid"):
        index_config.torch_pages(lines)


def test_a_local_build_of_another_package_is_not_reported_as_pytorchs(folder: Path) -> None:
    with pytest.raises(NetworkError) as caught:
        resolve("alpha==1.0+own")
    assert "find-links" in str(caught.value.hint) and "torch" not in str(caught.value.hint)


def test_a_local_version_is_found_in_a_folder(folder: Path) -> None:
    write_wheel(folder, "torch", "2.13.0+cpu")
    assert resolve("torch==2.13.0+cpu").versions == {"torch": "2.13.0+cpu"}
    found, address = locate_one("torch", "2.13.0+cpu")
    assert found.file == "torch-2.13.0+cpu-py3-none-any.whl"
    assert address.startswith("file:///")


def test_without_an_index_only_folders_are_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(folder, "alpha", "1.0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert resolve("alpha").versions == {"alpha": "1.0"}


def test_an_index_that_does_not_answer_is_an_error_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError, match="index"):
        resolve("alpha")


def test_an_index_that_wants_a_password_is_an_error_of_the_network(served: Index) -> None:
    write_wheel(served.folder, "alpha", "1.0")
    served.user, served.password = "me", "secret"
    with pytest.raises(NetworkError):
        resolve("alpha")


def test_metadata_that_are_not_as_announced_are_the_indexs_fault(
    served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # at which uv would break its lines
    file = write_wheel(served.folder, "alpha", "1.0")
    metadata = file.with_name(f"{file.name}.metadata")
    metadata.write_text("Metadata-Version: 2.1\nName: alpha\nVersion: 1.0\n", encoding="utf-8")
    served.metadata = {file.name: sha("others")}
    with pytest.raises(NetworkError) as caught:
        resolve("alpha")
    message = f"the package index 127.0.0.1:{served.port} serves a different file than it announces: {metadata.name}"
    assert caught.value.message == message and sha("others") in str(caught.value.hint)


# locating


def test_names_and_hashes_come_from_the_files(folder: Path) -> None:
    file = write_wheel(folder, "some-name", "1.0")
    found, address = locate_one("some-name", "1.0")
    assert found == as_locked(file)
    assert address == file.as_uri()


FITTING = [
    # of these tags the first is chosen, or the second if the first is missing
    ["cp311-cp311-" + LINUX, "py3-none-any"],
    ["cp311-abi3-" + LINUX, "cp39-abi3-" + LINUX],
    ["cp311-cp311-" + LINUX, "cp39-abi3-" + LINUX],
    ["cp311-cp311-manylinux_2_31_x86_64", "cp311-cp311-manylinux_2_17_x86_64"],
    ["cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", "cp311-cp311-manylinux1_x86_64"],
    ["py3-none-" + LINUX, "py3-none-any"],
]


def test_the_best_wheel_is_taken(folder: Path) -> None:
    """uv is called once for all cases, because it is slow. Without the best wheel, the second best is taken."""
    names = {f"package{number}": tags for number, tags in enumerate(FITTING)}
    for best in (0, 1):
        for name, tags in names.items():
            for tag in tags[best:]:
                write_wheel(folder, name, "1.0", tag=tag)
        found = wheel_resolution_and_download.locate(dict.fromkeys(names, "1.0"), PYTHON, GLIBC)
        assert {wheel.name: wheel.file for wheel in found} == {
            name: f"{name}-1.0-{tags[best]}.whl" for name, tags in names.items()
        }
        for name, tags in names.items():
            (folder / f"{name}-1.0-{tags[0]}.whl").unlink(missing_ok=True)


def test_wheels_that_were_just_resolved_are_located_without_a_request(
    served: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    write_wheel(served.folder, "one", "1.0")
    write_wheel(served.folder, "two", "1.0b1")
    write_wheel(served.folder, "three", "1.0", ["one", "two==1.0b1"])
    versions = resolve("three").versions
    online = wheel_resolution_and_download.locate(versions, PYTHON, GLIBC)
    served.requests.clear()
    assert wheel_resolution_and_download.locate(versions, PYTHON, GLIBC, just_resolved=True) == online
    assert served.requests == []
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    assert wheel_resolution_and_download.locate(versions, PYTHON, GLIBC, just_resolved=True) == online
    assert served.requests != []


def test_a_size_that_was_noted_is_forgotten_if_the_download_does_not_fit(served: Index) -> None:
    file = write_wheel(served.folder, "one", "1.0")
    wheel = as_locked(file)
    noted = sha256_file_store.noted_listing(wheel.sha256)
    noted.write_text("{}", encoding="utf-8")
    with pytest.raises(HashMismatch, match="longer than 10 bytes"):
        fetch(wheel, size=10)
    assert not noted.exists()
    noted.write_text("{}", encoding="utf-8")
    assert fetch(wheel) == 1 and noted.exists()


def test_an_index_that_does_not_answer_about_a_prerelease_is_reported(
    served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(served.folder, "one", "1.0", ["two==1.0b1"])
    write_wheel(served.folder, "two", "1.0b1")
    compile_, failed = wheel_resolution_and_download._compile, Completed(2, "", "error: Failed to fetch: `http://x/`")

    def lost(lines: list[str], python: str, glibc: str, *options: str) -> Completed:
        return failed if "--prerelease" in options else compile_(lines, python, glibc, *options)

    monkeypatch.setattr(wheel_resolution_and_download, "_compile", lost)
    with pytest.raises(NetworkError):
        resolve("one")


def test_the_higher_number_of_two_builds_is_chosen(folder: Path) -> None:
    for build in ("1.0", "1.0-2", "1.0-10"):
        write_wheel(folder, "alpha", build)
    assert locate_one("alpha", "1.0")[0].file == "alpha-1.0-10-py3-none-any.whl"


@pytest.mark.parametrize(
    "tag",
    [
        "cp311-cp311-manylinux_2_39_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311-win_amd64",
        "cp311-cp311-macosx_11_0_arm64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp312-cp312-" + LINUX,
        "cp312-abi3-" + LINUX,
        "cp311-cp311t-" + LINUX,
        "py2-none-any",
    ],
)
def test_a_wheel_that_does_not_fit_is_left_out(tag: str) -> None:
    assert best(f"alpha-1.0-{tag}.whl") is None


@pytest.mark.parametrize("tag", ["cp311-cp311-manylinux_2_39_x86_64", "cp312-abi3-" + LINUX])
def test_a_version_without_a_wheel_that_fits_is_a_fault_of_the_profile(folder: Path, tag: str) -> None:
    write_wheel(folder, "alpha", "1.0", tag=tag)
    with pytest.raises(ProfileError):
        locate_one("alpha", "1.0")


@pytest.mark.parametrize("suite", database.suites().values(), ids=lambda suite: suite.name)
def test_every_suite_can_be_resolved_for(folder: Path, suite: database.Suite) -> None:
    """The newest platform that uv knows is manylinux_2_40; trixie has 2.41."""
    glibc = min(int(suite.glibc.removeprefix("2.")), 40)
    write_wheel(folder, "alpha", "1.0", tag=f"py3-none-manylinux_2_{glibc}_x86_64")
    assert wheel_resolution_and_download.resolve_wheels(["alpha"], suite.python, suite.glibc, {}).versions == {
        "alpha": "1.0"
    }
    assert locate_one("alpha", "1.0", suite.python, suite.glibc)[0].version == "1.0"


def test_a_package_without_wheels_is_a_fault_of_the_profile(folder: Path) -> None:
    (folder / "alpha-1.0.tar.gz").write_bytes(b"never opened")
    for attempt in (
        lambda: resolve("alpha"),
        lambda: wheel_resolution_and_download.locate({"alpha": "1.0"}, PYTHON, GLIBC),
    ):
        with pytest.raises(ProfileError) as caught:
            attempt()
        assert "alpha" in f"{caught.value.message} {caught.value.hint}"


def test_tags_are_in_order() -> None:
    found = sorted((rank, str(tag)) for tag, rank in wheel_resolution_and_download.tags("3.11", "2.28").items())
    names = [name for _, name in found]
    assert names[0] == "cp311-cp311-manylinux_2_28_x86_64"
    assert names[-1] == "py30-none-any"
    assert "cp311-cp311-manylinux_2_29_x86_64" not in names
    for first, second in (
        ("cp311-cp311-manylinux_2_17_x86_64", "cp311-cp311-manylinux2014_x86_64"),
        ("cp311-cp311-linux_x86_64", "cp311-abi3-manylinux_2_28_x86_64"),
        ("cp311-abi3-manylinux_2_28_x86_64", "cp310-abi3-manylinux_2_28_x86_64"),
        ("cp310-abi3-manylinux_2_28_x86_64", "py3-none-any"),
    ):
        assert names.index(first) < names.index(second)


@pytest.mark.parametrize("name", ["a/../../x.whl", "x.tar.gz", "x y.whl", "x;y.whl", "$(id).whl", "", "x%00.whl"])
def test_an_address_with_an_odd_file_name_is_not_a_wheel(name: str) -> None:
    if "/" in name:
        assert wheel_resolution_and_download._file_name(f"http://index.example/{name}") == "x.whl"
    else:
        with pytest.raises(InvalidWheelFilename):
            wheel_resolution_and_download._file_name(f"http://index.example/files/{name}")


# fetching


def test_sizes_are_asked_for(served: Index, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_wheel(served.folder, "alpha", "1.0", content="# long\n" * 500)
    local = write_wheel(folder, "beta", "1.0")
    addresses = {as_locked(file): f"{served.address[:-6]}files/{file.name}", as_locked(local): local.as_uri()}
    assert wheel_resolution_and_download.sizes(addresses) == {as_locked(f): f.stat().st_size for f in (file, local)}
    assert served.requests == [f"HEAD /files/{file.name}"]


def test_wheels_come_once(served: Index) -> None:
    files = [write_wheel(served.folder, name, "1.0") for name in ("alpha", "beta")]
    seen: dict[str, int] = {}

    def progress(file: str, count: int) -> None:
        seen[file] = seen.get(file, 0) + count

    wanted = [as_locked(file) for file in files]
    locked = [LockedWheel(wheel, file.stat().st_size, "x") for wheel, file in zip(wanted, files, strict=True)]
    assert (
        wheel_resolution_and_download.fetch_wheels(locked, PYTHON, GLIBC, sha256_file_store.wheel_store(), progress)
        == 2
    )
    assert seen == {file.name: file.stat().st_size for file in files}
    assert stored() == ["alpha-1.0-py3-none-any.whl", "beta-1.0-py3-none-any.whl"]
    served.requests.clear()
    assert fetch(*wanted) == 0
    assert served.requests == []


def test_wheels_come_from_a_folder(folder: Path) -> None:
    assert fetch(as_locked(write_wheel(folder, "alpha", "1.0"))) == 1
    assert stored() == ["alpha-1.0-py3-none-any.whl"]


def test_no_index_is_asked_for_what_a_folder_has(folder: Path, served: Index) -> None:
    assert fetch(*(as_locked(write_wheel(folder, name, "1.0")) for name in ("alpha", "beta"))) == 2
    assert served.requests == []


@pytest.mark.parametrize("no_index", [False, True])
def test_a_damaged_file_in_a_folder_is_named(
    folder: Path, served: Index, monkeypatch: pytest.MonkeyPatch, no_index: bool
) -> None:
    file = write_wheel(folder, "alpha", "1.0")
    wanted = as_locked(file)
    content = file.read_bytes()
    file.write_bytes(content[:-7] + b"damaged")
    if no_index:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        forget()
    with pytest.raises(HashMismatch) as caught:
        fetch(wanted)
    assert str(file) in caught.value.message and "copy it again" in str(caught.value.hint)
    assert "--upgrade" not in str(caught.value.hint)


def test_a_file_of_another_size_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_wheel(folder, "alpha", "1.0")
    wanted, size = as_locked(file), file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(sha256_file_store, "file_digest", None)
    with pytest.raises(HashMismatch, match=f"{size - 1} bytes, locked {size}"):
        fetch(wanted)


def test_an_index_replaces_a_damaged_file_of_a_folder(folder: Path, served: Index) -> None:
    wanted = as_locked(write_wheel(served.folder, "alpha", "1.0"))
    (folder / wanted.file).write_bytes(b"damaged")
    assert fetch(wanted) == 1


def test_an_unreachable_index_names_what_the_folder_lacks(
    folder: Path, served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = as_locked(write_wheel(served.folder, "beta", "1.0"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    forget()
    with pytest.raises(NetworkError) as caught:
        fetch(as_locked(write_wheel(folder, "alpha", "1.0")), lacking)
    assert f"{folder} of find-links lacks {lacking.file}: " in str(caught.value.hint)
    assert "PIP_NO_INDEX=1" in str(caught.value.hint)


def test_another_file_under_the_name_is_refused_and_nothing_is_kept(served: Index) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    served.spoil = {file.name: file.read_bytes() + b"spoiled"}
    with pytest.raises(HashMismatch, match=file.name) as caught:
        fetch(as_locked(file))
    assert caught.value.code == 3
    assert list(sha256_file_store.wheel_store().folder.iterdir()) == []


def test_no_more_is_fetched_than_was_locked(served: Index) -> None:
    file = write_wheel(served.folder, "alpha", "1.0", content="# long\n" * 500)
    with pytest.raises(HashMismatch, match=f"{file.name} .* is longer than 100 bytes"):
        fetch(as_locked(file), size=100)
    assert list(sha256_file_store.wheel_store().folder.iterdir()) == []


def test_a_file_whose_hash_differs_from_the_index_is_refused(served: Index) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    wanted = Wheel("alpha", "1.0", file.name, sha("what was locked"))
    with pytest.raises(HashMismatch, match=file.name):
        fetch(wanted)
    assert list(sha256_file_store.wheel_store().folder.iterdir()) == []


def test_a_download_that_breaks_off_is_an_error_of_the_network(served: Index, impatient: None) -> None:
    file = write_wheel(served.folder, "alpha", "1.0", content="# long\n" * 500)
    served.cut = {file.name: 1000}
    with pytest.raises(NetworkError, match=f"{file.name} was interrupted 3 times"):
        fetch(as_locked(file))
    assert served.requests.count(f"GET /files/{file.name}") == 3
    assert list(sha256_file_store.wheel_store().folder.iterdir()) == []


def test_an_interrupted_download_starts_again(served: Index, impatient: None) -> None:
    file = write_wheel(served.folder, "alpha", "1.0", content="# long\n" * 500)
    served.cut = {file.name: 2}
    counts: list[int] = []
    locked = LockedWheel(as_locked(file), file.stat().st_size, "x")
    assert (
        wheel_resolution_and_download.fetch_wheels(
            [locked], PYTHON, GLIBC, sha256_file_store.wheel_store(), lambda name, count: counts.append(count)
        )
        == 1
    )
    assert sum(counts) == file.stat().st_size and min(counts) <= 0


def test_errors_of_the_server_are_outlasted(served: Index, impatient: None) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    served.errors = {file.name: 3}
    assert fetch(as_locked(file)) == 1
    assert served.requests.count(f"GET /files/{file.name}") == 4


def test_a_server_that_only_errs_is_an_error_of_the_network(served: Index, impatient: None) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    served.errors = {file.name: 1000}
    with pytest.raises(NetworkError, match=file.name):
        fetch(as_locked(file))
    assert served.requests.count(f"GET /files/{file.name}") == 5
    assert list(sha256_file_store.wheel_store().folder.iterdir()) == []


def test_a_version_that_the_index_removed_is_reported(served: Index) -> None:
    write_wheel(served.folder, "alpha", "1.0")
    with pytest.raises(NetworkError, match="lack a locked file") as caught:
        fetch(Wheel("alpha", "0.9", "alpha-0.9-py3-none-any.whl", sha("x")))
    assert "alpha" in f"{caught.value.message} {caught.value.hint}"


def test_a_file_that_the_index_removed_is_named(served: Index) -> None:
    write_wheel(served.folder, "alpha", "1.0", tag="py3-none-any")
    gone = Wheel("alpha", "1.0", "alpha-1.0-cp311-cp311-linux_x86_64.whl", sha("x"))
    with pytest.raises(NetworkError, match=gone.file):
        fetch(gone)


def test_credentials_in_the_indexs_address_hold_for_downloads(served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    served.user, served.password = "me", "p@ss:word/1"
    address = served.address.replace("://", "://me:p%40ss%3Aword%2F1@")
    monkeypatch.setenv("PIP_INDEX_URL", address)
    forget()
    found, where = locate_one("alpha", "1.0")
    assert wheel_resolution_and_download.sizes({found: where}) == {found: file.stat().st_size}
    assert fetch(found) == 1


def test_requests_one_after_the_other_use_one_connection(served: Index) -> None:
    """A new connection for each request made `lock --upgrade` take twice as long."""
    for name in ("alpha", "beta", "gamma"):
        file = write_wheel(served.folder, name, "1.0")
        wheel = Wheel(name, "1.0", file.name, sha("x"))
        address = f"http://127.0.0.1:{served.port}/files/{file.name}"
        assert wheel_resolution_and_download.sizes({wheel: address}) == {wheel: file.stat().st_size}
        assert [listed.file for listed in index_pages.listed_files(name)] == [file.name]
    assert (len(served.requests), served.connections) == (6, 1)


def test_credentials_of_netrc_hold_for_downloads(
    served: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    served.user, served.password = "me", "secret"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n", encoding="utf-8")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert fetch(as_locked(file)) == 1


def test_a_server_that_is_gone_is_an_error_that_names_the_file(impatient: None) -> None:
    wheel = Wheel("alpha", "1.0", "alpha-1.0-py3-none-any.whl", sha("x"))
    with pytest.raises(NetworkError, match=wheel.file):
        wheel_resolution_and_download.sizes({wheel: f"http://127.0.0.1:9/files/{wheel.file}"})


def test_a_password_is_in_no_message(served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    served.user, served.password = "me", "right"
    monkeypatch.setenv("PIP_INDEX_URL", served.address.replace("://", "://me:topsecret@"))
    with pytest.raises((NetworkError, ProfileError)) as caught:
        resolve("alpha")
    assert "topsecret" not in f"{caught.value.message} {caught.value.hint}"


def test_requests_is_what_downloads(served: Index) -> None:
    assert isinstance(index_config.index_session(), requests.Session)


def best(*files: str) -> str | None:
    listed = [{"url": f"http://index.example/{file}"} for file in files]
    found = wheel_resolution_and_download._best(listed, wheel_resolution_and_download.tags(PYTHON, GLIBC))
    return str(found["url"]).rpartition("/")[2] if found else None


def test_the_choice_does_not_depend_on_the_order() -> None:
    files = ["a-1-py3-none-any.whl", "a-1-2-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "bad.whl"]
    assert best(*files) == best(*reversed(files)) == files[2]
    assert best("a-1-10-py3-none-any.whl", files[1]) == "a-1-10-py3-none-any.whl"
    assert best("a-1-cp310-cp310-linux_x86_64.whl", "bad.whl") is None
    assert best() is None
