"""Configuration of package indexes: takes the settings of pip and uv on this machine."""

from __future__ import annotations

import ast
import os
import re
import sys
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import requests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from urllib3.util.retry import Retry

from envbuild.facts import database
from envbuild.fetch import uv_config
from envbuild.util import settings
from envbuild.util.errors import SettingsError
from envbuild.util.host_processes import run
from envbuild.util.http_deadlines import Adapter
from envbuild.util.network_settings import Network
from envbuild.util.thread_safe_cache import thread_safe_cache
from envbuild.util.url_redaction import host, redact_url

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse  # since urllib3 2

PARALLEL = 8
_KEPT = 64  # open connections to one host: several locks are made at once, each with PARALLEL requests
PIP_SECONDS = 30.0
_LONGEST_WAIT = 60.0  # seconds


@thread_safe_cache
def _pip() -> Mapping[str, str]:
    """pip's settings for installing, from `pip config list`. The environment takes precedence over [install], and
    [install] over [global].

    Raises ProcessTimeout if pip does not answer in time.
    """
    done = run([sys.executable, "-P", "-m", "pip", "config", "list"], timeout=PIP_SECONDS)
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines() if done.code == 0 else ():
        key, separator, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if separator and section in ranks:
            found[name] = max(found.get(name, (-1, "")), (ranks[section], str(ast.literal_eval(value))))
    return {name: value for name, (_, value) in found.items()}


@thread_safe_cache
def uv_environment() -> dict[str, str]:
    """pip's indexes, find-links, trusted hosts and certificate as variables for uv. uv's own variables are kept: a list
    gets pip's entries in addition, any other variable takes precedence over pip. uv's configuration files stay in
    effect, except settings that one of these variables overrides.

    uv gets them as variables and not as options, because a URL may contain credentials, and every user of the machine
    can read a command line.
    """
    pip = _pip()
    own = os.environ
    found: dict[str, str] = {}
    if "index-url" in pip and not (own.get("UV_DEFAULT_INDEX") or own.get("UV_INDEX_URL")):
        found["UV_DEFAULT_INDEX"] = pip["index-url"]
    if "extra-index-url" in pip:
        found["UV_INDEX"] = " ".join([*own.get("UV_INDEX", "").split(), *pip["extra-index-url"].split()])
        # pip takes the best version from all its indexes; uv by default stops at the first index that has the name.
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


def uv_variables(requirements: Iterable[str]) -> dict[str, str | None]:
    """All changes to the environment for running uv on these requirements; None removes a variable."""
    found = uv_environment()
    pages = torch_pages(requirements)
    if pages:
        links = found.get("UV_FIND_LINKS") or os.environ.get("UV_FIND_LINKS", "")
        found = {**found, "UV_FIND_LINKS": ",".join([*filter(None, [links]), *pages])}
    return uv_config.environment(found)


def uv_options() -> list[str]:
    """uv options for pip settings that have no uv variable."""
    return ["--no-index"] if _pip().get("no-index", "").lower() in ("1", "true", "yes", "on") else []


@thread_safe_cache
def credentials() -> dict[str, tuple[str, str]]:
    """User and password by host and port, from the URLs of the configured indexes and find-links."""
    found: dict[str, tuple[str, str]] = {}
    for address in package_sources():
        parts = urllib.parse.urlsplit(address)
        if parts.username:
            known = (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
            found[host(parts.netloc)] = known
    return found


def certificate() -> str | None:
    """The file of trusted certificates that is configured in pip."""
    return _pip().get("cert")


def package_sources() -> list[str]:
    """The URLs of the indexes, and the pages and folders of find-links, all with credentials. They come from the
    configuration of pip and uv, with pip's default index unless that is replaced or disabled."""
    default, others, links = _places()
    return list(dict.fromkeys([*default, *others, *links]))


def indexes() -> list[str]:
    """Only the indexes, in the order in which uv queries them: the default one is last."""
    default, others, _ = _places()
    return [*others, *default]


def links() -> list[str]:
    """The pages and folders of find-links."""
    return _places()[2]


TORCH_INDEX = "ENVBUILD_TORCH_INDEX"
"""The environment variable that takes precedence over the setting torch_index. --torch-index sets it, so that processes
started by `make` inherit it."""
PYTORCH = "pytorch"


def torch_pages(requirements: Iterable[str]) -> list[str]:
    """The pages of PyTorch's own index, or of a mirror of it, for requirements with a local label, such as
    torch==2.13.0+cpu. Empty unless the user enabled that index. Only such requirements are taken from it.

    Raises SettingsError if the setting is neither `pytorch` nor a URL.
    """
    place = os.environ.get(TORCH_INDEX) or settings.setting("torch_index")
    if not place:
        return []
    known = database.torch_index()
    address = known.address if place == PYTORCH else place
    if "://" not in address:
        raise SettingsError(f"torch_index: {place!r} is invalid", hint=f"set it to {PYTORCH} or the URL of a mirror")
    served = [r for r in map(Requirement, requirements) if canonicalize_name(r.name) in known.packages]
    builds = {(r.name, s.version.partition("+")[2]) for r in served for s in r.specifier if "+" in s.version}
    return [f"{address.replace('{build}', build).rstrip('/')}/{name}/" for name, build in sorted(builds)]


def first_only() -> bool:
    """Whether only the first index that has a package is used: uv's default unless it is configured to search all."""
    variables = {**os.environ, **uv_environment()}
    return str(variables.get("UV_INDEX_STRATEGY") or _uv_file().get("index-strategy") or "first-index") == "first-index"


def _places() -> tuple[list[str], list[str], list[str]]:
    """The default index, the other indexes, and the pages and folders of find-links."""
    variables = {**os.environ, **uv_environment()}
    file = _uv_file()
    named = [index for index in _listed(file.get("index")) if isinstance(index, dict) and not index.get("explicit")]
    default = variables.get("UV_DEFAULT_INDEX") or variables.get("UV_INDEX_URL") or file.get("index-url")
    own_default = [index.get("url") for index in named if index.get("default")]
    links = [*variables.get("UV_FIND_LINKS", "").split(","), *_listed(file.get("find-links"))]
    if uv_options() or file.get("no-index"):
        return [], [], _texts(links)
    others = [
        *variables.get("UV_INDEX", "").split(), *variables.get("UV_EXTRA_INDEX_URL", "").split(),
        *(index.get("url") for index in named if not index.get("default")), *_listed(file.get("extra-index-url")),
    ]  # fmt: skip
    return _texts([default] if default else own_default or _pip_default()), _texts(others), _texts(links)


def _texts(values: list[Any]) -> list[str]:
    """Non-empty texts without duplicates. uv also accepts name=URL; the name is removed. Raises SettingsError for an
    invalid URL."""
    found = (re.sub(r"^[A-Za-z0-9_.-]+=(?=[a-z]+://)", "", text) for text in values if isinstance(text, str) and text)
    return [_valid(address) for address in dict.fromkeys(found)]


def _valid(address: str) -> str:
    try:
        urllib.parse.urlsplit(address)
    except ValueError:  # such as http://[x
        raise SettingsError(
            f"the URL of a package index is invalid: {redact_url(address)}",
            hint="correct it where pip or uv is configured: pip config list, uv.toml, or the variables PIP_* and UV_*",
        ) from None
    return address


def _uv_file() -> dict[str, Any]:
    """The settings in uv's configuration files that concern package sources. Empty if a file is invalid, which is
    reported when uv runs."""
    try:
        return uv_config.site()
    except SettingsError:
        return {}


def _pip_default() -> list[str]:
    """pip's default index, read from pip's source."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return []
    return [PyPI.simple_url]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Retry(Retry):
    """Waits as long as the index requests by its header Retry-After, but at most a minute. urllib3 allows hours."""

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        seconds = super().get_retry_after(response)
        return None if seconds is None else min(seconds, _LONGEST_WAIT)


def index_session(tries: int = 5, limits: Network | None = None) -> requests.Session:
    """A session with proxies, netrc and certificates from the environment, as pip uses them. `tries`: attempts per
    request; `limits`: None for the configured limits."""
    made = requests.Session()
    authorities = certificate()
    if authorities:
        made.verify = authorities
    again = _Retry(total=tries - 1, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
    for scheme in ("http://", "https://"):
        made.mount(scheme, Adapter(limits, max_retries=again if tries > 1 else 0, pool_maxsize=_KEPT))
    return made


@thread_safe_cache
def shared_session() -> requests.Session:
    """One session for all threads, so that they use open connections again. A new connection needs a name lookup and a
    handshake, and reads all certificates."""
    return index_session()
