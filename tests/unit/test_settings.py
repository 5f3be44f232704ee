from __future__ import annotations

import pytest

from envbuild import settings
from envbuild.errors import UsageError


def write(text: str | bytes) -> None:
    file = settings.config_file()
    file.parent.mkdir(parents=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_without_a_file_nothing_is_set() -> None:
    assert settings.setting("debian_mirror") is None


def test_a_setting_is_read() -> None:
    write("debian_mirror: http://mirror.example/debian\n")
    assert settings.setting("debian_mirror") == "http://mirror.example/debian"
    assert settings.setting("debian_snapshot") is None


@pytest.mark.parametrize(
    "text",
    [
        "debian_miror: x\n",
        "debian_mirror: 1\n",
        "debian_mirror: [x]\n",
        "- x\n",
        "plain\n",
        "a: [\n",
        "a: !!python/object:os.system x\n",
        b"a: \xff\n",
        "1: x\n",
        "debian_mirror: 2024-99-99\n",
        "a: !!bool x\n",
        "a: !!timestamp x\n",
        "a: !!int ''\n",
        "a: " + "[" * 600,  # deeper than Python goes
    ],
)
def test_a_file_at_fault_is_named(text: str | bytes) -> None:
    write(text)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        settings.setting("debian_mirror")


def test_folders_are_made_where_the_platform_wants_them() -> None:
    assert settings.cache_folder("wheels").is_dir()
    assert settings.state_folder("evidence").is_dir()
    assert settings.cache_folder("x") != settings.state_folder("x")
