"""The cluster's API, by the official client; objects come as they are, as JSON. Nothing is decided here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from envbuild.runners.kubernetes import kubeconfig
from envbuild.runners.kubernetes.job_manifest import Object
from envbuild.util.errors import printable
from envbuild.util.host_processes import ProcessMissing

_SECONDS = (5.0, 30.0)  # for a connection, and for an answer
_MAX = 16 << 20  # bytes of an answer that is no log
_PAGE = 200  # nodes; one is tens of kB


class Silent(Exception):
    """The API server does not answer, or not now."""


class Unreached(Silent):
    """There was not even a connection: nothing of what was asked for can have been done."""


class ApiRefused(Exception):
    """It answers that it will not. `status`: as in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A connection, as kubectl would have it: ~/.kube/config or KUBECONFIG, else from inside a pod.

    `made`: whether a Job of ours may be there, also where nobody heard so.
    """

    def __init__(self, context: str | None, namespace: str | None) -> None:
        """Raises ProcessMissing where the client is not installed, and what kubeconfig.configure does."""
        try:
            from kubernetes import client, config  # half a second, and an extra
        except ImportError as error:
            raise ProcessMissing(
                "--on kubernetes needs Kubernetes' Python client", hint="pip install 'envbuild[kubernetes]'"
            ) from error
        known = client.Configuration()
        active = kubeconfig.configure(config, context, known)
        self.made = False
        known.retries = False
        self.namespace = namespace or active or "default"
        api = client.ApiClient(known)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)

    def create(self, config: Object, work: Object) -> str:
        """The Job, and the ConfigMap that it owns: that goes when the Job goes, whoever is lost in between. Its pod
        waits for the ConfigMap, as for any that is not there yet. Returns the Job's uid."""
        self.made = True
        try:
            made = uid(self._ask(self._batch.create_namespaced_job, self.namespace, work))
        except (ApiRefused, Unreached):
            self.made = False
            raise
        if made is None:
            raise Silent("its answer shows no Job")
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": work["metadata"]["name"], "uid": made}
        owned = {**config, "metadata": {**config["metadata"], "ownerReferences": [owner]}}
        self._ask(self._core.create_namespaced_config_map, self.namespace, owned)
        return made

    def job(self, name: str) -> Object | None:
        return self._found(self._batch.read_namespaced_job, name, self.namespace)

    def pods(self, name: str) -> list[Object]:
        """Of a Job."""
        return self._items(self._core.list_namespaced_pod, self.namespace, label_selector=f"job-name={name}")

    def events(self, name: str) -> list[Object]:
        """Of a Job."""
        return self._items(
            self._core.list_namespaced_event, self.namespace, field_selector=f"involvedObject.name={name}"
        )

    def nodes(self) -> list[Object]:
        """All of them, by pages: a node lists its images, and a cluster of thousands is more than an answer holds."""
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
        """The blocks of a pod's log from its beginning. Raises Silent after `seconds` without one, midway too."""
        with _asking():
            response: Any = self._core.read_namespaced_pod_log(
                pod, self.namespace, follow=follow, _preload_content=False, _request_timeout=(_SECONDS[0], seconds)
            )
        try:
            yield _blocks(response)
        finally:
            response.close()

    def remove(self, name: str) -> None:
        """The Job with its pod, and the ConfigMap. What is gone already is fine."""
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
            except ValueError as error:
                raise Silent("its answer is no JSON") from error
            finally:
                response.close()
            return found if isinstance(found, dict) else {}


def _blocks(response: Any) -> Iterator[bytes]:
    """Apart from whoever takes them, whose own errors are not the API server's."""
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
    """Of the client's exceptions ours are made: what may be asked again, and what is a refusal."""
    import urllib3
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import ConnectTimeoutError, ProxyError  # one that is refused is of the former too

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
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        said = body or error.reason
    return printable(str(said)[:1000])
