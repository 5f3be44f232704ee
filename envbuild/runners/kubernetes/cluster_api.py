"""Calls the cluster's API through the official client, and returns its objects as unchanged JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from envbuild.runners.kubernetes import kubeconfig
from envbuild.runners.kubernetes.job_manifest import Object
from envbuild.util.errors import printable
from envbuild.util.host_processes import ProcessMissing

_SECONDS = (5.0, 30.0)  # to connect, and to receive a response
_MAX = 16 << 20  # bytes of a response other than a log
_PAGE = 200  # nodes in one response; a node's document has tens of kB


class Silent(Exception):
    """The API server does not answer, or answers with a temporary error."""


class Unreached(Silent):
    """There was no connection, so the server cannot have received the request."""


class ApiRefused(Exception):
    """The API server refused the request. `status`: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A connection to the cluster, configured like kubectl: by KUBECONFIG or ~/.kube/config, or, inside a pod, by its
    service account.

    `made`: whether the Job may exist. It is also true if the server did not confirm the creation.
    """

    def __init__(self, context: str | None, namespace: str | None) -> None:
        """Raises ProcessMissing if the client is not installed, and the errors of kubeconfig.configure."""
        try:
            from kubernetes import client, config  # an optional dependency, and slow to import (half a second)
        except ImportError as error:
            raise ProcessMissing(
                "--on kubernetes needs Kubernetes' Python client",
                hint="install envbuild again from the same source, with its extra `kubernetes`; in a checkout: "
                "pip install '.[kubernetes]'",
            ) from error
        known = client.Configuration()
        active = kubeconfig.configure(config, context, known)
        self.made = False
        known.retries = False
        self.namespace = namespace or active or "default"
        api = client.ApiClient(known)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)

    def create(self, config: Object, work: Object) -> str:
        """Creates the Job and a ConfigMap that the Job owns. Returns the Job's uid.

        The cluster deletes the ConfigMap with the Job. The Job is created first, so that no ConfigMap is left behind if
        this process ends between the two calls. The pod waits until the ConfigMap exists.
        """
        self.made = True
        try:
            made = uid(self._ask(self._batch.create_namespaced_job, self.namespace, work))
        except (ApiRefused, Unreached):
            self.made = False
            raise
        if made is None:
            raise Silent("its response contains no Job")
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": work["metadata"]["name"], "uid": made}
        owned = {**config, "metadata": {**config["metadata"], "ownerReferences": [owner]}}
        self._ask(self._core.create_namespaced_config_map, self.namespace, owned)
        return made

    def job(self, name: str) -> Object | None:
        return self._found(self._batch.read_namespaced_job, name, self.namespace)

    def pods(self, name: str) -> list[Object]:
        """The pods of a Job."""
        return self._items(self._core.list_namespaced_pod, self.namespace, label_selector=f"job-name={name}")

    def events(self, name: str) -> list[Object]:
        """The events of a Job."""
        return self._items(
            self._core.list_namespaced_event, self.namespace, field_selector=f"involvedObject.name={name}"
        )

    def nodes(self) -> list[Object]:
        """All nodes, read in pages: each node's document lists its images, so thousands of nodes would exceed the size
        limit of a response."""
        found: list[Object] = []
        more: dict[str, Any] = {}
        while True:
            page = self._ask(self._core.list_node, limit=_PAGE, **more)
            found += _objects(page)
            token = _meta(page).get("continue")
            if not isinstance(token, str) or not token:
                return found
            more = {"_continue": token}

    @contextlib.contextmanager
    def log(self, pod: str, seconds: float, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """The blocks of a pod's log from its beginning. Raises Silent if no block arrives for `seconds`, also in the
        middle of the log."""
        with _asking():
            response: Any = self._core.read_namespaced_pod_log(
                pod, self.namespace, follow=follow, _preload_content=False, _request_timeout=(_SECONDS[0], seconds)
            )
        try:
            yield _blocks(response)
        finally:
            response.close()

    def remove(self, name: str) -> None:
        """Removes the Job, its pod and the ConfigMap. It is not an error if an object no longer exists."""
        now = {"propagation_policy": "Background", "grace_period_seconds": 0}
        for call, options in (
            (self._batch.delete_namespaced_job, now),
            (self._core.delete_namespaced_config_map, {}),
        ):
            try:
                self._ask(call, name, self.namespace, **options)
            except ApiRefused as refused:
                if refused.status != 404:
                    raise

    def _found(self, call: Any, *arguments: Any) -> Object | None:
        try:
            return self._ask(call, *arguments)
        except ApiRefused as refused:
            if refused.status == 404:
                return None
            raise

    def _items(self, call: Any, *arguments: Any, **options: Any) -> list[Object]:
        return _objects(self._ask(call, *arguments, **options))

    def _ask(self, call: Any, *arguments: Any, **options: Any) -> Object:
        with _asking():
            response = call(*arguments, **options, _preload_content=False, _request_timeout=_SECONDS)
            try:
                found = json.loads(response.read(_MAX))
            except (ValueError, RecursionError) as error:
                raise Silent("its response is not JSON") from error
            finally:
                response.close()
            return found if isinstance(found, dict) else {}


def _blocks(response: Any) -> Iterator[bytes]:
    """Reads the blocks of a response. Errors of the caller that consumes them are raised outside of _asking, so they do
    not count as the API server's errors."""
    with _asking():
        yield from response.stream(1 << 16)


def uid(found: Object) -> str | None:
    value = _meta(found).get("uid")
    return value if isinstance(value, str) else None


def _meta(found: Object) -> Object:
    meta = found.get("metadata")
    return meta if isinstance(meta, dict) else {}


def _objects(page: Object) -> list[Object]:
    items = page.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Translates the client's exceptions into Silent and Unreached, which may be retried, and ApiRefused."""
    import urllib3
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import ConnectTimeoutError, ProxyError  # the former also covers a refused connection

    try:
        yield
    except ApiException as error:
        status = int(error.status or 0)
        if status in (0, 408, 429) or status >= 500:
            kind = Unreached if "CERTIFICATE_VERIFY_FAILED" in str(error.reason) else Silent
            raise kind(f"{status} {printable(str(error.reason)[:300])}") from error
        raise ApiRefused(status, _message(error)) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        kind = Unreached if isinstance(error, ConnectTimeoutError | ProxyError) else Silent
        raise kind(printable(str(error)[:300])) from error


def _message(error: Any) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body or error.reason
    return printable(str(message)[:1000])
