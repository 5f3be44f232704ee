"""Finds the engine where docker's own client would, and explains why it does not respond."""

from __future__ import annotations

import os

import docker
import docker.context
import docker.tls
import docker.utils
import requests

from envbuild.util.errors import EngineError

_DEEPEST = 20  # how many nested errors are searched at most


def endpoint() -> tuple[str, docker.tls.TLSConfig | None]:
    """Return the engine's address and TLS configuration: from DOCKER_HOST, else from the current docker context, else
    the default socket. Raises EngineError if the context cannot be read or does not exist."""
    if os.environ.get("DOCKER_HOST"):
        parameters = docker.utils.kwargs_from_env()
        return parameters.get("base_url") or os.environ["DOCKER_HOST"], parameters.get("tls") or None
    try:
        chosen = os.environ.get("DOCKER_CONTEXT")
        api = docker.context.ContextAPI
        context = api.get_context(chosen) if chosen else api.get_current_context()
    except Exception as error:  # the library raises bare Exception for a damaged context
        raise EngineError(f"the current docker context cannot be read: {error}", hint="docker context use") from error
    if context is None:
        raise EngineError("the current docker context does not exist", hint="docker context ls; docker context use")
    return context.Host or "unix:///var/run/docker.sock", context.TLSConfig


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
