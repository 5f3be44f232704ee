"""Lists the versions that a profile pins, and the reason for each version. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.facts import database, mixed_gpu_settings
from envbuild.facts.mixed_gpu_settings import Setting
from envbuild.resolve.plan_resolver import Plan, required_by
from envbuild.resolve.torch_compatibility_and_advisories import Choice

LIBRARIES = ("cublas", "cudnn", "nccl")
"""The libraries that are always listed, known or not."""
UNKNOWN_LIBRARY = "not known for this build of torch: checked when it is locked"


def pin_versions(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str | None]:
    """Return all versions, by short name such as `cublas`, or by distribution name if there is no short name. The value
    is None if no version is pinned. `choice`: the plan's choice, checked against `locked` (distribution -> version;
    empty without a matching lock)."""
    known = choice.situation
    found: dict[str, str | None] = {
        "python": plan.python,
        "cuda": known.cuda,
        "torch": known.torch,
        **{short: known.libraries.get(short) for short in LIBRARIES},
        "apex": None,
        **plan.extensions,
    }
    found |= {short: version for short, version in known.libraries.items() if short not in found}
    return found | {name: version for name, version in locked.items() if not database.library_of(name)}


def pin_reasons(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each version: the line of the profile, torch's requirement, or the resolver's choice. If
    the profile states a reason in words, that reason follows."""
    torch = str(choice.situation.torch)
    unknown = dict.fromkeys(LIBRARIES, UNKNOWN_LIBRARY) if choice.situation.gpus else {}
    found = {**unknown, **dict.fromkeys([*locked, *choice.situation.libraries], "locked"), **plan.reasons}
    for library, required in _required(torch).items():
        version = choice.situation.libraries.get(library)
        if version and found[library] == required_by(torch) and not SpecifierSet(required).contains(version):
            found[library] = f"locked, though torch {torch} requires {required}"
    found |= {"cuda": f"the version that torch {torch} is built for"} if choice.situation.cuda else {}
    why = {str(canonicalize_name(name)): reason for name, reason in plan.why.items()}
    return {name: _with_reason(text, why.get(canonicalize_name(name), "")) for name, text in found.items()}


def _with_reason(text: str, reason: str) -> str:
    return text if text.endswith(reason) else f"{text}; {reason}"


def _required(torch: str) -> dict[str, str]:
    """Return, for each library, the version that torch's metadata requires."""
    release = database.torch_release(torch)
    required = release.requirements if release else {}
    return {library: text for name, text in required.items() for library in [database.library_of(name)] if library}


def explained_settings(plan: Plan, choice: Choice) -> list[Setting]:
    """Return the environment variables that have a reason: those that a profile for different GPU models needs, and
    those for which the profile states a reason. A value or a reason in the profile takes precedence."""
    settings = mixed_gpu_settings.mixed_gpu_settings(choice.situation.gpus)
    found = {one.variable: one for one in settings if plan.environment[one.variable] == one.value}
    stated = {name: reason for name, reason in plan.why.items() if name in plan.environment}
    return [*(found | {name: Setting(name, plan.environment[name], why) for name, why in stated.items()}).values()]
