"""Validates all settings of the site, and collects the errors that commands would report one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from envbuild.doctor.machine_readings import SiteReading, clean
from envbuild.facts import database
from envbuild.image import shared_extension_cache
from envbuild.image.shared_extension_cache import SharedFolder
from envbuild.runners.kubernetes import kubernetes_settings
from envbuild.runners.slurm import slurm_settings
from envbuild.util import network_settings, settings, user_folders
from envbuild.util.errors import EnvbuildError, Fault, SettingsError, UsageError
from envbuild.util.yaml_and_project_paths import display

_SECTIONS: dict[str, Callable[[Any, Any, Any], object]] = {
    "slurm": slurm_settings.parse,
    "kubernetes": kubernetes_settings.parse,
    "network": lambda section, given, _: network_settings.parse(section, given),
    "extensions": lambda section, given, _: shared_extension_cache.parse(section, given),
}
_KEYS = ("signing_key", "public_key")


def read() -> SiteReading:
    """Read the settings file and validate it. Raises FactsError if the site's own facts are invalid."""
    name = display(user_folders.config_file())
    try:
        found = site_faults()
        document, above = settings.settings_document()
    except SettingsError as error:
        messages = [str(fault) for fault in error.faults] or [error.message]
        return SiteReading(name, (), tuple(clean(text, 400) for text in messages), error.hint)
    names = () if above else tuple(document.data)
    faults = tuple(clean(str(fault), 400) for fault in found)
    cache = None if faults else shared_extension_cache.configured_cache()
    fault = cache.fault() if isinstance(cache, SharedFolder) else None
    return SiteReading(
        name, names, faults, settings.HINT if above else None, tuple(_with_registry(document.data)),
        clean(fault, 400) if fault else None,
    )  # fmt: skip


def _with_registry(data: dict[str, Any]) -> Iterator[str]:
    """Yields the clusters whose registry is set: images for them can be built without an engine on this machine."""
    for cluster in ("slurm", "kubernetes"):
        section = data.get(cluster)
        if isinstance(section, dict) and section.get("registry"):
            yield cluster


def site_faults() -> list[Fault]:
    """Return all errors in the settings. Raises SettingsError if the file cannot be read, and FactsError if the site's
    own facts are invalid."""
    knows = database.gpus().__contains__
    document, above = settings.settings_document()
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
    """If all faults of `error` are in the settings file, add the file's other faults that `site_faults` finds. An error
    without faults, or with a fault elsewhere, stays as it is."""
    file = display(user_folders.config_file())
    if error.faults and all(fault.file == file for fault in error.faults):
        try:
            error.faults = tuple(dict.fromkeys([*error.faults, *site_faults()]))
        except EnvbuildError:
            return  # the file cannot be read any further


def _keys(data: dict[str, Any]) -> Iterator[Fault]:
    for name in _KEYS:
        file = data.get(name)
        try:
            missing = isinstance(file, str) and not Path(file).expanduser().is_file()
        except (ValueError, RuntimeError, OSError):  # a NUL in the path; ~ of an unknown user; a path that is too long
            missing = True
        if missing:
            if "-----BEGIN" in str(file):
                fault = "contains a key, not the path of a file"
            elif name == "signing_key":  # never shown, because it may be a private key in any notation
                fault = "must be the path of a file with a private key: no such file"
            else:
                fault = f"file not found: {file}"
            yield settings.placed(name, Fault(fault))
