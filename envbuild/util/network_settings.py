"""Reads the settings section `network`: limits of HTTP requests, and hosts that may receive a registry's
credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from envbuild.util import settings
from envbuild.util.errors import Fault, UsageError, printable, unknown

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Network:
    """The settings section `network`. `deadline` (seconds) and `rate` (bytes per second): the limits that
    http_deadlines explains. `token_services`: for each registry, a host of a different domain that may receive the
    registry's credentials. Registry and host are HOST or HOST:PORT."""

    deadline: int = 120
    rate: int = 10_000
    token_services: Mapping[str, str] = field(default_factory=dict)


_NUMBERS = {"deadline": (86_400, "seconds"), "rate": (10**9, "bytes per second")}
KNOWN = (*_NUMBERS, "token_services")


def configured_limits() -> Network:
    """Return the limits from config.yaml. Raises SettingsError if the file is invalid."""
    return settings.read("network", parse, {})


def parse(found: Mapping[str, Any], given: Mapping[str, str]) -> Network:
    """Validate the section. Raises UsageError with every fault. `given` is always empty: no command-line option changes
    this section."""
    faults = [Fault(unknown(str(key), KNOWN), field=printable(str(key)[:100])) for key in found if key not in KNOWN]
    for key, (most, unit) in _NUMBERS.items():
        value = found.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            faults.append(Fault(f"must be a number of {unit} from 1 to {most}", field=key))
    services = found.get("token_services", {})
    if not isinstance(services, Mapping) or not all(map(_is_host, (*services, *services.values()))):
        faults.append(Fault("must be a mapping of HOST[:PORT] to HOST[:PORT]", field="token_services"))
    if faults:
        raise UsageError("invalid network settings", faults=faults, hint=f"known: {', '.join(KNOWN)}")
    return Network(**found)


def _is_host(value: object) -> bool:
    """Whether a value is HOST or HOST:PORT. The pattern also matches invalid ports and IPv6 addresses, for which urllib
    raises ValueError."""
    try:
        return isinstance(value, str) and _HOST.fullmatch(value) is not None and urlsplit(f"//{value}").port != 0
    except ValueError:
        return False
