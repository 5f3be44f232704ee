"""What a profile pins, and why each version is what it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.plan import facts, fleet
from envbuild.plan.choice import Choice
from envbuild.plan.fleet import Setting
from envbuild.plan.resolve import Plan


def versions(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str | None]:
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
    return found | {name: version for name, version in locked.items() if not facts.library_of(name)}


def reasons(plan: Plan, choice: Choice, locked: Mapping[str, str]) -> dict[str, str]:
    """Why each has its version: a line of the profile, torch's own wish, or that a resolver chose it."""
    cuda = {"cuda": f"torch {choice.situation.torch} is built for it"}
    return {**dict.fromkeys([*locked, *choice.situation.libraries], "locked"), **plan.reasons, **cuda}


def fleet_settings(plan: Plan, choice: Choice) -> list[Setting]:
    """The image's variables that unequal cards need; where the profile has a value of its own, that one wins."""
    settings = fleet.settings(choice.situation.gpus)
    return [setting for setting in settings if plan.environment[setting.variable] == setting.value]
