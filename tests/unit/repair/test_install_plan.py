"""The cached plan of `install` is used only while nothing that it was made from has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from envbuild.lock import lock_file
from envbuild.repair import install_plan, install_planner
from envbuild.repair.install_plan import InstallPlan
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
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
    assert install_plan.cached("base") is None


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
    "a list in the cache": lambda project: cache_file().write_text("[]"),
}


def replaced_by_link(file: Path) -> None:
    target = file.parent.with_name(file.name)
    file.rename(target)
    file.symlink_to(target)


def cache_file() -> Path:
    return install_plan._file("sample")


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_is_made_again(project: Path, change: str) -> None:
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
    (package / "repair" / "module.py").write_text("12")
    assert install_plan.cached("sample") is None


def test_a_file_changed_while_it_was_planned_is_not_cached(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = install_planner.plan_for_lock

    def slow(*arguments: object) -> InstallPlan:
        add_a_line(NAMES[2], project)
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(install_planner, "plan_for_lock", slow)
    install_planner.plan_and_cache("sample")
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
