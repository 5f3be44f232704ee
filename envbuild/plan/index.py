"""The package index as this machine is configured for it: what pip and uv already know is never asked for again."""

from __future__ import annotations

import ast
import os
import sys
import urllib.parse
from collections.abc import Mapping
from functools import cache

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from envbuild.process import run

PARALLEL = 8


@cache
def _pip() -> Mapping[str, str]:
    """pip's own settings for installing, as `pip config list` names them: environment over [install] over [global]."""
    done = run([sys.executable, "-m", "pip", "config", "list"])
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines() if done.code == 0 else ():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in ranks:
            found[name] = max(found.get(name, (-1, "")), (ranks[section], str(ast.literal_eval(value))))
    return {name: value for name, (_, value) in found.items()}


@cache
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


@cache
def credentials() -> dict[str, tuple[str, str]]:
    """User and password by host and port, from the configured indexes' own addresses."""
    settings = {**os.environ, **uv_environment()}
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    found: dict[str, tuple[str, str]] = {}
    for address in " ".join(settings.get(name, "").replace(",", " ") for name in names).split():
        parts = urllib.parse.urlsplit(address.rpartition("=")[2] if "=http" in address else address)
        if parts.username:
            host = parts.netloc.rpartition("@")[2]
            found[host] = (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
    return found


def session() -> requests.Session:
    """Proxies, netrc and certificates as requests finds them in the environment, as pip does."""
    made = requests.Session()
    certificate = _pip().get("cert")
    if certificate:
        made.verify = certificate
    again = Retry(total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
    for scheme in ("http://", "https://"):
        made.mount(scheme, HTTPAdapter(max_retries=again, pool_maxsize=PARALLEL))
    return made
