from typing import Any

import click

from envbuild.commands.console import emit, json_option, pin_option
from envbuild.errors import EnvbuildError
from envbuild.plan import facts, lock, resolve, sources


@click.command("show", short_help="Pins and the reason for each.")
@click.argument("name", required=False)
@pin_option
@json_option
def command(name: str | None, pins: dict[str, str], as_json: bool) -> None:
    """Show every pin of a profile and where it comes from; without a name, all profiles and their state.

    Example: envbuild show h20 --pin cublas=12.1.3.1
    """
    if name is None:
        _all(as_json)
        return
    document = _document(name, pins)
    if as_json:
        emit(document)
        return
    click.echo(f"{document['profile']}: {document['description']}")
    if document["gpus"]:
        click.echo(f"  for {', '.join(document['gpus'])}; driver {document['driver']} or newer")
    for pin, version in document["pins"].items():
        click.echo(f"  {pin:<20} {version or '-':<24} {document['reasons'].get(pin, '')}".rstrip())
    for item in document["advisories"]:
        click.echo(f"  {item['state']}: {item['id']}: {item['reason']}")
    click.echo(f"  lock: {document['lock']['state']}")


def _document(name: str, pins: dict[str, str]) -> dict[str, Any]:
    source = sources.load(name, pins)
    plan = resolve.resolve(source)
    locked = lock.read(source.known_lock)
    if locked and locked.stale(plan):
        locked = None  # what was locked for other wishes is no pin of these
    versions = locked.versions if locked else {}
    choice = resolve.as_locked(plan, versions) if locked else plan.choice
    libraries = choice.situation.libraries
    found: dict[str, str | None] = {
        "python": plan.python,
        "cuda": choice.situation.cuda,
        "torch": source.profile.torch,
        **{short: libraries.get(short) for short in ("cublas", "cudnn", "nccl")},
        "apex": None,
    }
    found |= {short: version for short, version in libraries.items() if short not in found}
    found |= {name: version for name, version in versions.items() if not facts.library_of(name)}
    return {
        "profile": source.name,
        "description": source.profile.description,
        "gpus": [gpu.id for gpu in choice.situation.gpus],
        "driver": choice.situation.driver,
        "pins": found,
        "reasons": {**dict.fromkeys([*versions, *libraries], "locked"), **plan.reasons},
        "advisories": choice.states,
        "lock": {"id": locked.id if locked else None, "state": _state(lock.read(source.known_lock), plan)},
    }


def _state(locked: lock.Lock | None, plan: resolve.Plan) -> str:
    if locked is None:
        return "missing"
    stale = locked.stale(plan)
    return f"out of date ({', '.join(stale)})" if stale else f"current {locked.short}"


def _all(as_json: bool) -> None:
    rows: list[dict[str, str | None]] = []
    for name in sources.names():
        try:
            source = sources.load(name)
            plan = resolve.resolve(source)
            rows.append({"profile": name, "torch": source.profile.torch, "python": plan.python,
                         "lock": _state(lock.read(source.known_lock), plan)})  # fmt: skip
        except EnvbuildError as error:
            rows.append({"profile": name, "torch": None, "python": None, "lock": error.message})
    if as_json:
        emit({"profiles": rows})
        return
    for row in rows:
        click.echo(
            f"{row['profile']:<20} torch {row['torch'] or '-':<14} python {row['python'] or '-':<6} {row['lock']}"
        )
