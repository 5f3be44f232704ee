from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from envbuild.cli import fingerprint_difference_display
from envbuild.cli.command_options import json_option
from envbuild.cli.console import Console, emit, table
from envbuild.lock import lock_file
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.report import profile_and_image_diff
from envbuild.report.profile_and_image_diff import ChangedValue, Diff, DiffSide, Pair
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.errors import LockError, UsageError, printable

_LOCK = ".lock.yaml"


@click.command("diff", short_help="Compare two profiles, locks, images, or fingerprints of GPUs.")
@click.argument("a")
@click.argument("b")
@click.option(
    "--files",
    is_flag=True,
    help="For two images: show which files of a layer differ, or whether only their order differs.",
)
@json_option
def command(a: str, b: str, files: bool, as_json: bool) -> None:
    """Show what changes from A to B: versions, environment, advisories, layers and the bytes to fetch for them.

    Each is a profile (h20, path/to/mine.yaml), a lock (old.lock.yaml), an image of the engine (anything with a colon,
    such as name:tag or sha256:...) or a fingerprint (a .json file of `envbuild test --fingerprint`). The contents of
    images are read in a container.

    For two fingerprints, it finds the first operation whose results diverge, by how much, and why. The verdict is
    identical, rounding, precision (as if computed in fewer bits than the dtype has) or breakage; the exit code is 0 for
    each. In the table, ratio is the largest error divided by its tolerance, and drift the relative distance from the
    golden output.

    Example: envbuild diff a100 h20
    Example: envbuild diff a100.json v100.json
    """
    if _is_fingerprint(a) != _is_fingerprint(b):
        raise UsageError(
            "a fingerprint can only be compared with a fingerprint", hint="envbuild diff a100.json v100.json"
        )
    if files and not (_is_image(a) and _is_image(b)):
        raise UsageError("--files compares two images of the engine", hint="envbuild diff --files name:tag sha256:...")
    if _is_fingerprint(a):
        fingerprint_difference_display.show_difference(Path(a), Path(b), as_json)
        return
    found = profile_and_image_diff.compare_sides(_side(a), _side(b))
    if files:
        found = replace(found, files=_pairs(a, b))
    if as_json:
        emit(found.document())
        return
    for line in _lines(found):
        click.echo(printable(line))


def _side(name: str) -> DiffSide:
    if name.endswith(_LOCK):
        return profile_and_image_diff.of_lock(name, lock_file.parse(_read(name), name))
    if _is_image(name):
        return _image(name)
    loaded = profile_reader_and_overrides.load(name)
    plan = plan_resolver.resolve(loaded)
    locked = lock_file.current_lock(loaded, plan)
    return profile_and_image_diff.of_lock(loaded.name, locked, plan_resolver.as_locked(plan, locked.versions))


def _is_fingerprint(name: str) -> bool:
    return name.endswith(".json")


def _is_image(name: str) -> bool:
    other = name.endswith(_LOCK) or _is_fingerprint(name)
    return ":" in name and not other and name not in profile_and_lock_name_lookup.profile_names()


def _pairs(a: str, b: str) -> tuple[Pair, ...]:
    from envbuild.image.docker_engine import Engine
    from envbuild.report import image_file_diff

    engine = Engine()
    return image_file_diff.changed_layers(engine, engine.get(a), engine.get(b), Console().say)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        why = "file not found" if isinstance(error, FileNotFoundError) else "is not UTF-8 text"
        raise LockError(f"{name}: {why}") from None


def _image(reference: str) -> DiffSide:
    from envbuild.audit import environment_audit, image_collector
    from envbuild.audit.environment_audit import Expected
    from envbuild.image.docker_engine import Engine

    engine = Engine()
    image = engine.get(reference)
    held = image_collector.collect_from_image(engine, image, reference)
    return profile_and_image_diff.side_of_image(
        reference, image, engine.layer_sizes(image), environment_audit.assess(reference, held, Expected())
    )


def _lines(found: Diff) -> Iterator[str]:
    a, b = found.a, found.b
    if found.same:
        yield f"{a.name} and {b.name} are the same"
    yield from _group("", found.basics)
    yield from _group("packages", found.versions)
    yield from _group("environment", found.environment)
    yield from _group("advisories", found.advisories or ())
    if found.layers:
        # the number of layers of a base image is unknown
        count = "" if b.on_image else f": {len(found.layers)} of {len(b.layers)}"
        yield f"layers of {b.name} that {a.name} does not have{count}"
        yield from (f"  {layer.title:<40} {_megabytes(layer.bytes):>10}".rstrip() for layer in found.layers)
    for pair in found.files or ():
        yield f"layer {pair.layer}: {pair.difference or 'the same files in another order'}"
    for side in (a, b):
        yield f"{side.name}: {side.layer_count}, {_megabytes(side.bytes) or 'unknown size'} {side.unit}"
    if found.only_configuration:
        yield "the layers are the same: they differ only in configuration"
    elif found.new_bytes is not None and not found.same:
        yield f"new in {b.name}: {_megabytes(found.new_bytes)} {b.unit}"


def _group(title: str, changes: Sequence[ChangedValue]) -> Iterator[str]:
    if changes and title:
        yield title
    if changes:
        yield from table([(f"  {change.name}", change.a or "-", "->", change.b or "-") for change in changes])


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f} MB"
