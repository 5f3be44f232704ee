"""The cached plan of `install` is used only while nothing that it was made from has changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import lock_file
from envbuild.repair import install_plan, install_planner
from envbuild.repair.install_plan import InstallPlan
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import atomic_files, user_folders
from envbuild.util.errors import OutOfDate
from unit.support import PROFILE, lock_for

NAMES = ("profiles/sample.yaml", "profiles/base.yaml", "elsewhere/parent.yaml", "profiles/sample.lock.yaml")


@pytest.fixture(autouse=True)
def files(project: Path) -> None:
    """A profile with two parents, one by name and one by path, and its lock."""
    profiles = {
        NAMES[0]: {"extends": "base", "env": {"GREETING": "a b"}},
        NAMES[1]: {"extends": "../elsewhere/parent.yaml"},
        NAMES[2]: PROFILE,
    }
    for name, content in profiles.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(json.dumps(content), encoding="utf-8")
    write_lock()


def write_lock() -> None:
    loaded = profile_reader_and_overrides.load("sample")
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, "sample")


def test_it_is_the_plan_that_was_stored() -> None:
    assert install_plan.cached("sample") is None
    plan = install_planner.plan_and_cache("sample")
    assert plan.wheels and plan.variables["GREETING"] == "a b" and "numpy==" in plan.constraints
    assert install_plan.cached("sample") == plan
    shutil.copy(cache_file(), install_plan._file("base"))
    assert install_plan.cached("base") is None, "the cached file names its profile"


def add_a_line(name: str, project: Path) -> None:
    text = (project / name).read_text(encoding="utf-8")
    (project / name).write_text(f"{text}\n", encoding="utf-8")


def remove(name: str, project: Path) -> None:
    (project / name).unlink()


CHANGES: dict[str, Callable[[Path], object]] = {
    **{f"content of {name}": partial(add_a_line, name) for name in NAMES},
    **{f"{name} is missing": partial(remove, name) for name in NAMES},
    "a new profile": lambda project: (project / "profiles" / "other.yaml").write_text("{}"),
    "a new folder of profiles": lambda project: (project / "profiles" / "projects").mkdir(),
    "a link": lambda project: replaced_by_link(project / NAMES[1]),
    "a damaged cache": lambda project: cache_file().write_text("{"),
    "a cache of something else": lambda project: cache_file().write_text('{"made_from": "x"}'),
    "another wheel in the cache": lambda project: in_the_cache(lambda found: found["plan"]["wheels"].pop()),
    "a list as plan": lambda project: in_the_cache(lambda found: found.update(plan=[])),
    "a deep cache": lambda project: cache_file().write_text("[" * 100_000),
    "a FIFO": lambda project: fifo(project / NAMES[1]),
    "a new fact file of the site": lambda project: (site_facts() / "own.yaml").write_text("{}"),
    "content of a fact file of the site": lambda project: (site_facts() / "there.yaml").write_text("as_of: 2026-12\n"),
    "another target of the parent's folder": lambda project: relink(project / "elsewhere", project / "copy"),
    "another target of the folder of profiles": lambda project: relink(project / "profiles", project / "profiles-2"),
    "a list in the cache": lambda project: cache_file().write_text("[]"),
}


def replaced_by_link(file: Path) -> None:
    target = file.parent.with_name(file.name)
    file.rename(target)
    file.symlink_to(target)


def in_the_cache(change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(cache_file().read_text())
    change(document)
    cache_file().write_text(json.dumps(document))


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def site_facts() -> Path:
    folder = user_folders.config_file().parent / "facts.d"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def relink(folder: Path, other: Path) -> None:
    """Replace a folder with a link to a copy. All contents and names stay the same."""
    shutil.copytree(folder, other)
    folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.symlink_to(other)


def cache_file() -> Path:
    return install_plan._file("sample")


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_is_made_again(project: Path, change: str) -> None:
    (site_facts() / "there.yaml").write_text("as_of: 2026-11\n")
    install_planner.plan_and_cache("sample")
    assert install_plan.cached("sample") is not None
    CHANGES[change](project)
    assert install_plan.cached("sample") is None


def test_another_folder_has_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_planner.plan_and_cache("sample")
    other = project.with_name("other")
    shutil.copytree(project, other)
    monkeypatch.chdir(other)
    assert install_plan.cached("sample") is None


def test_a_change_of_envbuild_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "repair" / "__pycache__").mkdir(parents=True)
    (package / "repair" / "module.py").write_text("1")
    monkeypatch.setattr(install_plan, "__file__", str(package / "repair" / "install_plan.py"))
    install_planner.plan_and_cache("sample")
    (package / "repair" / "__pycache__" / "module.pyc").write_text("1")
    assert install_plan.cached("sample") is not None, "Python writes bytecode at any time"
    (package / ".#module.py").symlink_to("missing")  # as an editor makes it
    install_planner.plan_and_cache("sample")
    before = (package / "repair" / "module.py").stat()
    (package / "repair" / "module.py").write_text("2")
    os.utime(package / "repair" / "module.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert install_plan.cached("sample") is None, "the time of the inode's change shows it"


def test_the_facts_of_envbuild_count_without_being_listed() -> None:
    """Their states are among those of envbuild's own files. The site's facts are listed, and so are the profiles."""
    own = site_facts() / "there.yaml"
    own.write_text("as_of: 2026-11\n")
    install_planner.plan_and_cache("sample")
    files = json.loads(cache_file().read_text())["files"]
    package = Path(install_plan.__file__).parent.parent
    assert str(own) in files and len(files) == 1 + len(NAMES)
    facts = {path for path, _ in install_plan._own_files(str(package)) if path.startswith(f"{package}/facts/data/")}
    assert facts == {str(file) for file in (package / "facts" / "data").iterdir()}


def test_facts_that_were_read_before_the_plan_count_too(project: Path) -> None:
    """A process reads the site's facts once."""
    own = site_facts() / "there.yaml"
    own.write_text("as_of: 2026-11\n")
    install_planner.plan_and_cache("sample")
    install_planner.plan_and_cache("sample")
    own.write_text("as_of: 2026-12\n")
    assert install_plan.cached("sample") is None


def test_a_file_changed_while_it_was_planned_is_not_cached(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = install_planner.plan_for_lock

    def slow(*arguments: object) -> InstallPlan:
        add_a_line(NAMES[2], project)
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(install_planner, "plan_for_lock", slow)
    install_planner.plan_and_cache("sample")
    assert install_plan.cached("sample") is None


def test_a_profile_is_planned_although_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(atomic_files, "write_atomically", full)
    assert install_planner.plan_and_cache("sample").wheels and install_plan.cached("sample") is None


def test_a_link_to_other_content_counts(project: Path) -> None:
    """The parent is read by the path that its link leads to, so the content at that path does not change."""
    folder, other = project / "elsewhere", project / "other"
    folder.rename(project / "one")
    shutil.copytree(project / "one", other)
    (other / "parent.yaml").write_text(json.dumps({**PROFILE, "env": {"A": "b"}}))
    folder.symlink_to("one")
    install_planner.plan_and_cache("sample")
    assert install_plan.cached("sample") is not None
    folder.unlink()
    folder.symlink_to("other")
    assert install_plan.cached("sample") is None


def test_a_large_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    install_planner.plan_and_cache("sample")
    monkeypatch.setattr(install_plan, "_MOST", cache_file().stat().st_size - 1)
    assert install_plan.cached("sample") is None


def test_a_path_is_not_cached() -> None:
    plan = install_planner.plan_and_cache("profiles/sample.yaml")
    assert plan.profile == "sample"
    assert install_plan.cached("profiles/sample.yaml") is None


def test_an_outdated_lock_is_not_cached(project: Path) -> None:
    install_planner.plan_and_cache("sample")
    (project / NAMES[2]).write_text(json.dumps({**PROFILE, "packages": ["scipy"]}), encoding="utf-8")
    assert install_plan.cached("sample") is None
    with pytest.raises(OutOfDate):
        install_planner.plan_and_cache("sample")
    assert install_plan.cached("sample") is None


def test_requirements_of_a_project_count(project: Path) -> None:
    listed = project / "app" / "requirements.txt"
    listed.parent.mkdir()
    listed.write_text("einops==0.8.0\n")
    loaded = profile_reader_and_overrides.load("sample", wanted=listed)
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, loaded.name, loaded.origin)
    plan = install_planner.plan_and_cache(loaded.name)
    assert "einops==0.8.0" in plan.constraints and install_plan.cached(loaded.name) == plan
    listed.write_text("einops==0.8.1\n")
    assert install_plan.cached(loaded.name) is None
