from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.command_options import json_option, torch_index_option
from envbuild.cli.console import emit
from envbuild.cli.output_files import FILE, STDOUT, prepare, write
from envbuild.util.errors import CheckFailed, UsageError, printable
from envbuild.util.json_output_types import plain

if TYPE_CHECKING:
    from envbuild.doctor.check_result import Check
    from envbuild.doctor.machine_checks_and_suitability import MachineDocument
    from envbuild.doctor.node_comparison import ClusterDocument


@click.command("doctor", short_help="Check this machine and its GPUs, or compare a cluster's nodes.")
@click.option(
    "--for",
    "name",
    metavar="NAME",
    help="Check whether the machine suits this profile; print yes, or no with the reasons.",
)
@click.option(
    "--cluster", metavar="HOSTS",
    help="Compare nodes. HOSTS is a YAML file with hosts: [...], or a folder of files that doctor -o wrote, or the "
    "word slurm for the nodes of the current job.",
)  # fmt: skip
@click.option(
    "-o", "--output", "output", type=FILE, metavar="FILE",
    help="Also write the description as JSON; with -, write only it, to stdout.",
)  # fmt: skip
@click.option(
    "--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path("/"), metavar="FOLDER",
    help="In a container: the folder with the host's /proc, /sys and /dev.",
)  # fmt: skip
@torch_index_option
@json_option
def command(name: str | None, cluster: str | None, output: Path | None, root: Path, as_json: bool) -> None:
    """Check engine, driver, GPUs, memory, disks, network and clock, in seconds; change nothing.

    Each check is ok, warn, fail or skipped; warn and fail come with a remedy. Exit 5 if a check fails; with --for, exit
    5 only if the machine does not suit the profile. Only the hosts that pip, uv and docker use are contacted; with
    --for, the package indexes are also asked for every locked wheel.
    Example: envbuild doctor --for h20
    """
    if cluster is not None and (name is not None or root != Path("/")):
        raise UsageError("--cluster goes with neither --for nor --root", hint="envbuild doctor --cluster hosts.yaml")
    prepare(output, as_json=as_json)
    begin = time.monotonic()
    checks, found = _cluster(cluster) if cluster is not None else _machine(name, root)
    document = plain(found)
    if output is not None:
        write(output, json.dumps(document, indent=1) + "\n")
    failed = _failed(checks, name)
    if as_json and not failed:
        emit(document)
    elif not as_json and output != STDOUT:
        _show(checks, time.monotonic() - begin)
    if failed:
        remedies = dict.fromkeys(f"{check.id}: {check.remedy}" for check in failed if check.remedy)
        hint = (
            "\n".join(remedies) if as_json or output == STDOUT else None
        )  # otherwise each remedy is printed below its check
        error = CheckFailed(_message(failed, name), hint=hint or None)
        error.partial = document
        raise error


def _message(failed: Sequence[Check], name: str | None) -> str:
    if name is not None:
        return f"this machine does not suit {name}: {'; '.join(check.detail.removeprefix('no: ') for check in failed)}"
    return f"failed checks: {', '.join(check.id for check in failed)}"


def _machine(name: str | None, root: Path) -> tuple[list[Check], MachineDocument]:
    from envbuild.doctor import (
        machine_checks_and_suitability,
        machine_reader,
        profile_hardware_needs,
        wheel_availability,
    )
    from envbuild.resolve import profile_reader_and_overrides

    loaded = profile_reader_and_overrides.load(name) if name else None  # an invalid profile stops here
    needs = profile_hardware_needs.needs_of(loaded) if loaded else None
    host = machine_reader.read(root)
    checks = machine_checks_and_suitability.check_machine(
        host, [needs] if needs else list(profile_hardware_needs.all_needs())
    )
    if loaded and needs:
        checks.append(wheel_availability.check_wheels(loaded, checks))
        checks.append(machine_checks_and_suitability.suits(host, needs, checks))
    return checks, machine_checks_and_suitability.document(host, checks, loaded.name if loaded else None)


def _cluster(source: str) -> tuple[list[Check], ClusterDocument]:
    from envbuild.doctor import node_comparison, remote_node_reader

    found = remote_node_reader.gather_nodes(source)
    checks = node_comparison.compare_nodes(found)
    return checks, node_comparison.document(found, checks)


def _failed(checks: Sequence[Check], name: str | None) -> list[Check]:
    """Return the failed checks. With --for, only the check `profile` counts, since a broken GPU does not matter for a
    CPU profile."""
    return [check for check in checks if check.status == "fail" and (name is None or check.id == "profile")]


def _show(checks: Sequence[Check], seconds: float) -> None:
    width = max(len(check.id) for check in checks)
    for check in _folded(checks):
        click.echo(printable(f"{check.status:<7}  {check.id:<{width}}  {check.detail}"))
        if check.remedy:
            click.echo(printable(f"{'':<7}  {'':<{width}}  fix: {check.remedy}"))
    counts = Counter(check.status for check in checks)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail", "skipped") if counts[status])
    click.echo(f"{summary}; {seconds:.1f} s")


_FEW = 2


def _folded(checks: Sequence[Check]) -> Iterator[Check]:
    """Replace several skipped checks of one kind that have the same reason by one. So on a machine without a GPU, all
    checks gpu.* become one line."""
    reasons = Counter(map(_kind, checks))
    shown: set[tuple[str, str]] = set()
    for check in checks:
        kind = _kind(check)
        if check.status != "skipped" or not kind[0] or reasons[kind] <= _FEW:
            yield check
        elif kind not in shown:
            shown.add(kind)
            yield replace(check, id=f"{kind[0]}.*", detail=f"{check.detail} ({reasons[kind]} checks)")


def _kind(check: Check) -> tuple[str, str]:
    return check.id.rpartition(".")[0], f"{check.status} {check.detail}"
