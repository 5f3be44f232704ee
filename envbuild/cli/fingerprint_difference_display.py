"""Prints the result of `envbuild diff` for two fingerprints: where the results of two GPUs diverge."""

from collections.abc import Iterator
from pathlib import Path

import click

from envbuild.cli.console import emit
from envbuild.report import fingerprint_comparison
from envbuild.report.fingerprint_comparison import Comparison, FingerprintRow, Pass
from envbuild.testrun import fingerprint_reader

_ROW = "{:<24} {:<15} {:<10} {:>9} {:>9} {:>9} {:>9}"


def show_difference(a: Path, b: Path, as_json: bool) -> None:
    """Print the first operation where two fingerprints diverge, by how much, and whether that is rounding or a fault.

    Raises FingerprintError for an invalid file, UsageError for two files that cannot be compared.
    """
    read = {"a": fingerprint_reader.read(a), "b": fingerprint_reader.read(b)}
    result = fingerprint_comparison.compare_fingerprints(read["a"], read["b"])
    if as_json:
        rows = (FingerprintRow(str(file), read[name].machine) for name, file in (("a", a), ("b", b)))
        emit(fingerprint_comparison.document(result, *rows))
        return
    for name, found in read.items():
        click.echo(f"{name}: {fingerprint_comparison.machine_line(found.machine)}")
    for line in _lines(result):
        click.echo(line)


def _lines(result: Comparison) -> Iterator[str]:
    yield f"verdict: {result.verdict}"
    if result.first:
        yield from _pass_lines("first", result.first)
    if result.growth:
        yield from _pass_lines(
            "correct on golden input, wrong on the output of the operations before it", result.growth
        )
    yield from (f"note: {note}" for note in result.notes)
    differing = [found for row in result.rows for found in row.passes if found.kind != fingerprint_comparison.IDENTICAL]
    if differing:
        yield _ROW.format("operation", "pass", "kind", "ratio a", "ratio b", "drift a", "drift b")
        yield from map(_row, differing)
    kinds = [row.kind for row in result.rows]
    counts = [f"{kinds.count(kind)} {kind}" for kind in fingerprint_comparison.KINDS if kind in kinds]
    yield ", ".join([f"{len(kinds)} operations", *counts, *([f"{kinds.count(None)} not compared"] * (None in kinds))])


def _pass_lines(title: str, found: Pass) -> Iterator[str]:
    yield f"{title}: {found.op}, {found.name}: {found.kind}, {found.apart:.2g} apart"
    yield from (f"  {name}: {side.reason or 'within its tolerance'}" for name, side in found.sides.items() if found.off)


def _row(found: Pass) -> str:
    figures = (found.a.ratio, found.b.ratio, found.a.drift, found.b.drift)
    return _ROW.format(
        found.op, found.name, found.kind, *("" if value is None else f"{value:.2g}" for value in figures)
    ).rstrip()
