"""Reads the site settings from `config.yaml` in the user's configuration folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from envbuild.util import user_folders, yaml_and_project_paths
from envbuild.util.errors import Fault, SettingsError, UsageError, near, printable, unknown
from envbuild.util.runner_names import RUNNERS
from envbuild.util.yaml_and_project_paths import Document

T = TypeVar("T")
# A function that validates a section. Its arguments: the section's values in the file, and the values from the command
# line that replace them. It raises UsageError with every fault.
Reader = Callable[[Mapping[str, Any], Mapping[str, str]], T]

# All settings that are strings.
_KNOWN = {
    "on": "where self-tests run: local, slurm or kubernetes",
    "archives": "URL of a store of archives, tried before the profile's own URL; {sha256} stands for the 64 digits",
    "ci_install": "the source from which jobs of `export ci` install envbuild: a commit, or a wheel with its sha256",
    "line": "which line of a GPU `make` builds: current, auto (by the driver), or a CUDA line such as cu12",
    "driver": "the oldest driver of the machines that run the images, used instead of this machine's driver",
    "debian_mirror": "root of a Debian archive, used if apt has none configured",
    "debian_security_mirror": "root of the Debian security archive",
    "git_mirror": "URL used instead of a profile's git URL; {host} and {path} stand for the parts of the profile's URL",
    "public_key": "file with the public key that `verify` trusts",
    "signing_key": "file with the private key that signs evidence",
    "torch_index": "the source of torch's builds such as +cpu: pytorch (PyTorch's own index), or the URL of a mirror",
    "debian_snapshot": "root of a snapshot archive; {timestamp} stands for 20261121T000000Z",
}
FORMS = {
    "line": (re.compile(r"auto|current|cu[0-9]{2}"), "must be auto, current, or a line such as cu12"),
    "driver": (re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}"), 'must be a driver version, as in "550.54.14"'),
}
"""The pattern of a setting's value, and the message for a value that does not match."""
# The settings that are mappings, each validated by its own reader.
_SECTIONS = {
    "slurm": "partition, account, container, ...: runners/slurm/slurm_settings.py",
    "kubernetes": "namespace, registry, nodes, ...: runners/kubernetes/kubernetes_settings.py",
    "network": "deadline, rate, token_services: network_settings.py",
    "extensions": "cache: image/shared_extension_cache.py",
}


HINT = f"known: {', '.join([*_KNOWN, *_SECTIONS])}"


@cache
def settings_document() -> tuple[Document, tuple[Fault, ...]]:
    """The settings file and its faults. Faults that only the reader of a section finds are not included. Raises
    SettingsError if the file cannot be read."""
    file = user_folders.config_file()
    if not file.exists():
        return Document(str(file), {}), ()
    faults: list[Fault] = []
    found = yaml_and_project_paths.read(file, SettingsError, empty=True, faults=faults)
    return found, (*faults, *_faults(found))


def _settings() -> Document:
    found, faults = settings_document()
    if faults:
        raise SettingsError(f"the settings in {found.file} are not valid", faults=faults, hint=HINT)
    return found


def _faults(found: Document) -> Iterator[Fault]:
    for name, value in found.data.items():
        wanted, words = (dict, "a mapping of keys to values") if name in _SECTIONS else (str, "text: put it in quotes")
        if name not in _KNOWN and name not in _SECTIONS:
            yield found.fault((name,), unknown(name, [*_KNOWN, *_SECTIONS]))
        elif not isinstance(value, wanted):
            yield found.fault((name,), "has no value" if value is None else f"must be {words}")
        elif name in FORMS and not FORMS[name][0].fullmatch(str(value)):
            yield found.fault((name,), FORMS[name][1])
        elif name == "on" and value not in RUNNERS:
            meant = near(str(value), RUNNERS)
            message = f"must be one of {', '.join(RUNNERS)}, not {printable(str(value)[:100])!r}"
            yield found.fault((name,), f"{message} ({meant})" if meant else message)


def names() -> tuple[str, ...]:
    """The names of the settings in the file. Raises SettingsError with every fault and its line."""
    return tuple(_settings().data)


def section(name: str) -> dict[str, Any]:
    """The mapping of a section; empty if the section is not set. Raises SettingsError if the file is invalid."""
    assert name in _SECTIONS
    found: dict[str, Any] = _settings().data.get(name, {})
    return found


def read(name: str, reader: Reader[T], given: Mapping[str, str]) -> T:
    """Read a section with its reader. Values from the command line (`given`) replace those in the file. Faults in the
    file get their line.

    Raises SettingsError if all faults are in the file, UsageError if the command line causes one.
    """
    try:
        return reader(section(name), given)
    except UsageError as error:
        own = error.faults if not given else _own(name, reader)
        faults = [placed(name, fault) if fault in own else fault for fault in error.faults]
        kind = SettingsError if all(fault in own for fault in error.faults) else UsageError
        raise kind(error.message, hint=error.hint, faults=faults) from error


def _own(name: str, reader: Reader[T]) -> tuple[Fault, ...]:
    """The faults that the section in the file has without the values from the command line."""
    try:
        reader(section(name), {})
    except UsageError as error:
        return error.faults
    return ()


def placed(name: str, fault: Fault) -> Fault:
    """Add the file and line of its setting to a fault of section `name`. The fault's `field` is a key of the section,
    or KEY.INNER, where INNER may contain dots, as in a label's name."""
    path = (name, *(fault.field or "").split(".", 1))
    return replace(settings_document()[0].fault(path, fault.message), field=".".join(filter(None, path)))


def origins(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """For each value of a valid section, by KEY or KEY.INNER: the file and line, or the command-line option, that sets
    the value."""
    keys: list[str] = []
    for key, value in section(name).items():
        keys += [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
    places = {key: placed(name, Fault("", field=key)) for key in keys}
    return {key: f"{at.file}:{at.line}" for key, at in places.items()} | dict.fromkeys(given, f"--{name}")


def setting(name: str) -> str | None:
    """The value of a setting in _KNOWN; None if it is not set. Raises SettingsError if the file is invalid."""
    assert name in _KNOWN
    value = _settings().data.get(name)
    return str(value) if value is not None else None
