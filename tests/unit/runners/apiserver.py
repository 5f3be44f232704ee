"""Stands in for a cluster's API server: real HTTP, a few objects, and a pod with states prepared by a test."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from unit.served import served

Object = dict[str, Any]
CREATED, STARTED, FINISHED = (f"2026-11-21T10:00:{second:02}Z" for second in (0, 7, 19))
NODE = "gpu-7"


def pod(phase: str = "Pending", node: str = NODE, **status: Any) -> Object:
    meta = {"name": "pod-1", "creationTimestamp": CREATED}
    return {"metadata": meta, "spec": {"nodeName": node} if node else {}, "status": {"phase": phase, **status}}


def container(**state: Any) -> list[Object]:
    return [{"state": state, "containerID": "containerd://abc", "imageID": "registry.example/x@sha256:1"}]


def waiting(reason: str, message: str = "") -> Object:
    return pod(containerStatuses=container(waiting={"reason": reason, "message": message}))


def running() -> Object:
    return pod("Running", containerStatuses=container(running={"startedAt": STARTED}))


def ended(code: int, reason: str = "Error", message: str = "", **status: Any) -> Object:
    over = {"exitCode": code, "reason": reason, "message": message, "startedAt": STARTED, "finishedAt": FINISHED}
    phase = "Failed" if code else "Succeeded"
    return pod(phase, containerStatuses=container(terminated=over), **status)


def unplaced(message: str = "0/1 nodes are available") -> Object:
    return pod(node="", conditions=[{"type": "PodScheduled", "status": "False", "message": message}])


def node(name: str = NODE, product: str = "NVIDIA-H20", gpus: str = "8", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product}},
        "spec": spec,
        "status": {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": "True"}]},
    }


@dataclass
class Server:
    """`pods`: the states of the pod that requests get, in order; the last state is repeated; None: the pod does not
    exist. `log`: the pod's log; `logs`: what the first reads of the log get instead, in order. `refuse`: (method, part
    of the path) -> (status, message). `answers`: (method, part of the path) -> the object that is returned instead."""

    pods: list[Object | None] = field(default_factory=lambda: [running(), ended(0)])
    log: bytes = b""
    logs: list[bytes] = field(default_factory=list)
    nodes: list[Object] = field(default_factory=lambda: [node()])
    events: list[Object] = field(default_factory=list)
    conditions: list[Object] = field(default_factory=list)
    refuse: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    answers: dict[tuple[str, str], object] = field(default_factory=dict)
    stored: dict[str, Object] = field(default_factory=dict)
    created: list[Object] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    address: str = ""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Object) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        for (verb, part), (status, message) in self.refuse.items():
            if verb == method and part in path:
                return status, {"kind": "Status", "message": message, "code": status}
        for (verb, part), given in self.answers.items():
            if verb == method and part in path:
                return 200, given
        kind, _, name = path.partition("/namespaces/")[2].partition("/")[2].partition("/")
        if method == "GET" and path.endswith("/nodes"):
            begin, size = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
            more = {"continue": str(begin + size)} if begin + size < len(self.nodes) else {}
            return 200, {"metadata": more, "items": self.nodes[begin : begin + size]}
        if method == "GET" and kind == "events":
            return 200, {"items": self.events}
        if method == "GET" and name.endswith("/log"):
            return 200, self.logs.pop(0) if self.logs else self.log
        if method == "GET" and kind == "pods":
            found = self.pods.pop(0) if len(self.pods) > 1 else self.pods[0]
            return 200, {"items": [found] if found else []}
        key = f"{kind}/{name}"
        if method == "POST":
            self.created.append(copy.deepcopy(body))
            body["metadata"]["uid"] = f"uid-of-{kind}"
            self.stored[f"{kind}/{body['metadata']['name']}"] = body
            return 201, body
        if key not in self.stored:
            return 404, {"kind": "Status", "message": f"{key} not found", "code": 404}
        if method == "PATCH":
            self.stored[key]["metadata"].update(body["metadata"])
        elif method == "DELETE":
            del self.stored[key]
            return 200, {"kind": "Status"}
        return 200, {**self.stored[key], "status": {"conditions": self.conditions}}


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            parts = urlsplit(self.path)
            status, answer = server.answer(self.command, parts.path, parse_qs(parts.query), body)
            raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, bytes) else "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PATCH = do_DELETE = _take

        def log_message(self, format: str, *args: object) -> None:
            """Do not log into the tests' output."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{http.server_port}"
    with served(http):
        yield server


def kubeconfig(address: str, file: Path, namespace: str = "proofs") -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "one", "cluster": {"server": address}}],
        "users": [{"name": "me", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": namespace}}],
    }
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return file
