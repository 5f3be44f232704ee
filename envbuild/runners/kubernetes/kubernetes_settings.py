"""The settings of a Kubernetes site: the `kubernetes:` mapping of the settings file, overridden by the command line.
Pure.

Every value may contain only the characters that its field in a manifest allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.registry.image_reference_patterns import REGISTRY
from envbuild.util.errors import Fault, UsageError, printable, unknown


@dataclass(frozen=True)
class KubernetesSite:
    """The settings of a Kubernetes site. `context`, `namespace`: None means kubectl's default. `queue`: minutes to wait
    for a node; None: one day, but the wait ends early if no node could ever take the job. `nodes`: labels that a node
    must have in addition to the GPU product. `products`: GPU id -> the values of the label nvidia.com/gpu.product for
    this GPU. `tolerations`: KEY[=VALUE][:EFFECT], in addition to a toleration for nvidia.com/gpu. `labels`,
    `annotations`: set on the Job and its pod. `cpu`: the limit on processors."""

    context: str | None = None
    namespace: str | None = None
    registry: str | None = None
    runtime_class: str | None = None
    priority_class: str | None = None
    queue: int | None = None
    cpu: int | None = None
    pull_secrets: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"  # RFC 1123, for names of objects
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = rf"({_NAME}/)?{_LABEL}"
_FREE = rf"(?!(batch\.kubernetes\.io|app\.kubernetes\.io/managed-by|job-name$|controller-uid$)){_KEY}"
TOLERATION = re.compile(rf"(?P<key>{_KEY})(=(?P<value>{_LABEL}))?(:(?P<effect>NoSchedule|NoExecute))?")
_TEXTS = {
    "context": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}", "a context's name"),
    "namespace": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a namespace's name"),
    "registry": REGISTRY,
    "runtime_class": (_NAME, "a RuntimeClass's name"),
    "priority_class": (_NAME, "a PriorityClass's name"),
    "queue": ("[0-9]{1,6}", "minutes"),
    "cpu": ("[1-9][0-9]{0,3}", "a number of processors"),
}
_LISTS = {"pull_secrets": (_NAME, "names of Secrets"), "tolerations": (TOLERATION.pattern, "KEY[=VALUE][:EFFECT]")}
# The patterns of keys and values. _FREE excludes the labels by which the cluster and envbuild find a job's pod.
_META = {
    "nodes": (_KEY, "a label's key", _LABEL, "a label's value"),
    "labels": (_FREE, "a label's key that Kubernetes and envbuild do not use", _LABEL, "a label's value"),
    "annotations": (
        _FREE,
        "an annotation's key that Kubernetes and envbuild do not use",
        "[ -~]{1,1000}",
        "a line of ASCII",
    ),
}
_MAPS = (*_META, "products")
_NUMBERS = ("queue", "cpu")
KNOWN = (*_TEXTS, *_LISTS, *_MAPS)
_EXAMPLES = {
    "nodes": "{pool: gpu}",
    "products": "{h20: [NVIDIA-H20]}",
    "labels": "{kueue.x-k8s.io/queue-name: team}",
    "annotations": "{team.example/contact: us}",
}


def parse(settings: Mapping[str, Any], given: Mapping[str, str], knows: Callable[[str], bool]) -> KubernetesSite:
    """Merges the settings with values from the command line, which take precedence. On the command line, lists are
    written a,b, and products.h20=... sets one entry.

    `knows`: tests whether a GPU id exists. Raises UsageError with every error.
    """
    merged: dict[str, Any] = dict(settings)
    for key, value in given.items():
        map_, dot, inner = key.partition(".")
        if dot and map_ in _MAPS:
            before = merged.get(map_, {})
            merged[map_] = {**(before if isinstance(before, Mapping) else {}), inner: value}
        else:
            merged[key] = value
    faults: list[Fault] = []
    texts: dict[str, Any] = {key: _text(key, merged[key], faults) for key in _TEXTS if key in merged}
    lists: dict[str, Any] = {key: _items(key, merged[key], *_LISTS[key], faults) for key in _LISTS if key in merged}
    meta: dict[str, Any] = {name: _pairs(name, merged.get(name, {}), faults) for name in _META}
    products = {
        str(key): _items(f"products.{key}", value, _LABEL, "values of nvidia.com/gpu.product", faults)
        for key, value in _mapping("products", merged.get("products", {}), faults).items()
        if _gpu(key, knows, faults)
    }
    strange = [str(key) for key in merged if key not in KNOWN]
    faults += [Fault(unknown(key, KNOWN), field=printable(key[:100])) for key in strange]
    if faults:
        raise UsageError("invalid kubernetes settings", faults=faults, hint=f"known: {', '.join(KNOWN)}")
    numbers: dict[str, Any] = {key: int(texts.pop(key)) for key in _NUMBERS if key in texts}
    return KubernetesSite(**texts, **lists, **meta, **numbers, products=products)


def _one(field_: str, value: object, pattern: str, wanted: str, faults: list[Fault]) -> str:
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return value
    faults.append(Fault(f"must be {wanted}, not {printable(str(value)[:100])!r}", field=field_))
    return ""


def _pairs(name: str, value: object, faults: list[Fault]) -> dict[str, str]:
    key_shape, key_words, shape, words = _META[name]
    return {
        str(key): _one(f"{name}.{key}", inner, shape, words, faults)
        for key, inner in _mapping(name, value, faults).items()
        if _one(name, key, key_shape, key_words, faults)
    }


def _text(key: str, value: object, faults: list[Fault]) -> str:
    if key in _NUMBERS and type(value) is int:
        value = str(value)
    return _one(key, value, *_TEXTS[key], faults)


def _items(key: str, value: object, pattern: str, wanted: str, faults: list[Fault]) -> tuple[str, ...]:
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        faults.append(Fault(f"must be a list of {wanted}", field=printable(key[:100])))
        return ()
    return tuple(_one(printable(key[:100]), item, pattern, wanted, faults) for item in found)


def _mapping(key: str, value: object, faults: list[Fault]) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    message = f"must be a mapping, as in {_EXAMPLES[key]}, not {printable(str(value)[:100])!r}"
    faults.append(Fault(f"{message}; on the command line {key}.KEY=VALUE", field=key))
    return {}


def _gpu(key: object, knows: Callable[[str], bool], faults: list[Fault]) -> bool:
    if isinstance(key, str) and knows(key):
        return True
    faults.append(Fault(f"{printable(str(key)[:60])!r} is not the id of a GPU", field="products"))
    return False
