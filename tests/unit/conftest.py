"""Every test has its own folders and none of the machine's settings."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envbuild.registry import blob_uploads

_FOREIGN = ("PIP_", "UV_", "DOCKER_", "XDG_", "ENVBUILD_", "SSL_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC")
_NUMBERS = itertools.count()
# Modules whose caches are kept: their content depends only on the facts, or the site's files are their key.
_FIXED = ("envbuild.facts.", "envbuild.explain.", "envbuild.testrun.selftest_job", "envbuild.registry.tls_context")


@functools.cache
def _remembering(module: ModuleType) -> list[Any]:
    """Return the functions of a module that cache their results."""
    return [value for value in vars(module).values() if hasattr(value, "cache_clear")]


@functools.lru_cache(maxsize=1)
def _all_remembering(modules: int) -> list[Any]:
    """Return all functions that `forget` clears. `modules`: the number of loaded modules. Before most tests it is the
    number before the previous test, and a search takes longer than many tests."""
    found = list(sys.modules.items())
    package = [module for name, module in found if name.startswith("envbuild.") and not name.startswith(_FIXED)]
    return [function for module in package for function in _remembering(module)]


def forget() -> None:
    """Clear the package's caches of the machine's configuration; the facts never change."""
    for function in _all_remembering(len(sys.modules)):
        function.cache_clear()


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # not next to tmp_path, whose name pytest finds by listing the folder
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(_NUMBERS))
    home.mkdir(parents=True)
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name in _PROXIES or name.lower() in _PROXIES:
            monkeypatch.delenv(name)
    for kind in ("CACHE", "STATE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "docker"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    # shared, because uv queries each Python only once; its cache of packages is keyed by URL
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setattr(blob_uploads, "PAUSES", (0, 0, 0))
    forget()
    yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, which is the working folder."""
    folder = tmp_path / "project"
    (folder / "profiles").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder
