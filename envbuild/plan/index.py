"""The package index as this machine is configured for it: what pip and uv already know is never asked for again."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from envbuild.once import once
from envbuild.plan.addresses import host
from envbuild.process import run

PARALLEL = 8
PIP_SECONDS = 30.0


@once
def _pip() -> Mapping[str, str]:
    """pip's own settings for installing, as `pip config list` names them: environment over [install] over [global].

    Raises ProcessTimeout where pip does not start.
    """
    done = run([sys.executable, "-m", "pip", "config", "list"], timeout=PIP_SECONDS)
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines() if done.code == 0 else ():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in ranks:
            found[name] = max(found.get(name, (-1, "")), (ranks[section], str(ast.literal_eval(value))))
    return {name: value for name, (_, value) in found.items()}


@once
def uv_environment() -> dict[str, str]:
    """pip's indexes, find-links and certificate as uv's variables; what uv itself is configured with stays in force.

    Variables and not options: an address may hold credentials, and every user can read a command line.
    """
    pip = _pip()
    own = os.environ
    found: dict[str, str] = {}
    if "index-url" in pip and not (own.get("UV_DEFAULT_INDEX") or own.get("UV_INDEX_URL")):
        found["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "extra-index-url" in pip:
        found["UV_INDEX"] = " ".join([*own.get("UV_INDEX", "").split(), *pip["extra-index-url"].split()])
        # pip takes the best version of all its indexes; uv would stop at the first that has the name.
        found.setdefault("UV_INDEX_STRATEGY", own.get("UV_INDEX_STRATEGY", "unsafe-best-match"))
    if "find-links" in pip:
        found["UV_FIND_LINKS"] = ",".join(
            [*filter(None, own.get("UV_FIND_LINKS", "").split(",")), *pip["find-links"].split()]
        )
    if "trusted-host" in pip:
        found["UV_INSECURE_HOST"] = " ".join([*own.get("UV_INSECURE_HOST", "").split(), *pip["trusted-host"].split()])
    if "cert" in pip and "SSL_CERT_FILE" not in own:
        found["SSL_CERT_FILE"] = pip["cert"]
    return found


def uv_options() -> list[str]:
    """What of pip's configuration uv has no variable for."""
    return ["--no-index"] if _pip().get("no-index", "").lower() in ("1", "true", "yes", "on") else []


@once
def credentials() -> dict[str, tuple[str, str]]:
    """User and password by host and port, from the configured indexes' own addresses."""
    settings = {**os.environ, **uv_environment()}
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    found: dict[str, tuple[str, str]] = {}
    for address in " ".join(settings.get(name, "").replace(",", " ") for name in names).split():
        parts = urllib.parse.urlsplit(address.rpartition("=")[2] if "=http" in address else address)
        if parts.username:
            known = (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
            found[host(parts.netloc)] = known
    return found


def certificate() -> str | None:
    """The file of authorities that pip is configured with."""
    return _pip().get("cert")


def addresses() -> list[str]:
    """The indexes, pages and folders that packages are taken from, credentials included: those of pip and of uv, and
    pip's own default where none replaces it. Nothing where pip may ask no index and knows no page or folder."""
    told = {**os.environ, **uv_environment()}
    file = _uv_file()
    default = told.get("UV_DEFAULT_INDEX") or told.get("UV_INDEX_URL") or file.get("index-url")
    named = [index for index in _listed(file.get("index")) if isinstance(index, dict)]
    own_default = any(index.get("default") for index in named)
    found = [] if uv_options() else [
        *([default] if default else [] if own_default else _pip_default()),
        *told.get("UV_INDEX", "").split(), *told.get("UV_EXTRA_INDEX_URL", "").split(),
        *(index.get("url") for index in named), *_listed(file.get("extra-index-url")),
    ]  # fmt: skip
    found += [*told.get("UV_FIND_LINKS", "").split(","), *_listed(file.get("find-links"))]
    # uv takes name=address as well
    return list(
        dict.fromkeys(
            re.sub(r"^[A-Za-z0-9_.-]+=(?=[a-z]+://)", "", text) for text in found if isinstance(text, str) and text
        )
    )


def _pip_default() -> list[str]:
    """What pip asks where nobody tells it otherwise, in pip's own words."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return []
    return [PyPI.simple_url]


def _uv_file() -> dict[str, Any]:
    """uv's own settings: the file that UV_CONFIG_FILE names, else the user's over the system's."""
    if os.environ.get("UV_NO_CONFIG"):
        return {}
    user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "uv" / "uv.toml"
    named = os.environ.get("UV_CONFIG_FILE")
    found: dict[str, Any] = {}
    for file in [Path(named)] if named else [Path("/etc/uv/uv.toml"), user]:
        try:
            found |= tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # uv itself says what is wrong with it
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def session(tries: int = 5) -> requests.Session:
    """Proxies, netrc and certificates as requests finds them in the environment, as pip does."""
    made = requests.Session()
    certificate = _pip().get("cert")
    if certificate:
        made.verify = certificate
    if tries == 1:
        return made
    again = Retry(total=tries - 1, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
    for scheme in ("http://", "https://"):
        made.mount(scheme, HTTPAdapter(max_retries=again, pool_maxsize=PARALLEL))
    return made
