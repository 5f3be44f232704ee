"""What a profile pins, and why each version is what it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from envbuild.facts import database, mixed_gpu_settings
from envbuild.facts.mixed_gpu_settings import Setting
from envbuild.resolve.plan_resolver import Plan, required_by
from envbuild.resolve.torch_compatibility_and_advisories import Choice


def pin_versions(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str | None]:
    """Everything by its short name, else by its distribution's; None where nothing is pinned. `choice` is the plan's,
    as it holds against `locked` (distribution -> version; empty where no lock fits)."""
    known = choice.situation
    found: dict[str, str | None] = {
        "python": plan.python,
        "cuda": known.cuda,
        "torch": known.torch,
        **{short: known.libraries.get(short) for short in ("cublas", "cudnn", "nccl")},
        "apex": None,
        **plan.extensions,
    }
    found |= {short: version for short, version in known.libraries.items() if short not in found}
    return found | {name: version for name, version in locked.items() if not database.library_of(name)}


def pin_reasons(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str]:
    """Why each has its version: a line of the profile, torch's requirement, or that a resolver chose it."""
    torch = str(choice.situation.torch)
    found = {**dict.fromkeys([*locked, *choice.situation.libraries], "locked"), **plan.reasons}
    for library, required in _required(torch).items():
        version = choice.situation.libraries.get(library)
        if version and found[library] == required_by(torch) and not SpecifierSet(required).contains(version):
            found[library] = f"locked, though torch {torch} requires {required}"
    return {**found, "cuda": f"torch {torch} is built for it"}


def _required(torch: str) -> dict[str, str]:
    """Library -> what torch's metadata says of its version."""
    release = database.torch_release(torch)
    asked = {**release.expands_to, **release.pins} if release else {}
    return {library: text for name, text in asked.items() for library in [database.library_of(name)] if library}


def fleet_settings(plan: Plan, choice: Choice) -> list[Setting]:
    """The image's variables that unequal cards need; where the profile has a value of its own, that one wins."""
    settings = mixed_gpu_settings.mixed_gpu_settings(choice.situation.gpus)
    return [setting for setting in settings if plan.environment[setting.variable] == setting.value]
