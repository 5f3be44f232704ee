"""Finds the engine where docker's own client would, and explains why it does not respond."""

from __future__ import annotations

import contextlib
import os

import docker
import docker.auth
import docker.context
import docker.context.config
import docker.errors
import docker.tls
import docker.utils
import docker.utils.config
import requests

from envbuild.util.errors import EngineError

_DEEPEST = 20  # how many nested errors are searched at most


class UnusableEngine(EngineError):
    """No engine answers, or envbuild cannot use the one that answers."""


def endpoint() -> tuple[str, docker.tls.TLSConfig | None]:
    """Return the engine's address and TLS configuration: from DOCKER_HOST, else from the current docker context, else
    the default socket. Raises UnusableEngine if the context is invalid or does not exist."""
    if os.environ.get("DOCKER_HOST"):
        parameters = docker.utils.kwargs_from_env()
        return parameters.get("base_url") or os.environ["DOCKER_HOST"], parameters.get("tls") or None
    chosen = os.environ.get("DOCKER_CONTEXT")
    by = "DOCKER_CONTEXT" if chosen else str(docker.utils.config.find_config_file() or "the configuration of docker")
    name = chosen or docker.context.config.get_current_context_name()
    try:
        context = docker.context.ContextAPI.get_context(name)
        host, tls = (context.Host, context.TLSConfig) if context else (None, None)
        if host is not None and not isinstance(host, str):
            raise TypeError(f"Host is not text: {host!r}")
    except Exception as error:  # the library raises Exception and errors of many types for an invalid context
        fault = f"the key {error} is missing" if isinstance(error, KeyError) else why(error)
        raise UnusableEngine(
            f"invalid docker context {name!r}, which {by} names: {fault}",
            hint="docker context ls; then remove this context and create it again: docker context rm; docker context "
            "create",
        ) from error
    if context is None:
        remedy = "unset DOCKER_CONTEXT, or set it to one of these" if chosen else "docker context use NAME"
        raise UnusableEngine(
            f"docker context {name!r} (set in {by}) does not exist", hint=f"docker context ls; then {remedy}"
        )
    return host or "unix:///var/run/docker.sock", tls


def invalid_value(host: str, error: AttributeError | TypeError | ValueError) -> UnusableEngine:
    """Return the error for an invalid value that the docker library met while it connected to `host`. Its ValueErrors
    do not say whether the address, the configuration or the engine's response is invalid."""
    if isinstance(error, ValueError):
        try:
            with contextlib.suppress(docker.errors.DockerException):
                docker.utils.parse_host(host)
        except ValueError as fault:
            return UnusableEngine(
                f"invalid address of a Docker Engine: {host}: {fault}",
                hint="correct DOCKER_HOST or the docker context: docker context ls",
            )
        try:
            docker.auth.load_config(config_dict=docker.utils.config.load_general_config())
        except (AttributeError, TypeError, ValueError):
            pass
        else:
            return UnusableEngine(
                f"invalid response of the Docker Engine at {host}: {error}",
                hint="check that a Docker Engine listens at this address, and update it",
            )
    file = str(docker.utils.config.find_config_file() or "config.json")
    return UnusableEngine(f"invalid configuration of docker in {file}: {error}", hint="correct or remove this file")


def why(error: BaseException) -> str:
    """Return the operating system's message from an error that libraries wrapped; else "no answer in time" for a
    time-out; else the error's first line."""
    text, left = str(error), [error]
    for depth in range(_DEEPEST):
        if depth == len(left):
            break
        inner = left[depth]
        if isinstance(inner, OSError) and inner.errno is not None and inner.strerror:
            return inner.strerror.lower()
        left += [one for one in (inner.__cause__, inner.__context__, *inner.args) if isinstance(one, BaseException)]
    if any(isinstance(one, TimeoutError | requests.Timeout) for one in left):
        return "no answer in time"
    return text.partition("\n")[0]
