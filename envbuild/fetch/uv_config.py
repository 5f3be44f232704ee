"""Gives uv only the settings of its configuration that concern package sources, and none that changes a resolution.

By default, uv reads uv.toml and `[tool.uv]` of the working folder or the nearest parent that has one, so an override
there would change a lock unnoticed. Therefore uv runs with --no-config in a temporary folder. From the user's and the
system's uv.toml and the UV_* variables it gets only the settings for indexes, find-links, credentials, certificates,
proxies, connections and caches.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild.util.errors import SettingsError
from envbuild.util.yaml_and_project_paths import display, regular

MAX_BYTES = 1_000_000
_INDEXES = ("index", "index-url", "extra-index-url", "no-index", "find-links", "index-strategy")
_SITE = frozenset({
    *_INDEXES, "keyring-provider", "allow-insecure-host", "system-certs", "native-tls", "http-proxy", "https-proxy",
    "no-proxy", "offline", "cache-dir", "no-cache", "concurrent-downloads",
})  # fmt: skip
_VARIABLES = re.compile(
    r"UV_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|INDEX_STRATEGY"
    r"|INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)|KEYRING_PROVIDER|CREDENTIALS_DIR|INSECURE_HOST|SYSTEM_CERTS|NATIVE_TLS"
    r"|OFFLINE|HTTP_TIMEOUT|REQUEST_TIMEOUT|HTTP_CONNECT_TIMEOUT|HTTP_RETRIES|CACHE_DIR|NO_CACHE|LOCK_TIMEOUT"
    r"|CONCURRENT_DOWNLOADS|CONCURRENT_CACHE_READS)"
)
# Settings that change which versions are chosen: a warning is shown when they are ignored.
_CHOOSING = frozenset({
    *_INDEXES, "override-dependencies", "constraint-dependencies", "exclude-dependencies", "dependency-metadata",
    "sources", "exclude-newer", "exclude-newer-package", "prerelease", "resolution", "fork-strategy", "torch-backend",
    "no-binary", "no-binary-package",
})  # fmt: skip
_CHOOSING_VARIABLES = (
    "UV_OVERRIDE", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_EXCLUDE_NEWER", "UV_EXCLUDE_NEWER_PACKAGE", "UV_PRERELEASE",
    "UV_RESOLUTION", "UV_FORK_STRATEGY", "UV_TORCH_BACKEND", "UV_NO_BINARY", "UV_NO_BINARY_PACKAGE",
)  # fmt: skip
INSTEAD = (
    "set versions in the profile, under packages: or pins:, and indexes in pip's configuration or the user's uv.toml "
    "(docs/profiles.md)"
)
_SEPARATORS = {"UV_FIND_LINKS": ",", "UV_INDEX": None, "UV_EXTRA_INDEX_URL": None}
_SINGLE = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_CACHE_DIR", "UV_CREDENTIALS_DIR", "SSL_CERT_FILE", "NETRC")


def config_options(folder: Path) -> list[str]:
    """uv's options that limit its configuration to the result of `site`, which is written to a file in `folder`.

    Raises SettingsError if the user's or the system's uv.toml cannot be read.
    """
    found = site()
    if not found:
        return ["--no-config"]
    file = folder / "uv.toml"
    file.touch(mode=0o600)  # an index URL may contain a password
    file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in found.items()), encoding="utf-8")
    return ["--no-config", "--config-file", str(file)]


def environment(more: Mapping[str, str]) -> dict[str, str | None]:
    """Changes to this process's environment for uv: adds `more`, makes paths absolute, and removes all UV_* variables
    except those in _VARIABLES, because others may change a resolution. A value of None removes the variable."""
    found: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith("UV_") and not _VARIABLES.fullmatch(name)
    }
    own = {name: os.environ[name] for name in (*_SEPARATORS, *_SINGLE) if os.environ.get(name)}
    for name, value in {**own, **more}.items():
        if name in _SEPARATORS:
            separator = _SEPARATORS[name]
            found[name] = (separator or " ").join(rooted(one, Path.cwd()) for one in value.split(separator) if one)
        else:
            found[name] = rooted(value, Path.cwd()) if name in _SINGLE else value
    return found


def rooted(place: str, folder: Path) -> str:
    """Return a URL unchanged, or a path made absolute with `folder`. NAME=URL and NAME=PATH, which uv accepts too, keep
    their name."""
    name, address = re.fullmatch(r"([A-Za-z0-9_.-]+=)?(.*)", place, re.DOTALL).groups("")  # type: ignore[union-attr]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", address):
        return place
    path = os.path.expanduser(address)  # noqa: PTH111 - Path.expanduser raises an error for an unknown ~user
    return f"{name}{os.path.normpath(folder / path)}"


def site() -> dict[str, Any]:
    """The settings of _SITE in the user's and the system's uv.toml: of indexes, of access to them and of uv's cache.
    The user's take precedence, and in a list they come first.

    Raises SettingsError if one of them cannot be read.
    """
    found: dict[str, Any] = {}
    for file in _files():
        data = _read(file)
        pip = data.get("pip")
        for part in (pip if isinstance(pip, dict) else {}, data):  # `uv pip` prefers its own section
            for key, value in part.items():
                if key in _SITE:
                    value = _rooted(key, value, file.parent)
                    both = isinstance(value, list) and isinstance(found.get(key), list)
                    found[key] = [*found[key], *value] if both else found.get(key, value)
    return found


def _files() -> Iterator[Path]:
    """The files that uv reads: the one named by UV_CONFIG_FILE, otherwise the user's and the system's. None of them if
    UV_NO_CONFIG is set."""
    if os.environ.get("UV_NO_CONFIG", "").lower() in ("1", "true", "t", "yes", "y", "on"):
        return
    if named := os.environ.get("UV_CONFIG_FILE"):
        yield Path(named)
        return
    folders = [os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"]
    system = [*(os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep), "/etc"]
    for place in (folders, [] if os.environ.get("UV_NO_SYSTEM_CONFIG") else system):
        yield from [file for folder in place if (file := Path(folder) / "uv" / "uv.toml").is_file()][:1]


def _read(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"{display(file)} cannot be read: {why}", hint="this file configures uv's indexes"
        ) from None


def _parsed(file: Path) -> dict[str, Any]:
    raw = regular(file, MAX_BYTES)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    return tomllib.loads(raw.decode("utf-8-sig"))


def _rooted(key: str, value: Any, folder: Path) -> Any:
    """Resolve relative paths from the configuration file's folder, as uv does."""
    if key in ("index-url", "cache-dir") and isinstance(value, str):
        return rooted(value, folder)
    if key in ("find-links", "extra-index-url") and isinstance(value, list):
        return [rooted(one, folder) if isinstance(one, str) else one for one in value]
    if key == "index" and isinstance(value, list):
        return [_rooted_index(one, folder) if isinstance(one, dict) else one for one in value]
    return value


def _rooted_index(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        key: rooted(value, folder) if key == "url" and isinstance(value, str) else value for key, value in entry.items()
    }


def _toml(value: Any) -> str:
    """A setting's value as TOML: strings, numbers and booleans are written as in JSON."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def ignored_by_uv_config(folders: Iterable[Path]) -> Iterator[str]:
    """Sentences about settings that uv would use and envbuild ignores: their names, and what to do instead. One
    sentence for each file, and one for the environment. `folders`: where uv looks for a project's configuration.

    Raises SettingsError if the user's or the system's uv.toml cannot be read.
    """
    found = dict(filter(None, map(_project, folders)))
    found |= {file: keys for file in _files() for keys in [_choosing(_read(file), _CHOOSING - _SITE)] if keys}
    for file, keys in found.items():
        yield f"{display(file)}: these settings of uv are ignored: {', '.join(keys)}; {INSTEAD}"
    variables = [name for name in _CHOOSING_VARIABLES if os.environ.get(name)]
    if variables:
        yield f"environment: these variables are ignored: {', '.join(variables)}; {INSTEAD}"


def _project(folder: Path) -> tuple[Path, list[str]] | None:
    """The file that uv would use as project configuration, and its keys that change a resolution; None if it has no
    such keys."""
    site_files = [file.absolute() for file in _files()]
    for place in (folder.absolute(), *folder.absolute().parents):
        for file in (place / "uv.toml", place / "pyproject.toml"):
            try:
                data = _parsed(file) if file.is_file() and file not in site_files else {}
                found = data if file.name == "uv.toml" else data.get("tool", {}).get("uv", {})
                keys = _choosing(found, _CHOOSING)
            except (OSError, ValueError, RecursionError, AttributeError):  # unreadable, or not a configuration
                continue
            if found:
                return (file, keys) if keys else None
    return None


def _choosing(settings: dict[str, Any], keys: frozenset[str]) -> list[str]:
    pip = settings.get("pip")
    inner = pip.keys() if isinstance(pip, dict) else ()
    return [*sorted(keys & settings.keys()), *(f"pip.{key}" for key in sorted(keys.intersection(inner)))]
