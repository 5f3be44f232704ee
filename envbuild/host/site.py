"""The site's settings, read whole: what every command would say of them, at once, whatever else is wrong there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from envbuild import network, settings
from envbuild.document import display
from envbuild.errors import EnvbuildError, Fault, SettingsError, UsageError
from envbuild.host.model import Site, clean
from envbuild.plan import facts
from envbuild.proof.runners.kubernetes import site as kubernetes
from envbuild.proof.runners.slurm import site as slurm

_SECTIONS: dict[str, Callable[[Any, Any, Any], object]] = {
    "slurm": slurm.parse,
    "kubernetes": kubernetes.parse,
    "network": lambda section, given, _: network.parse(section, given),
}
_KEYS = ("signing_key", "public_key")


def read() -> Site:
    """Raises FactsError where a site's own facts are at fault."""
    name = display(settings.config_file())
    try:
        found = faults()
        document, above = settings.whole()
    except SettingsError as error:
        told = [str(fault) for fault in error.faults] or [error.message]
        return Site(name, (), tuple(clean(text, 400) for text in told), error.hint)
    names = () if above else tuple(document.data)
    return Site(name, names, tuple(clean(str(fault), 400) for fault in found), settings.HINT if above else None)


def faults() -> list[Fault]:
    """Raises SettingsError where the file cannot be read, FactsError."""
    knows = facts.gpus().__contains__
    document, above = settings.whole()
    found = [*above, *_keys(document.data)]
    for section, parse in _SECTIONS.items():
        value = document.data.get(section)
        try:
            if isinstance(value, dict):
                parse(value, {}, knows)
        except UsageError as error:
            found += [settings.placed(section, fault) for fault in error.faults]
    return found


def complete(error: SettingsError) -> None:
    """What a command met in the file first is told with all else that is wrong there."""
    file = display(settings.config_file())
    if error.faults and all(fault.file == file for fault in error.faults):
        try:
            error.faults = tuple(dict.fromkeys([*error.faults, *faults()]))
        except EnvbuildError:
            return  # nothing more can be read


def _keys(data: dict[str, Any]) -> Iterator[Fault]:
    for name in _KEYS:
        file = data.get(name)
        try:
            missing = isinstance(file, str) and not Path(file).expanduser().is_file()
        except (ValueError, RuntimeError, OSError):  # a NUL in its path; ~ of a user that there is not; too long
            missing = True
        if missing:
            yield settings.placed(name, Fault(f"there is no file {file}"))
