"""Configures the official client from kubectl's configuration, and explains failures."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import yaml

from envbuild.util.errors import EnvbuildError, SettingsError, SystemFault, printable
from envbuild.util.host_processes import ProcessMissing

_INSIDE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SHOWN = "kubectl config view --minify shows the configuration; envbuild reads KUBECONFIG, or ~/.kube/config"


class _Heard(logging.Handler):
    """Collects what the client logs to the root logger, so that it is not written to stderr. The client reports a
    failed login only in this log, and continues without a login. The handler stays installed for later messages of the
    client."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


_HEARD = _Heard()


def configure(config: Any, context: str | None, known: Any) -> str | None:
    """Fills `known`, a Configuration of the client, and returns the configured namespace. `config`: the module
    kubernetes.config.

    Raises SettingsError if no cluster is configured or the configuration is invalid, ProcessMissing if the program that
    logs in to the cluster is missing, and SystemFault if that program fails.
    """
    logging.getLogger().addHandler(_HEARD)
    _HEARD.messages.clear()
    try:
        active = _load(config, context, known)
    except (config.ConfigException, OSError) as error:
        raise SettingsError(f"no cluster is configured: {error}", hint=_SHOWN) from error
    # The client raises these errors for invalid files.
    except (yaml.YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise SettingsError(f"kubectl's configuration is malformed: {_line(str(error))}", hint=_SHOWN) from error
    if _HEARD.messages and not known.api_key and not known.cert_file:
        raise _refused(_line(_HEARD.messages[-1]))
    return active


def _refused(message: str) -> EnvbuildError:
    missing = re.fullmatch(r"\[Errno 2\] .*: '(.+)'", message)
    if missing:
        return ProcessMissing(
            f"{missing[1]} is not installed or not on PATH: kubectl's configuration uses it to log in to the cluster",
            hint=f"install this plugin of the cluster's provider, or name another context; {_SHOWN}",
        )
    if "NoneType" in message:  # the client failed because, in a terminal, the program writes to stderr directly
        message = "its output is shown above"
    return SystemFault(f"the program that logs in to the cluster failed: {message}", hint=_SHOWN)


def _load(config: Any, context: str | None, known: Any) -> str | None:
    try:
        config.load_kube_config(context=context, client_configuration=known)
    except config.ConfigException:
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise
        config.load_incluster_config(client_configuration=known)
        return _INSIDE.read_text(encoding="ascii").strip() if _INSIDE.is_file() else None
    every, active = config.list_kube_config_contexts()
    found = next((item for item in every if item["name"] == context), active)
    namespace = found["context"].get("namespace")
    return namespace if isinstance(namespace, str) else None


def _line(text: str) -> str:
    return printable(" ".join(text.split())[:300])
