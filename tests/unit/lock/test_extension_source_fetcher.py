"""Sources of extensions: which commit is fetched and from where, whether the source is complete, and whether its build
reads the settings of the profile."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import extension_source_fetcher
from envbuild.lock.extension_source_fetcher import SourceDamaged
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.resolve.extension_toolchain_and_contradictions import ExtensionRequest
from envbuild.util import user_folders
from envbuild.util.errors import EnvbuildError, HashMismatch, NetworkError, ProfileError
from unit.support import PROFILE, plan_of, quick_pip

SETUP = "import os\nwanted = os.environ.get('KERNELS_CUDA')\n"
# Content that git would change or leave out if attributes and filters were applied.
ODD = {".gitattributes": "left export-ignore\nid export-subst\ncrlf text eol=crlf\n", "left": "in\n",
       "id": "$Format:%H$\n", "crlf": "one\ntwo\n"}  # fmt: skip


@pytest.fixture(autouse=True)
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_pip(monkeypatch)


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "team" / "kernels"
    folder.mkdir(parents=True)
    files = {"setup.py": SETUP, "README": "KERNELS_GONE once did something", "tests/run.py": "KERNELS_TESTED = 1"}
    for name, text in {**files, **ODD}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def wanted(project: Path, **keys: Any) -> ExtensionRequest:
    entry = {"name": "kernels", "modules": ["kernels_cuda"], **keys}
    plan = plan_of(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [entry]})
    assert plan.extension_toolchain
    return plan.extension_toolchain.wanted[0]


def from_git(project: Path, repository: Path, **keys: Any) -> ExtensionRequest:
    return wanted(project, **{"git": repository.as_uri(), "commit": git(repository, "rev-parse", "HEAD"), **keys})


def take(item: ExtensionRequest) -> LockedExtension:
    return extension_source_fetcher.inspect_source(item, lambda name, count: None)


def refused(item: ExtensionRequest) -> EnvbuildError:
    with pytest.raises(EnvbuildError) as caught:
        take(item)
    return caught.value


def members(locked: LockedExtension, folder: Path) -> dict[str, bytes]:
    extension_source_fetcher.write_archive(locked, folder / "source.tar")
    with tarfile.open(folder / "source.tar") as tar:
        return {m.name: file.read() for m in tar for file in [tar.extractfile(m)] if file}


def test_a_commit_is_taken_byte_for_byte_and_named_by_its_tree(project: Path, repository: Path) -> None:
    locked = take(from_git(project, repository))
    assert (locked.kind, locked.digest) == ("git", git(repository, "rev-parse", "HEAD"))
    assert locked.tree == git(repository, "rev-parse", "HEAD^{tree}")
    found = members(locked, project)
    assert {name: text.encode() for name, text in ODD.items()}.items() <= {
        name.removeprefix("source/"): content for name, content in found.items()
    }.items()


@pytest.mark.slow
def test_an_older_commit_is_had_too_and_once(project: Path, repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "second")
    item = from_git(project, repository, commit=first)
    assert take(item).digest == first
    repository.rename(repository.with_name("gone"))
    assert take(item).digest == first


@pytest.mark.slow
def test_two_may_fetch_one_commit_at_once(project: Path, repository: Path) -> None:
    item = from_git(project, repository)
    first = take(item)
    extension_source_fetcher._clone(item, first.digest)  # as a process does that started before the first one ended
    assert take(item) == first


def test_a_hooks_variables_do_not_lead_git_elsewhere(
    project: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = from_git(project, repository)
    for name in ("GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_WORK_TREE", "GIT_SHALLOW_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    assert take(item).digest == item.extension.commit
    assert not (tmp_path / "elsewhere").exists()


def test_a_repository_that_git_cannot_create_is_reported(
    project: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = from_git(project, repository)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "none")
    with pytest.raises(EnvbuildError, match="cannot create a repository"):
        take(item)


def test_a_server_that_gives_no_single_commits_gives_all(
    project: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 0 refuses a commit that is not the tip of a branch."""
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "second")
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.version"), ("VALUE_0", "0")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert take(from_git(project, repository, commit=first)).digest == first


@pytest.mark.parametrize("commit", ["0" * 40, "tree"])
def test_an_unknown_commit_is_the_profiles_fault(project: Path, repository: Path, commit: str) -> None:
    commit = git(repository, "rev-parse", "HEAD^{tree}") if commit == "tree" else commit
    error = refused(from_git(project, repository, commit=commit))
    assert isinstance(error, ProfileError)
    (fault,) = error.faults
    assert (fault.file, fault.field) == ("profiles/sample.yaml", "extensions[0]")
    assert commit in fault.message and fault.line
    assert list(user_folders.cache_folder("sources").iterdir()) == []


@pytest.fixture
def with_submodules(repository: Path) -> Path:
    """Create two links to commits of other repositories; git creates such entries only on request."""
    for path in ("third_party/cutlass", "\x1b[2J"):
        git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},{path}")
    git(repository, "commit", "--quiet", "--message", "with submodules")
    return repository


def test_a_commit_with_submodules_is_refused_with_their_names(project: Path, with_submodules: Path) -> None:
    """Submodules are not downloaded, so a build that needs a submodule would fail late, or silently work without the
    submodule."""
    error = refused(from_git(project, with_submodules))
    assert isinstance(error, ProfileError)
    (fault,) = error.faults
    assert fault.field == "extensions[0]" and fault.line
    assert "third_party/cutlass" in fault.message and "\x1b" not in fault.message
    assert "submodules: omit" in str(error.hint) and "sdist" in str(error.hint)


def test_where_the_build_needs_none_of_them_they_are_left_out(project: Path, with_submodules: Path) -> None:
    locked = take(from_git(project, with_submodules, submodules="omit"))
    assert "source/third_party/cutlass" not in members(locked, project)
    assert not hasattr(locked, "submodules")  # not part of the cache key: the built wheel is the same


def test_a_repository_out_of_reach_is_the_networks_fault_and_shows_no_password(project: Path) -> None:
    error = refused(wanted(project, git="http://me:secret@127.0.0.1:1/team/kernels", commit="1" * 40))
    assert isinstance(error, NetworkError)
    assert "127.0.0.1:1/team/kernels" in error.message
    assert "secret" not in f"{error.message}{error.hint}"
    assert "git_mirror" in str(error.hint)
    (fault,) = error.faults
    assert (fault.file, fault.field) == ("profiles/sample.yaml", "extensions[0]") and fault.line


def test_a_mirror_stands_for_the_address(project: Path, repository: Path) -> None:
    user_folders.config_file().parent.mkdir(parents=True)
    site = repository.parent.parent.as_uri()
    user_folders.config_file().write_text(f"git_mirror: {site}/{{path}}\n", encoding="utf-8")
    assert take(from_git(project, repository, git="https://git.example/team/kernels.git")).kind == "git"


def test_a_damaged_checkout_is_removed_and_said(project: Path, repository: Path) -> None:
    locked = take(from_git(project, repository))
    held = user_folders.cache_folder("sources") / locked.digest
    (packed, *_) = [path for path in held.rglob("*") if path.is_file() and "objects" in path.parts]
    packed.chmod(0o644)
    packed.write_bytes(packed.read_bytes()[:-1] + b"?")
    with pytest.raises(SourceDamaged, match="damaged"):
        extension_source_fetcher.write_archive(locked, project / "source.tar")
    assert not held.exists()


def test_a_variable_that_the_source_does_not_read_is_refused(project: Path, repository: Path) -> None:
    """A mention in the README does not count; variables that compilers read do."""
    env = {"KERNELS_CUDA": "1", "KERNELS_GONE": "1", "NVCC_APPEND_FLAGS": "-lineinfo"}
    error = refused(from_git(project, repository, build={"env": env}))
    assert isinstance(error, ProfileError)
    (fault,) = error.faults
    assert fault.field == "extensions[0].build.env.KERNELS_GONE"
    assert "do not mention KERNELS_GONE" in fault.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KERNELS", "KERNELS_CUD", "ERNELS_CUDA", "KERNELS_TESTED"])
def test_part_of_a_word_and_a_test_do_not_count_as_a_mention(project: Path, repository: Path, name: str) -> None:
    error = refused(from_git(project, repository, build={"env": {name: "1"}}))
    assert f"do not mention {name}: " in str(error.faults[0])


def sdist(folder: Path, setup: str = SETUP) -> dict[str, str]:
    file = folder / "kernels-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        info = tarfile.TarInfo("kernels-1.0/setup.py")
        info.size = len(setup)
        tar.addfile(info, io.BytesIO(setup.encode()))
    return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "url": file.as_uri()}


def test_an_sdist_is_taken_by_its_hash(project: Path, tmp_path: Path) -> None:
    item = wanted(project, sdist=sdist(tmp_path), build={"env": {"KERNELS_CUDA": "1"}})
    locked = take(item)
    assert (locked.kind, locked.tree) == ("sdist", None)
    assert members(locked, project) == {"kernels-1.0/setup.py": SETUP.encode()}
    other = {**sdist(tmp_path, "another"), "sha256": "0" * 64}
    assert isinstance(refused(wanted(project, sdist=other)), HashMismatch)


def test_a_file_that_is_not_a_tar_archive_is_reported(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "kernels.zip"
    file.write_bytes(b"PK")
    entry = {"sha256": hashlib.sha256(b"PK").hexdigest(), "url": file.as_uri()}
    error = refused(wanted(project, sdist=entry, build={"env": {"KERNELS_CUDA": "1"}}))
    assert isinstance(error, ProfileError) and "tar" in str(error.faults[0])


def packed(folder: Path, *records: tuple[dict[str, str], tarfile.TarInfo]) -> dict[str, str]:
    """Return an sdist of empty files with these extended headers."""
    file = folder / "kernels-1.0.tar"
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        for headers, info in records:
            info.pax_headers = headers
            tar.addfile(info)
    return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "url": file.as_uri()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.size": "x"},
        {"size": "-1536"},
        {"size": str(1 << 60)},
        {"comment": "x" * (2 << 20)},
    ],
    ids=["no number", "backwards", "without end", "large header"],
)
def test_a_hostile_tar_is_the_profiles_fault(project: Path, tmp_path: Path, headers: dict[str, str]) -> None:
    names = ("kernels-1.0/first", "kernels-1.0/setup.py", "kernels-1.0/next")
    plain, hostile, after = map(tarfile.TarInfo, names)
    entry = packed(tmp_path, ({}, plain), (headers, hostile), ({}, after))
    error = refused(wanted(project, sdist=entry))
    assert isinstance(error, ProfileError) and "is not a tar archive" in str(error.faults[0])
    assert error.faults[0].field == "extensions[0]"


def test_a_source_without_end_is_not_read_to_it(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_source_fetcher, "_MOST_MEMBERS", 2)
    entry = packed(tmp_path, *(({}, tarfile.TarInfo(f"kernels-1.0/{name}")) for name in "abc"))
    assert "2 files" in str(refused(wanted(project, sdist=entry)).faults[0])


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"git": "https://a[b/c", "commit": "c" * 40}, "git"),
        ({"sdist": {"url": "https://a[b/c", "sha256": "c" * 64}}, "sdist.url"),
    ],
)
def test_an_address_that_cannot_be_parsed_is_refused(project: Path, entry: dict[str, Any], field: str) -> None:
    with pytest.raises(ProfileError) as caught:
        take(wanted(project, **entry))
    (fault,) = caught.value.faults
    assert fault.field == f"extensions[0].{field}" and "not a valid URL" in fault.message and fault.line
