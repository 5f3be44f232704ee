"""A real Kubernetes of one node on this machine, with the programs that scripts/kubernetes installs. A private engine
runs its containers, because pods request settings that the shared engine may not support."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from .daemons import Daemons
from .engines import OwnEngine, lacking, unmount
from .support import CHECKOUT, command, docker, free_port, until

NODE = "gpu-h20"
NAMESPACE = "proofs"
PAUSE = "envbuild-e2e/pause:1"
# For a machine without CAP_SYS_RESOURCE: the OOM killer should spare a pod's processes more than others.
RUNTIME = """#!/usr/bin/env python3
import json, os, sys
if "create" in sys.argv and "--bundle" in sys.argv:
    file = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(file) as stream:
        config = json.load(stream)
    if (config["process"].get("oomScoreAdj") or 0) < 0:
        config["process"]["oomScoreAdj"] = 0
        with open(file, "w") as stream:
            json.dump(config, stream)
os.execv("{runc}", ["{runc}", *sys.argv[1:]])
"""


def address() -> str:
    """Return an address of this machine that is not a loopback address, as the API server requires. No packet is
    sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        found: str = one.getsockname()[0]
        return found


@dataclass
class OneNode:
    programs: Path
    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    port: int = field(default_factory=free_port)
    daemons: Daemons = field(init=False)
    engine: OwnEngine = field(init=False)

    def __post_init__(self) -> None:
        self.daemons = Daemons(self.folder / "log")
        runtimes = {"spared": {"path": str(self.folder / "runtime")}}
        # docker's bridge in a separate network: Kubernetes restarts a pod that has no address
        settings = {"bridge": "", "runtimes": runtimes, "default-runtime": "spared"}
        self.engine = OwnEngine(self.folder / "engine", settings=settings)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def docker(self, *arguments: str | Path) -> str:
        return docker("--host", self.engine.host, *arguments)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Send a request to the API server as its administrator. Raises requests' errors, also for an error status."""
        answer = requests.request(
            method,
            f"https://localhost:{self.port}{path}",
            data=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind},
            verify=str(self.folder / "certs" / "apiserver.crt"),
            timeout=20,
        )
        answer.raise_for_status()
        return answer.json()

    def version(self) -> str:
        return str(self.ask("GET", "/version")["gitVersion"])

    def of(self, kind: str) -> list[Any]:
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        found: list[Any] = self.ask("GET", f"{group}/namespaces/{NAMESPACE}/{kind}")["items"]
        return found

    def gpus(self, count: int) -> None:
        """Set the number of GPUs that the node reports."""
        path = "/status/capacity/nvidia.com~1gpu"
        patch = [{"op": "add", "path": path, "value": str(count)}]
        self.ask("PATCH", f"/api/v1/nodes/{NODE}/status", patch, "application/json-patch+json")

    def start(self) -> None:
        for part in ("certs", "log", "kubelet"):
            (self.folder / part).mkdir(parents=True)
        self._engine()
        self._control()
        self._node()

    def _engine(self) -> None:
        why = lacking()
        if why:
            pytest.skip(why)
        runtime = self.folder / "runtime"
        runtime.write_text(RUNTIME.replace("{runc}", shutil.which("runc") or "/usr/sbin/runc"), encoding="utf-8")
        runtime.chmod(0o755)
        self.engine.start()
        pause = self.folder / "pause"
        pause.mkdir()
        shutil.copy(self.programs / "pause", pause)
        (pause / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n', encoding="utf-8")
        self.docker("build", "--quiet", "--tag", PAUSE, pause)

    def _control(self) -> None:
        at, here = self.folder, address()
        command("openssl", "genrsa", "-out", at / "accounts.key", "2048")
        (at / "tokens").write_text(f"{self.token},admin,admin,system:masters\n", encoding="utf-8")
        clients, peers = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self._daemon(
            "etcd", self.programs / "etcd", "--data-dir", at / "etcd", "--listen-client-urls", clients,
            "--advertise-client-urls", clients, "--listen-peer-urls", peers,
            "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
        )  # fmt: skip
        self._daemon(
            "kube-apiserver", self.programs / "kube-apiserver", f"--etcd-servers={clients}",
            f"--secure-port={self.port}", f"--cert-dir={at}/certs", f"--token-auth-file={at}/tokens",
            "--authorization-mode=AlwaysAllow", "--disable-admission-plugins=ServiceAccount",
            f"--advertise-address={here}", "--service-cluster-ip-range=10.250.0.0/24",
            "--service-account-issuer=https://e2e.invalid", f"--service-account-key-file={at}/accounts.key",
            f"--service-account-signing-key-file={at}/accounts.key",
            "--kubelet-preferred-address-types=InternalIP", "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        )  # fmt: skip
        until("the API server, see its log", lambda: self._answers(self.ask, "GET", "/api/v1/namespaces"), 90)
        user = {"token": self.token}
        cluster = {"server": f"https://localhost:{self.port}", "certificate-authority": f"{at}/certs/apiserver.crt"}
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
            "clusters": [{"name": "e2e", "cluster": cluster}], "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "admin", "namespace": NAMESPACE}}],
        }  # fmt: skip
        self.kubeconfig.write_text(yaml.safe_dump(document), encoding="utf-8")
        self.kubeconfig.chmod(0o600)
        for name in ("kube-controller-manager", "kube-scheduler"):
            fast = ["--node-monitor-grace-period=10s", "--pod-eviction-timeout=5s"] if "controller" in name else []
            self._daemon(name, self.programs / name, f"--kubeconfig={self.kubeconfig}", "--port=0",
                         f"--secure-port={free_port()}", f"--cert-dir={at}/certs-{name}", "--leader-elect=false",
                         *fast)  # fmt: skip
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})

    def _node(self) -> None:
        self.kubelet()
        until("the node to be ready, see kubelet's log", self.ready, 90)
        self.gpus(1)

    def kubelet(self) -> None:
        at = self.folder
        self._daemon(
            "kubelet", self.programs / "kubelet", f"--kubeconfig={self.kubeconfig}", f"--root-dir={at}/kubelet",
            f"--cert-dir={at}/certs-kubelet", "--container-runtime=docker",
            f"--docker-endpoint={self.engine.host}", f"--docker={self.engine.host}",
            f"--pod-infra-container-image={PAUSE}", f"--hostname-override={NODE}", f"--node-ip={address()}",
            "--cgroup-driver=cgroupfs", "--fail-swap-on=false", "--anonymous-auth=true",
            "--authorization-mode=AlwaysAllow", f"--port={free_port()}", "--read-only-port=0",
            f"--healthz-port={free_port()}", "--node-labels=nvidia.com/gpu.product=NVIDIA-H20",
            "--eviction-hard=", "--image-gc-high-threshold=100", "--cgroups-per-qos=false",
            "--enforce-node-allocatable=", "--node-status-update-frequency=2s",
        )  # fmt: skip

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        """Simulate a second node by heartbeats: if all nodes were silent, the controller would give up no pod."""
        name, leases = "neighbour", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": name}, "spec": {"unschedulable": True}})
        ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}
        self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": ready}, "application/strategic-merge-patch+json")
        stop = threading.Event()

        def now() -> Any:
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            return {"spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": stamp}}

        def beat() -> None:
            while not stop.wait(2):
                with contextlib.suppress(requests.RequestException):
                    self.ask("PATCH", f"{leases}/{name}", now(), "application/merge-patch+json")

        self.ask("POST", leases, {"metadata": {"name": name}, **now()})
        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        try:
            yield
        finally:
            stop.set()
            beating.join()
            self.ask("DELETE", f"/api/v1/nodes/{name}")
            with contextlib.suppress(requests.RequestException):  # it belongs to the node, and may be gone with it
                self.ask("DELETE", f"{leases}/{name}")

    def ready(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            node = self.ask("GET", f"/api/v1/nodes/{NODE}")
            return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
        return False

    @staticmethod
    def _answers(call: Any, *arguments: str) -> bool:
        try:
            call(*arguments)
        except (AssertionError, requests.RequestException, OSError):
            return False
        return True

    def _daemon(self, name: str, *argv: str | Path) -> None:
        self.daemons.start(name, *argv, env={"PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])})

    def stop(self) -> None:
        """Stop the kubelet first: it would start removed containers again."""
        self.daemons.end_all(("kubelet", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"))
        self.engine.stop()
        unmount(self.folder)


@pytest.fixture(scope="session")
def onenode(workplace: Path) -> Iterator[OneNode]:
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("a kubelet wants to be root")
    programs = Path(os.environ.get("ENVBUILD_KUBERNETES", "/var/cache/envbuild-kubernetes"))
    done = subprocess.run([CHECKOUT / "scripts" / "kubernetes", programs], capture_output=True, text=True, timeout=3000)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    made = OneNode(programs / "bin", workplace / "onenode")
    with ExitStack() as stack:
        stack.callback(made.stop)
        made.start()
        yield made
