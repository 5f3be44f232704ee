from typing import Any

import click

from envbuild.commands.console import emit, json_option
from envbuild.errors import EnvbuildError
from envbuild.plan import lock, profile, resolve


@click.command("show", short_help="Pins and the reason for each.")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """Show every pin of a profile and where it comes from; without a name, all profiles and their state.

    Example: envbuild show cpu
    """
    if name is None:
        _all(as_json)
        return
    document = _document(name)
    if as_json:
        emit(document)
        return
    click.echo(f"{document['profile']}: {document['description']}")
    for pin, version in document["pins"].items():
        click.echo(f"  {pin:<20} {version or '-':<24} {document['reasons'].get(pin, '')}".rstrip())
    click.echo(f"  lock: {document['lock']['state']}")


def _document(name: str) -> dict[str, Any]:
    source = profile.load(name)
    plan = resolve.resolve(source)
    locked = lock.read(source.known_lock)
    pins: dict[str, str | None] = {
        "python": plan.python,
        "cuda": None,
        "torch": source.profile.torch,
        "cublas": None,
        "cudnn": None,
        "nccl": None,
        "apex": None,
        **({wheel: version for wheel, version in locked.versions.items() if wheel != "torch"} if locked else {}),
    }
    reasons = {**dict.fromkeys(locked.versions if locked else {}, "locked"), **plan.reasons}
    return {
        "profile": source.name,
        "description": source.profile.description,
        "gpus": [],
        "pins": pins,
        "reasons": reasons,
        "advisories": [],
        "lock": {"id": locked.id if locked else None, "state": _state(locked, plan)},
    }


def _state(locked: lock.Lock | None, plan: resolve.Plan) -> str:
    if locked is None:
        return "missing"
    stale = locked.stale(plan)
    return f"out of date ({', '.join(stale)})" if stale else f"current {locked.short}"


def _all(as_json: bool) -> None:
    rows: list[dict[str, str | None]] = []
    for name in profile.names():
        try:
            source = profile.load(name)
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
