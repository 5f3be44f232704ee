"""The site's settings, read whole: what every command would say of them, at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from envbuild import settings
from envbuild.document import display
from envbuild.errors import EnvbuildError, Fault
from envbuild.host.model import Site, clean
from envbuild.plan import facts
from envbuild.proof.runners.kubernetes import site as kubernetes
from envbuild.proof.runners.slurm import site as slurm

_SECTIONS = {"slurm": slurm.parse, "kubernetes": kubernetes.parse}
_KEYS = ("signing_key", "public_key")


def read() -> Site:
    """Raises FactsError where a site's own facts are at fault."""
    known = facts.gpus().__contains__
    name = display(settings.config_file())
    try:
        names = settings.names()
    except EnvbuildError as error:
        told = [str(fault) for fault in error.faults] or [error.message]
        return Site(name, (), tuple(clean(text, 400) for text in told), error.hint)
    found: list[Fault] = list(_keys())
    for section, parse in _SECTIONS.items():
        try:
            settings.read(section, partial(parse, knows=known), {})
        except EnvbuildError as error:
            found += error.faults
    return Site(name, names, tuple(clean(str(fault), 400) for fault in found))


def _keys() -> Iterator[Fault]:
    for name in _KEYS:
        file = settings.setting(name)
        try:
            missing = file is not None and not Path(file).expanduser().is_file()
        except (ValueError, RuntimeError):  # a NUL in its path; ~ of a user that there is not
            missing = True
        if missing:
            yield settings.placed(name, Fault(f"there is no file {file}"))
