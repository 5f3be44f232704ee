"""Finds contradictions in the valid part of a profile that also has malformed values. Pure.

The user then gets semantic errors together with malformed values. Contradictions that depend on a malformed value are
left out, because its correct content is unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envbuild.facts import database
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.model import Malformed, Profile, tried
from envbuild.profile.profile_and_lock_name_lookup import Meant
from envbuild.resolve import plan_resolver
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import Fault, ProfileError
from envbuild.util.yaml_and_project_paths import Document

_ALL = ""  # stands for every key
# Malformed key -> the keys at which contradictions are reported that depend on its value.
_DECIDES: Mapping[str, tuple[str, ...]] = {
    "extends": (_ALL,),
    "torch": (_ALL,),
    "gpus": (_ALL,),
    "base": ("base", "python", "apt", "variant", "toolchain", "extensions"),
    "python": ("python",),
    "cuda": ("cuda", "torch", "pins", "base", "variant", "toolchain", "extensions"),
    "pins": ("pins", "torch"),
    "accept": ("pins", "torch"),
    "driver": ("driver", "pins", "torch"),
    "features": ("pins", "torch"),
    "gpu_count": ("pins", "torch"),
    "variant": ("base", "variant", "toolchain", "extensions"),
    "toolchain": ("base", "variant", "toolchain", "extensions"),
    "extensions": ("base", "variant", "toolchain", "extensions", "pins", "torch", "selftest.require"),
    "selftest.script": ("selftest.require",),
}
_SUITE = "bookworm"
_PASSES = 3
"""How often malformed values are removed and the rest is validated. Pydantic checks a whole mapping only if all its
values are valid, so that each pass may find new faults."""


def contradictions(
    meant: Meant, merged: Document, malformed: Sequence[Malformed], known: Iterable[Fault]
) -> tuple[list[Fault], str | None]:
    """Contradictions between the well-formed values, and the resolver's hint if the hint is about these values alone.
    `known`: faults found in addition to `malformed`."""
    wrong = {_key(path) for path, _ in malformed} | {fault.field or "" for fault in known}
    blurred = {place for key in wrong for place in _DECIDES.get(key, ())}
    if wrong - {"why"}:
        blurred.add("why")  # the value that a reason explains may be a malformed one
    if _ALL in blurred:
        return [], None
    rest = _well_formed(merged, malformed)
    if rest is None:
        return [], None
    try:
        plan_resolver.resolve(LoadedProfile(meant.name, meant.file, rest[0], rest[1], meant))
    except ProfileError as error:
        outside = [fault for fault in error.faults if not _within(fault.field or "", blurred)]
        return outside, error.hint if len(outside) == len(error.faults) else None
    return [], None


def _key(path: yaml_and_project_paths.Path) -> str:
    """The key in _DECIDES for the path of a malformed value. An unknown key counts as the most similar known key, or as
    torch if no known key is similar."""
    if path[:1] == ("selftest",):
        return ".".join(map(str, path[:2]))
    if path and path[0] not in (*Profile.model_fields, "extends"):
        return next(iter(difflib.get_close_matches(str(path[0]), Profile.model_fields, 1)), "torch")
    return str(path[0]) if path else "torch"


def _within(field: str, places: Iterable[str]) -> bool:
    return any(field == place or field.startswith((f"{place}.", f"{place}[")) for place in places)


def _well_formed(merged: Document, malformed: Sequence[Malformed]) -> tuple[Profile, Document] | None:
    """The profile without its malformed values; a malformed or missing base or Python is replaced by a default. None if
    the rest is not valid either."""
    rest = merged
    for _ in range(_PASSES):
        rest = yaml_and_project_paths.without(rest, [path for path, _ in malformed])
        base: Any = rest.data.setdefault("base", {"bootstrap": _SUITE})
        suite = database.suites()[base.get("bootstrap") or _SUITE]
        rest.data.setdefault("python", suite.python)
        found = tried(rest)
        if isinstance(found, Profile):
            return found, rest
        malformed = found
    return None
