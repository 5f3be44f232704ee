"""The reasons that a profile states under `why`. A profile that extends another one inherits a reason only if it keeps
the value that the reason explains."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.util import yaml_and_project_paths
from envbuild.util.yaml_and_project_paths import Document

KEYS = frozenset(
    ("base", "cuda", "driver", "features", "gpu_count", "gpus", "platform", "python", "toolchain", "torch", "variant")
)
"""The top-level keys that can have a reason. The reason for a package, library or variable is listed under its name."""
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def without_outdated(parent: Document, merged: Document, own: Container[object]) -> Document:
    """Return `merged` without the reasons from `parent` whose value differs in `merged`, because a reason explains one
    value. `own`: names with a reason in the document that was merged onto `parent`; these reasons are kept."""
    reasons = parent.data.get("why")
    if not isinstance(reasons, dict) or not isinstance(merged.data.get("why"), dict):
        return merged
    gone = [
        ("why", name)
        for name in reasons
        if name not in own and named_values(parent.data, name) != named_values(merged.data, name)
    ]
    return yaml_and_project_paths.without(merged, gone) if gone else merged


def named_values(data: Mapping[str, Any], name: str) -> list[object]:
    """The values in a profile's data that a reason for `name` explains; empty if the profile sets no such value."""
    return list(_named_values(data, name))


def _named_values(data: Mapping[str, Any], name: str) -> Iterator[object]:
    if name in KEYS and data.get(name) is not None:
        yield data[name]
        if name == "torch":
            yield data.get("gpus")  # torch is chosen for these GPUs
    pins = data.get("pins")
    if isinstance(pins, dict) and name in pins:
        yield pins[name]
    elif name in database.libraries() and data.get("torch") is not None:
        yield data["torch"]  # torch requires one version of each library
    env = data.get("env")
    if isinstance(env, dict) and name in env:
        yield env[name]
    for key in ("packages", "apt", "extensions"):
        items = data.get(key)
        for item in items if isinstance(items, list) else ():
            named = item.get("name") if isinstance(item, dict) else item
            if isinstance(named, str) and _distribution(named) == canonicalize_name(name):
                yield item


def _distribution(requirement: str) -> str:
    """The normalised name at the start of a requirement, which may be invalid; empty if it starts with no name."""
    match = _PACKAGE.match(requirement.strip())
    return str(canonicalize_name(match[0])) if match else ""
