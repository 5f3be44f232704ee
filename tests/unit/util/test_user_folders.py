"""The user's folders never depend on the working folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from envbuild.util import user_folders
from envbuild.util.errors import SystemFault

FOLDERS: list[Callable[[], Path]] = [
    user_folders.config_file,
    lambda: user_folders.cache_folder("wheels"),
    lambda: user_folders.state_folder("evidence"),
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_relative_home_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path]
) -> None:
    """Python returns "~/.cache" if HOME is not set and the user id has no name, as in some containers. Another user
    may have made the folder "~" in the working folder, with a plan of `install` in its cache."""
    monkeypatch.chdir(tmp_path)
    for kind in ("CACHE", "STATE", "CONFIG", "DATA"):
        monkeypatch.delenv(f"XDG_{kind}_HOME")
    monkeypatch.setenv("HOME", "~")
    with pytest.raises(SystemFault, match="relative: ~/") as caught:
        folder()
    assert "set HOME" in (caught.value.hint or "") and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder().is_relative_to(tmp_path)
