"""Renders the Kubernetes objects of a job: a ConfigMap with the self-test, and the Job. Pure: the same job, site and
name give the same objects."""

from __future__ import annotations

import base64
import copy
import math
import re
from collections.abc import Mapping
from typing import Any

from envbuild.facts import database
from envbuild.registry.image_reference_patterns import require_digest
from envbuild.runners.kubernetes.kubernetes_settings import TOLERATION, KubernetesSite
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import UsageError

Object = dict[str, Any]

GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"  # a label that NVIDIA's GPU feature discovery gives nodes
LABEL = "app.kubernetes.io/managed-by"
_STDERR = "/dev/termination-log"  # for stderr: the pod's status contains the end of this file
_MAX_STDERR = 4096  # bytes of this file that a kubelet reads
_DISK = 256 << 20  # bytes of a node's disk, for the pod's log; all other files are in memory
LATE = 124  # exit code if the self-test exceeded its time limit, as for timeout(1)
_FETCHING = 900  # seconds to fetch the image, added to the self-test's time limit
QUEUE = 24 * 60  # minutes to wait for a node, if the setting `queue` is missing
_KEPT = 3600  # seconds until the cluster removes a finished Job that envbuild did not remove
MAX_PAYLOAD = 1 << 20  # bytes that a ConfigMap can contain
# A pod's name is 6 characters longer than the Job's, and must fit into a label of at most 63.
_NAME = re.compile(r"envbuild-[a-z0-9-]{1,46}[a-z0-9]")
# shareProcessNamespace makes the pause container PID 1. The self-test must not be PID 1, because Linux ignores signals
# that PID 1 sends to itself, unless it has a handler for them. The pod's deadline includes the time to fetch the image,
# so this wrapper enforces the self-test's own time limit. It also limits the size of stderr, which goes to a file on
# the node's disk without any other limit.
_AROUND = """import os, subprocess, sys, threading
log = os.open({stderr!r}, os.O_WRONLY)
child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
late = threading.Event()
def end():
    late.set()
    child.kill()
def keep():
    tail = b""
    while block := os.read(child.stderr.fileno(), 65536):
        tail = (tail + block)[-{most}:]
        os.ftruncate(log, 0)
        os.pwrite(log, tail, 0)
alarm, reader = threading.Timer({seconds}, end), threading.Thread(target=keep)
for thread in alarm, reader:
    thread.daemon = True
    thread.start()
code = child.wait()
reader.join(5)
os._exit({late} if late.is_set() else code if code >= 0 else 128 - code)
"""
# Restrictions of the local runner's container that a pod lacks; the evidence lists them.
UNCONFINED = ("the network is the pod's, and open unless the cluster closes it",
              "processes are bounded by the node alone")  # fmt: skip


def render(job: Job, site: KubernetesSite, name: str, image: str) -> tuple[Object, Object]:
    """Return the ConfigMap and the Job, both with the name `name`. Raises UsageError if the job needs GPUs of several
    models, if the image is not pinned by digest, if the name is invalid, or if the self-test is too large for a
    ConfigMap."""
    require_digest(image)
    if not _NAME.fullmatch(name):
        raise UsageError(f"a job cannot be named {name!r}")
    if len(job.stdin) > MAX_PAYLOAD:
        raise UsageError(f"the self-test is {len(job.stdin)} bytes, more than a ConfigMap can hold",
                         hint="shorten the profile's own script")  # fmt: skip
    meta = {"name": name, "labels": {LABEL: "envbuild"}}
    # The site's labels are for the cluster's queues, quotas and service meshes.
    metadata: Object = {"labels": {**site.labels, LABEL: "envbuild"}}
    if site.annotations:
        metadata["annotations"] = dict(site.annotations)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta,
        "immutable": True,
        "binaryData": {"payload": base64.b64encode(job.stdin).decode()},
    }
    seconds = math.ceil(job.limits.timeout) + _FETCHING
    queue = (QUEUE if site.queue is None else site.queue) * 60
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, **metadata},
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": seconds + queue,
            "ttlSecondsAfterFinished": _KEPT,
            "template": {"metadata": copy.deepcopy(metadata), "spec": _pod(job, site, name, image, seconds)},
        },
    }
    return config, work


def _pod(job: Job, site: KubernetesSite, name: str, image: str, seconds: int) -> Object:
    limits = job.limits
    command = ("python", "-I", "-S", "-c", wrapper_command(limits.timeout), *job.argv, "/envbuild/payload")
    optional = {
        "runtimeClassName": site.runtime_class,
        "priorityClassName": site.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in site.pull_secrets],
        **_placed(job, site),
    }
    return {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": seconds,
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "runAsGroup": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "selftest",
                "image": image,
                "imagePullPolicy": "IfNotPresent" if site.registry else "Never",
                "command": [part.replace("$", "$$") for part in command],
                "workingDir": "/tmp",
                "terminationMessagePath": _STDERR,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": _resources(job, site),
                "volumeMounts": [
                    {"name": "payload", "mountPath": "/envbuild", "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "payload", "configMap": {"name": name}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": str(limits.tmp)}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(limits.shm)}},
        ],
        **{key: value for key, value in optional.items() if value},
    }


def wrapper_command(seconds: float, stderr: str = _STDERR) -> str:
    """The text of a Python program that runs the command in its arguments for at most `seconds`, and writes the end of
    the command's stderr to the file `stderr`."""
    return _AROUND.format(stderr=stderr, most=_MAX_STDERR, seconds=seconds, late=LATE)


def _resources(job: Job, site: KubernetesSite) -> Object:
    """The requests and limits of the container. If a request is not set, Kubernetes uses the limit."""
    gpus = {GPU: str(job.count)} if job.gpus else {}
    cpu = {"cpu": str(site.cpu)} if site.cpu else {}
    limits = {"memory": str(job.limits.memory), "ephemeral-storage": str(_DISK), **cpu, **gpus}
    return {"limits": limits, "requests": {"cpu": "1"}}


def _placed(job: Job, site: KubernetesSite) -> Object:
    """The fields of a pod that select its nodes. One accepted product label becomes a nodeSelector, several become an
    affinity."""
    selector = dict(site.nodes)
    found: Object = {"tolerations": tolerations(job, site)}
    names = product_labels(job, site)
    if len(names) == 1:
        selector[PRODUCT] = names[0]
    elif names:
        term = {"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": list(names)}]}
        required = {"nodeSelectorTerms": [term]}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {**found, "nodeSelector": selector}


def product_labels(job: Job, site: KubernetesSite) -> tuple[str, ...]:
    """The values of the label nvidia.com/gpu.product that the job accepts; empty if any node is accepted.

    GPU feature discovery joins the words of a GPU's name with "-", and leaves out characters that a label must not
    contain, such as parentheses. Raises UsageError if the job needs GPUs of several models.
    """
    if not job.gpus:
        return ()
    if len(job.models) != 1:
        raise UsageError("a job can request only one GPU model", hint=f"--gpu {' or --gpu '.join(job.models)}")
    (model,) = job.models
    return site.products.get(model) or tuple(
        "-".join(re.sub(r"[^A-Za-z0-9_. -]", "", name).split()) for name in database.gpus()[model].all_names
    )


def tolerations(job: Job, site: KubernetesSite) -> list[Mapping[str, str]]:
    found: list[Mapping[str, str]] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if job.gpus else []
    for text in site.tolerations:
        match = TOLERATION.fullmatch(text)
        assert match
        value = {"operator": "Equal", "value": match["value"]} if match["value"] else {"operator": "Exists"}
        found.append({"key": match["key"], **value, **({"effect": match["effect"]} if match["effect"] else {})})
    return found
