from __future__ import annotations

from dataclasses import dataclass

import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.facts import database, gpu_name_lookup
from envbuild.facts.advisory_model import Advisory, Situation
from envbuild.lock import lock_file
from envbuild.resolve import plan_resolver, profile_reader_and_overrides, torch_compatibility_and_advisories
from envbuild.util.errors import ProfileError, UsageError
from envbuild.util.json_output_types import AdvisoryRow


@dataclass(frozen=True)
class KnownAdvisoryRow(AdvisoryRow):
    """A known advisory. `sources`: links to descriptions of the fault."""

    sources: tuple[str, ...]


@dataclass(frozen=True)
class AdvisoryList:
    """The document of `advisories`. `profile`, `gpu`: the profile or the GPU that NAME means. `state` of an advisory:
    its effect where it applies; if NAME is a profile, its effect on this profile."""

    profile: str | None
    gpu: str | None
    advisories: tuple[KnownAdvisoryRow, ...]


@click.command("advisories", short_help="List the known faults of GPU software, with their fixes.")
@click.argument("name", required=False, metavar="[NAME]")
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List every advisory: id, severity, the fault and its fix. With the name of a GPU, list those that may apply on
    this GPU. With the name of a profile, list those that apply to its versions. If a GPU and a profile have the same
    name, such as h20, the name means the GPU.

    Example: envbuild advisories
    Example: envbuild advisories h20
    """
    found = _all() if name is None else _of(name)
    if as_json:
        emit(found)
        return
    known = {item.id: item for item in database.advisories()}
    for row in found.advisories:
        item, accepted = known[row.id], f" (accepted: {row.reason})" if row.state == "accepted" else ""
        click.echo(f"{item.severity:<7} {row.id:<32} {item.title}{accepted}\n{'':<40} fix: {row.remedy}")
    if not found.advisories:
        click.echo(f"no known fault for {name}")


def _all() -> AdvisoryList:
    return AdvisoryList(None, None, tuple(map(_row, database.advisories())))


def _row(item: Advisory) -> KnownAdvisoryRow:
    state = torch_compatibility_and_advisories.STATES[item.severity]
    return KnownAdvisoryRow(item.id, state, item.title, item.remedy, item.cite)


def _of(name: str) -> AdvisoryList:
    """Return the advisories for the GPU or the profile that a name means. Raises UsageError for any other name."""
    found = gpu_name_lookup.candidates(name)
    if len(found) > 1:
        raise UsageError(f"{name!r} is the name of several GPUs: {', '.join(gpu.id for gpu in found)}")
    if found:
        on_it = Situation(gpus=found)
        rows = (item for item in database.advisories() if item.standing(on_it) != "contradicted")
        return AdvisoryList(None, found[0].id, tuple(map(_row, rows)))
    try:
        loaded = profile_reader_and_overrides.load(name)
    except ProfileError as error:
        raise UsageError(f"{name!r} names neither a GPU nor a profile: {error.message}", hint=error.hint) from None
    plan = plan_resolver.resolve(loaded)
    locked = lock_file.read(loaded.known_lock)
    choice = plan.choice.locked(locked.versions) if locked and not locked.stale(plan) else plan.choice
    cited = {item.id: item.cite for item in database.advisories()}
    applied = (KnownAdvisoryRow(**vars(row), sources=cited[row.id]) for row in choice.advisories)
    return AdvisoryList(loaded.name, None, tuple(applied))
