"""Remedies of an audit's findings: commands that install other versions, or changes to a profile. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from envbuild.plan import cure, facts
from envbuild.plan.advisories import Advisory, Situation
from envbuild.proof.holdings import Holdings


def install(held: Holdings, image: bool, *requirements: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """A pip or uv command for each list of `requirements`, as lines of a Dockerfile for an `image`."""
    python = held.python.executable
    pip = [python, "-m", "pip", "install"] if "pip" in held.installed else ["uv", "pip", "install", "--python", python]
    commands = [f"{'RUN ' if image else ''}{shlex.join([*pip, *words])}" for words in requirements]
    commands += [f"{'ENV' if image else 'export'} {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return f"{'in the Dockerfile: ' if image else ''}{'; '.join(commands)}"


def against(advisory: Advisory, now: Situation, held: Holdings, image: bool) -> str:
    """An advisory's remedy, and the commands that install the versions of it that the facts know."""
    written = cure.written(advisory.change, now)
    cuda = written.get("cuda") or now.cuda or ""
    known = {facts.distribution_of(name, cuda): version for name, version in written.get("pins", {}).items()}
    pins = [f"{name}=={version}" for name, version in known.items() if name]
    whole = [*([f"torch=={written['torch']}"] if "torch" in written else []), *written.get("packages", ())]
    # without dependencies: torch's own metadata may ask for another version of a library
    words = [*([whole] if whole else []), *([["--no-deps", *pins]] if pins else [])]
    env = written.get("env", {})
    return f"{advisory.remedy}; {install(held, image, *words, env=env)}" if words or env else advisory.remedy


def in_profile(advisory: Advisory, now: Situation, asked: str) -> str:
    """The same for an image of a profile's lock: what to write into the profile `asked`."""
    lines = "; ".join(cure.lines(cure.written(advisory.change, now)))
    return f"{advisory.remedy}; in the profile: {lines}; then: envbuild make {asked}" if lines else advisory.remedy
