"""The site's part of uv's configuration, and the settings that are left out."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch import index_config, uv_config
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock import lock_file
from envbuild.util.errors import SettingsError
from unit.conftest import forget
from unit.support import PROFILE, envbuild, lock_for, plan_of, quick_pip, wheel


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The configuration files of the user and of the system."""
    monkeypatch.delenv("UV_NO_CONFIG")
    found = []
    for name, variable in (("user", "XDG_CONFIG_HOME"), ("system", "XDG_CONFIG_DIRS")):
        monkeypatch.setenv(variable, str(tmp_path / name))
        (tmp_path / name / "uv").mkdir(parents=True)
        found.append(tmp_path / name / "uv" / "uv.toml")
    return found[0], found[1]


def given(folder: Path) -> dict[str, Any]:
    """Return the configuration file that is passed to uv."""
    options = uv_config.config_options(folder)
    assert options[:2] == ["--no-config", "--config-file"]
    return tomllib.loads(Path(options[2]).read_text(encoding="utf-8"))


def test_without_a_site_file_uv_has_no_configuration(homes: tuple[Path, Path], tmp_path: Path) -> None:
    assert uv_config.config_options(tmp_path) == ["--no-config"]


def test_only_indexes_and_how_to_reach_them_are_kept(homes: tuple[Path, Path], tmp_path: Path) -> None:
    user, system = homes
    user.write_text(
        'find-links = ["own", "https://a.example/x"]\nsystem-certs = true\nexclude-newer = "2024-01-01"\n'
        'sources = {alpha = {index = "x"}}\n[[index]]\nname = "q\\"é"\nurl = "./local"\nauthenticate = "never"\n'
        '[pip]\nindex-strategy = "first-index"\nresolution = "lowest"\n',
        encoding="utf-8",
    )
    system.write_text('find-links = ["/all"]\nindex-strategy = "unsafe-best-match"\n', encoding="utf-8")
    assert given(tmp_path) == {
        "index-strategy": "first-index",
        "find-links": [str(user.parent / "own"), "https://a.example/x", "/all"],
        "system-certs": True,
        "index": [{"name": 'q"é', "url": str(user.parent / "local"), "authenticate": "never"}],
    }
    assert list(uv_config.ignored_by_uv_config([])) == [
        f"{user}: these settings of uv are ignored: exclude-newer, sources, pip.resolution; {uv_config.INSTEAD}"
    ]


def test_the_copy_is_for_the_user_alone(
    homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_pip(monkeypatch)
    homes[0].write_text('index-url = "https://me:secret@a.example/simple"\n', encoding="utf-8")
    given(tmp_path)
    assert (tmp_path / "uv.toml").stat().st_mode & 0o777 == 0o600
    forget()
    assert index_config.credentials() == {"a.example": ("me", "secret")}


def test_a_site_file_that_cannot_be_read_is_named(homes: tuple[Path, Path], tmp_path: Path) -> None:
    homes[0].write_text("no toml [", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"uv\.toml cannot be read"):
        uv_config.config_options(tmp_path)


def test_variables_are_kept_by_name_and_paths_are_absolute(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "UV_INDEX": "team=https://a.example/s ./local",
        "UV_INDEX_TEAM_PASSWORD": "secret",
        "UV_FIND_LINKS": "links,/all",
        "SSL_CERT_FILE": "own.pem",
        "UV_OVERRIDE": "x.txt",
        "UV_PROJECT": "/elsewhere",
        "UV_WORKING_DIR": "/elsewhere",
    }.items():
        monkeypatch.setenv(name, value)
    found = uv_config.environment({"UV_DEFAULT_INDEX": "https://b.example/s"})
    assert found["UV_INDEX"] == f"team=https://a.example/s {project}/local"
    assert found["UV_FIND_LINKS"] == f"{project}/links,/all"
    assert found["SSL_CERT_FILE"] == f"{project}/own.pem"
    assert found["UV_DEFAULT_INDEX"] == "https://b.example/s"
    assert "UV_INDEX_TEAM_PASSWORD" not in found  # as it is in this process
    assert {name for name, value in found.items() if value is None} == {
        "UV_OVERRIDE", "UV_PROJECT", "UV_WORKING_DIR", "UV_NO_CONFIG", "UV_PYTHON_DOWNLOADS",
    }  # fmt: skip


def test_a_pyproject_without_settings_that_choose_is_not_reported(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.uv]\npackage = true\n", encoding="utf-8")
    assert list(uv_config.ignored_by_uv_config([project])) == []
    (project / "pyproject.toml").write_text("[tool", encoding="utf-8")
    assert list(uv_config.ignored_by_uv_config([project])) == []


def test_show_says_required_by_torch_only_of_what_torch_requires(project: Path) -> None:
    """The lock has a different cuDNN than torch requires, by an override in the working folder."""
    made = lock_for(plan_of(project, {**PROFILE, "torch": "2.7.1", "gpus": ["h20"], "packages": [], "apt": []}))
    held = [wheel("nvidia-cublas-cu12", "12.6.4.1"), wheel("nvidia-cudnn-cu12", "9.1.0.70")]
    more = tuple(LockedWheel(one, 1_000, lock_file.SMALL) for one in held)
    file = project / "profiles" / "sample.lock.yaml"
    lock_file.write(dataclasses.replace(made, wheels=(*more, *made.wheels)), file, "sample")
    document = envbuild("show", "sample", "--json").document
    assert document["pins"]["cudnn"] == "9.1.0.70"
    assert document["reasons"]["cudnn"] == "locked, though torch 2.7.1 requires ==9.5.1.17"
    assert document["reasons"]["cublas"] == "required by torch 2.7.1"
