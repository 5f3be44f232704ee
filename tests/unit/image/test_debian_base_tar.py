"""Tests of the base that need no mmdebstrap."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch import sha256_file_store
from envbuild.image import debian_base_tar
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, DiskError, HashMismatch
from envbuild.util.host_processes import Completed, ProcessMissing
from unit.support import PROFILE, lock_for, plan_of, sha


class Tools:
    """Stands in for dpkg-deb and mmdebstrap."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.options: dict[str, Any] = {}
        self.answer: Completed | Exception = Completed(0, "", "")
        self.archive: dict[str, str] = {}
        self.namespaces = 0  # exit code of unshare
        self.temporary: set[str] = set()  # the folders in which these programs leave files if they are killed

    def __call__(self, argv: Sequence[str | Path], **options: Any) -> Completed:
        words = [str(word) for word in argv]
        self.temporary |= {options.get("env", {}).get("TMPDIR", "")} if words[-1] != "true" else set()
        if words[0] == "dpkg-deb":
            return Completed(0, f"Package: {Path(words[-1]).name.partition('_')[0]}\nVersion: 1\n\n", "")
        if words[-1] == "true":
            return Completed(self.namespaces, "", "")
        self.words, self.options = words, options
        folder = Path(words[-1].split()[2].removeprefix("copy://"))
        self.archive = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
        Path(words[-2]).write_text("half", encoding="utf-8")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    found = Tools()
    monkeypatch.setattr(debian_base_tar, "run", found)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


@pytest.fixture
def locked(project: Path) -> Lock:
    plain = lock_for(plan_of(project, PROFILE))
    made = dataclasses.replace(plain, base=tuple(dataclasses.replace(d, sha256=sha(d.name)) for d in plain.base))
    for item in made.base:
        path = sha256_file_store.debs().path(item.sha256, item.file)
        path.parent.mkdir(parents=True)
        path.write_text(item.name, encoding="utf-8")
    return made


def make(locked: Lock) -> Path:
    return debian_base_tar.make_base(locked, sha256_file_store.debs(), lambda line: None)


def leftovers() -> list[str]:
    return sorted(file.name for file in user_folders.cache_folder("bases").iterdir())


def test_a_base_is_one_of_its_packages_alone(locked: Lock) -> None:
    same = dataclasses.replace(locked, apt=(), wheels=(), environment={}, made="20300101T000000Z", inputs={})
    assert debian_base_tar.tar_file(same) == debian_base_tar.tar_file(locked)
    for change in ({"suite": "trixie"}, {"base": locked.base[1:]}):
        assert debian_base_tar.tar_file(dataclasses.replace(locked, **change)) != debian_base_tar.tar_file(locked)


def test_a_changed_recipe_changes_the_base(locked: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    before = debian_base_tar.tar_file(locked)
    monkeypatch.setattr(debian_base_tar, "_OPTIONS", (*debian_base_tar._OPTIONS, "--verbose"))
    assert debian_base_tar.tar_file(locked) != before


def test_a_base_is_made_from_a_local_archive_of_the_locked_files(locked: Lock, tools: Tools) -> None:
    assert make(locked) == debian_base_tar.tar_file(locked)
    made = debian_base_tar.tar_file(locked)
    assert leftovers() == [made.with_suffix(".sha256").name, made.name]
    assert made.with_suffix(".sha256").read_text(encoding="utf-8") == sha256_file_store.file_digest(made)
    assert debian_base_tar.intact_base(locked) == made
    assert {"Packages", "Release"} | {item.file for item in locked.base} == set(tools.archive)
    index = tools.archive["Packages"]
    for item in locked.base:
        assert f"Filename: ./{item.file}\nSize: {item.bytes}\nSHA256: {item.sha256}\n" in index
    assert f"{hashlib.sha256(index.encode()).hexdigest()} {len(index)} Packages" in tools.archive["Release"]
    assert "Codename: bookworm" in tools.archive["Release"]
    assert tools.options["env"]["SOURCE_DATE_EPOCH"] == str(debian_base_tar.SOURCE_DATE_EPOCH)
    assert f"--include={','.join(item.name for item in locked.base)}" in tools.words
    (temporary,) = tools.temporary
    assert Path(temporary).name.startswith("envbuild-tmp-base-"), "of no use to anybody, it is swept by the next run"


def test_variables_of_the_user_do_not_reach_the_scripts_of_packages(
    locked: Lock, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes bytecode next to the files of some packages, unless PYTHONDONTWRITEBYTECODE is set."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    make(locked)
    given = tools.options["env"]
    assert {name for name in os.environ if name not in given} == {"PATH"}
    assert given["PYTHONDONTWRITEBYTECODE"] is None and given["TZ"] == "UTC"


@pytest.mark.parametrize(
    ("user", "namespaces", "begin"), [(0, 0, "unshare"), (0, 1, "mmdebstrap"), (5, 0, "mmdebstrap")]
)
def test_mounts_of_root_end_with_mmdebstrap(
    locked: Lock, tools: Tools, monkeypatch: pytest.MonkeyPatch, user: int, namespaces: int, begin: str
) -> None:
    """A killed mmdebstrap of root would leave /proc and /sys mounted in a temporary folder. Without the right to mount,
    mmdebstrap mounts nothing; for other users, mmdebstrap uses its own namespaces."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    tools.namespaces = namespaces
    debian_base_tar.make_base(locked, sha256_file_store.debs(), print)
    assert tools.words[0] == begin
    if begin == "unshare":
        assert {"--mount", "--pid", "--kill-child"} <= set(tools.words[: tools.words.index("mmdebstrap")])
    copied = tools.words[-1].split()[2].removeprefix("copy://")
    assert tools.options["env"]["TMPDIR"] == copied, "it is swept with the rest"


def test_what_a_run_left_that_was_killed_after_it_completed_the_base_is_removed(
    locked: Lock, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make(locked)
    left = tmp_path / "envbuild-tmp-base-killed"
    left.mkdir()
    make(locked)
    assert not left.exists()


def test_a_base_is_made_once(locked: Lock, tools: Tools) -> None:
    make(locked)
    tools.words = []
    make(locked)
    assert tools.words == []


@pytest.mark.parametrize("change", ["tar", "note", "no note"])
def test_a_base_that_is_not_as_it_was_made_is_removed(locked: Lock, tools: Tools, change: str) -> None:
    made = make(locked)
    noted = made.with_suffix(".sha256")
    if change == "no note":
        noted.unlink()
    else:
        (made if change == "tar" else noted).write_text("spoiled", encoding="utf-8")
    with pytest.raises(HashMismatch, match="damaged") as caught:
        debian_base_tar.intact_base(locked)
    assert caught.value.code == 3
    assert not made.exists()
    make(locked)
    assert debian_base_tar.intact_base(locked) == made


def test_a_package_that_changed_on_disk_gets_into_no_base(locked: Lock, tools: Tools) -> None:
    item = locked.base[-1]
    path = sha256_file_store.debs().path(item.sha256, item.file)
    path.write_text("spoiled", encoding="utf-8")
    with pytest.raises(HashMismatch, match=item.name):
        make(locked)
    assert (tools.words, path.exists(), leftovers()) == ([], False, [])


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (Completed(25, "", "I: one\nE: the last word"), BuildError, "the last word"),
        (Completed(25, "", "E: unable to pick chroot mode automatically"), BuildError, "/etc/subuid"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_a_failure_leaves_no_half_base(
    locked: Lock, tools: Tools, answer: Any, kind: type[BaseException], words: str
) -> None:
    tools.answer = answer
    if isinstance(answer, KeyboardInterrupt):
        tools.answer = Completed(0, "", "")

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", interrupted)
            make(locked)
    else:
        with pytest.raises(kind) as caught:
            make(locked)
        assert words in str(getattr(caught.value, "hint", ""))
    assert leftovers() == []


def test_without_mmdebstrap_another_base_is_named(locked: Lock, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it although unshare, which would start mmdebstrap, is installed."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ProcessMissing) as caught:
        make(locked)
    assert "set a base image" in str(caught.value.hint)
    assert (tools.words, leftovers()) == ([], [])


def test_a_disk_that_is_full_is_an_error_of_the_disk_with_figures(locked: Lock, tools: Tools) -> None:
    tools.answer = Completed(1, "", "E: could not write: No space left on device")
    with pytest.raises(DiskError, match=r"the disk is full in the middle of making the base.* free"):
        debian_base_tar.make_base(locked, sha256_file_store.debs(), print)
    assert not list(debian_base_tar.tar_file(locked).parent.iterdir())
