"""What a site sets once: `config.yaml` in the user's configuration folder, and the folders envbuild keeps things in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from envbuild.errors import UsageError

_APP = "envbuild"


def config_file() -> Path:
    return Path(platformdirs.user_config_dir(_APP)) / "config.yaml"


def cache_folder(kind: str, make: bool = True) -> Path:
    """Things that can be made or fetched again: wheels, debs, bases. `make`: the folder, where it is not there."""
    return _made(Path(platformdirs.user_cache_dir(_APP)) / kind, make)


def state_folder(kind: str, make: bool = True) -> Path:
    """Things that cannot: evidence, build records. Never removed by envbuild."""
    return _made(Path(platformdirs.user_state_dir(_APP)) / kind, make)


def _made(folder: Path, make: bool) -> Path:
    """What only reads need not make it: a full disk has no room for a folder either."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


# Every setting there is; each a string, but for the sections.
_KNOWN = {
    "on": "where self-tests run: local, slurm or kubernetes",
    "archives": "where archives lie, asked before a profile's own address; {sha256} stands for the 64 digits",
    "debian_mirror": "root of a Debian archive, where apt has none configured",
    "debian_security_mirror": "root of the Debian security archive",
    "git_mirror": "where git repositories lie, asked instead of a profile's address; {host} and {path} are parts of it",
    "public_key": "file of the public key that `verify` trusts",
    "signing_key": "file of the private key that evidence is signed with",
    "debian_snapshot": "root of a snapshot archive; {timestamp} stands for 20261121T000000Z",
}
# Mappings, whose content its own reader judges.
_SECTIONS = {
    "slurm": "partition, account, container, ...: proof/runners/slurm/site.py",
    "kubernetes": "namespace, registry, nodes, ...: proof/runners/kubernetes/site.py",
}


class _Loader(yaml.SafeLoader):
    """Whole numbers are decimal, as in YAML 1.2: 1:30:00 and 0012 are texts, no numbers of base 60 and 8."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [known for known in every if known[0] != "tag:yaml.org,2002:int"]
        for first, every in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]*)\Z"), list("-0123456789"))


@cache
def _settings() -> dict[str, Any]:
    file = config_file()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    try:
        data = yaml.load(text, _Loader) or {}  # noqa: S506 (of the safe one)
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # !!bool x, !!timestamp x
        raise UsageError(f"{file} is not valid YAML: {error}") from error
    if isinstance(data, dict):  # YAML 1.1 takes the word `on` for a truth
        data = {"on" if key is True else key: value for key, value in data.items()}
    hint = f"settings: {', '.join([*_KNOWN, *_SECTIONS])}"
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{file} must map settings to text", hint=hint)
    unknown = sorted(set(data) - set(_KNOWN) - set(_SECTIONS))
    if unknown:
        raise UsageError(f"{file}: unknown setting {', '.join(unknown)}", hint=hint)
    for name, value in data.items():
        wanted, words = (dict, "a mapping") if name in _SECTIONS else (str, "text")
        if not isinstance(value, wanted):
            raise UsageError(f"{file}: {name} must be {words}", hint=hint)
    return data


def section(name: str) -> dict[str, Any]:
    """A site's mapping of that name, empty where there is none. Raises UsageError if the file is at fault."""
    assert name in _SECTIONS
    found: dict[str, Any] = _settings().get(name, {})
    return found


def setting(name: str) -> str | None:
    """A site's value for one of the known settings, or None. Raises UsageError if the file is at fault."""
    assert name in _KNOWN
    value = _settings().get(name)
    return str(value) if value is not None else None
