from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli import audit as audit_command
from envbuild.cli.command_options import json_option, judged_gpus_option
from envbuild.cli.console import emit
from envbuild.util.errors import CheckFailed, EnvbuildError, FileError, UsageError, printable

if TYPE_CHECKING:
    from envbuild.audit.collected_environment import Holdings
    from envbuild.explain.cause_ranking import Explanation
    from envbuild.facts.gpu_fact_types import Gpu
    from envbuild.repair.repair_output import RepairDocument
    from envbuild.repair.repair_plan import RepairPlan
    from envbuild.testrun.run_result import TestRun

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,500}")  # a text that is one word of a Dockerfile


@click.command("fix", short_help="Show or run the commands that fix an environment.")
@click.argument("logs", metavar="[LOG...]", nargs=-1)
@click.option("--python", metavar="ENV", help="An interpreter, or the folder of an environment.")
@click.option("--here", is_flag=True, help="The shell's active environment, else that of python3 on PATH.")
@click.option(
    "--image",
    metavar="REF",
    help="An image in this machine's engine. Prints the lines of a Dockerfile, or the change of its profile.",
)
@click.option(
    "--apply", "applied", is_flag=True, help="Run the commands, keep the replaced files, and test the result."
)
@click.option("--undo", is_flag=True, help="Restore every file that the last --apply replaced.")
@judged_gpus_option
@json_option
def command(
    logs: tuple[str, ...],
    python: str | None,
    here: bool,
    image: str | None,
    applied: bool,
    undo: bool,
    gpus: tuple[Gpu, ...],
    as_json: bool,
) -> None:
    """Find what is wrong with an environment or image, and print what fixes it: the exact commands of pip, uv or conda,
    or the lines of a Dockerfile.

    Audits the environment for the GPUs of --gpu, else for those in the logs, else for this machine's. Shows which
    library file is loaded now, and which after the fix. --here is the default.

    Only --apply and --undo change files. --apply works in virtual environments and uv projects. In conda it changes
    only packages that pip installed; for packages that conda installed, the commands are printed. --undo takes the same
    --here or --python as --apply. The exit code is 0 whether there is something to fix or not.

    With --image, the audit runs in a container of the image. If the image was built from the lock of a known profile,
    the fix is a change of the profile.

    Example: envbuild fix train.log --here
    Example: envbuild fix --here --gpu h20
    Example: envbuild fix train.log --python .venv --apply
    Example: envbuild fix --python .venv --undo
    Example: envbuild fix train.log --image team/train:1
    """
    if python and here:
        raise UsageError("--here and --python name two environments: give one of them")
    if image and (python or here or applied or undo):
        text = "--image is for an image, which is fixed by building a new one: leave out"
        raise UsageError(
            f"{text} --python, --here, --apply and --undo", hint=shlex.join(["envbuild", "fix", "--image", image])
        )
    if image:
        _show_image_fix(image, logs, gpus, as_json)
        return
    if undo:
        if logs or applied or gpus:
            raise UsageError("--undo takes only an environment: --here or --python ENV")
        _undo(python, as_json)
        return
    plan, held = planned_repair(logs, python, gpus)
    from envbuild.repair import repair_output

    prove, profile = environment_probe_commands(plan)
    torch = (held.torch and held.torch.version) or held.installed.get("torch")
    outdated = [] if applied else _planned_outdated_requirements(plan, held)
    if not as_json:
        again = None if applied else shlex.join(plan.source.fix("--apply"))
        for line in repair_output.repair_lines(plan, torch, prove, again, outdated):
            click.echo(printable(line))
        if other := _line_for_driver(plan, profile):
            click.echo(f"Or start again, with a profile for this driver: {other}")
    document = repair_output.repair_document(plan, prove, profile)
    document = replace(document, notes=(*document.notes, *outdated))
    if applied and not plan.diagnosis.healthy:
        document = _apply(plan, held, document, as_json)
    if as_json:
        emit(document)


def _line_for_driver(plan: RepairPlan, profile: str | None) -> str | None:
    """If the driver is too old for the installed torch, return the commands that install a profile for the same GPU
    (such as h20-cu12 for h20) that supports the driver. Return None otherwise, and if a profile is invalid."""
    from envbuild.facts.log_signatures import DRIVER_TOO_OLD
    from envbuild.profile import profile_and_lock_name_lookup
    from envbuild.resolve import cuda_line_lookup

    driver = plan.diagnosis.driver
    if not profile or not driver or all(ident != DRIVER_TOO_OLD for ident, _ in plan.diagnosis.problems):
        return None
    try:
        lines = cuda_line_lookup.gpu_lines(profile)
    except EnvbuildError:
        return None
    fitting = next((line.profile for line in lines if line.refusal(driver) is None), None)
    if fitting is None:
        return None
    install = f"envbuild install {fitting} NEW_FOLDER"
    if fitting in profile_and_lock_name_lookup.profile_names():
        return install
    return f"envbuild init {fitting}; envbuild lock {fitting}; {install}"


def _show_image_fix(reference: str, logs: tuple[str, ...], gpus: Sequence[Gpu], as_json: bool) -> None:
    """Print how to fix an image of the engine."""
    from envbuild.audit import environment_audit, image_collector
    from envbuild.image.docker_engine import Engine
    from envbuild.repair import image_repair_plan, repair_output
    from envbuild.repair.repair_plan import Command

    if not _IMAGE.fullmatch(reference):
        raise UsageError(f"{reference[:200]!r} is not the name of an image", hint="docker image ls")
    found, engine = read_explanation(logs), Engine()
    image = engine.get(reference)
    wanted = image_repair_plan.expected_in_image(audit_command.contents_by_label(image), found, gpus)
    click.echo(f"reading libraries, packages and files of {reference}; this can take a minute", err=True)
    held = image_collector.collect_from_image(engine, image, reference, audit_command.wheel_contents(wanted))
    if held.torch is None:
        raise FileError(f"torch is not installed in {reference}", hint="name another image")
    plan = image_repair_plan.plan_image_repair(environment_audit.assess(reference, held, wanted), found, image.user)
    commands, prove = [], []
    if plan.profile and plan.rebuild:
        commands = [Command("build and test the image again", ("envbuild", "make", *shlex.split(plan.profile)))]
    elif plan.dockerfile:
        fixed = image_repair_plan.fixed_image_name(reference)
        commands = [Command("build the fixed image", ("docker", "build", "--tag", fixed, "fixed"))]
        models = [word for gpu in plan.diagnosis.gpus for word in ("--gpu", gpu.id)]
        prove = [shlex.join(["envbuild", "audit", fixed, *models])]
    if as_json:
        emit(repair_output.image_repair_document(plan, commands, prove))
        return
    for line in repair_output.image_repair_lines(plan, held.torch.version, commands, prove):
        click.echo(printable(line))


def _apply(plan: RepairPlan, held: Holdings, document: RepairDocument, as_json: bool) -> RepairDocument:
    """Run the plan, check which library files are loaded afterwards, and run the probes. Return the document with the
    results."""
    from envbuild.repair import repair_run
    from envbuild.testrun import json_test_report
    from envbuild.util.json_output_types import plain

    def say(text: str) -> None:
        click.echo(printable(f"  {text}"), err=True)

    repair_run.require_changeable(plan, held)
    megabytes = round(repair_run.needed_space(plan, held) / 1e6)
    size = f"needs about {megabytes} MB of disk, if the new files are as large as the old ones; "
    say(f"{size if megabytes else ''}replaced files are kept until --undo")
    backup = repair_run.apply_repair(plan, held, say)
    _, after = audit_command.collect_from_environment(plan.target)
    outdated = _outdated_requirements(plan, held.installed, after.installed)
    left = plan.by_user or plan.diagnosis.by_hand
    document = replace(
        document,
        state="by-hand" if left else "fixed",
        backup=str(backup.folder),
        notes=(*document.notes, *outdated),
    )
    try:
        run: str | TestRun = "the variables of the fix must be set first"
        if not plan.by_user:
            repair_run.require_loaded(plan, after)
            run = repair_run.run_probes(plan, after)
        if isinstance(run, str):
            document = replace(document, notes=(*document.notes, f"not tested: {run}"))
        else:
            document = replace(document, probes=tuple(map(json_test_report.probe_row, run.results)))
            repair_run.require_probes_passed(run, plan)
    except CheckFailed as error:
        error.partial = plain(replace(document, state=plan.state))  # not "fixed"
        raise
    if not as_json:
        for line in _applied_lines(plan, document, run, after):
            click.echo(printable(line))
        for text in outdated:
            click.echo(printable(f"Not changed: {text}"))
    return document


def _applied_lines(plan: RepairPlan, document: RepairDocument, run: str | TestRun, after: Holdings) -> Iterator[str]:
    """Describe an applied plan. `run`: the probes that ran, or why none did."""
    done = "Changed, but not yet fixed: see below" if document.state == "by-hand" else "Fixed"
    if isinstance(run, str):
        prove = f"; on the GPU machine run: {document.prove[0]}" if document.prove else ""
        yield f"{done}; not tested: {run}{prove}"
    else:
        yield f"{done}."
    yield f"Replaced files: {document.backup}; to restore them: {_undo_line(plan)}"
    for advisory in plan.diagnosis.absent:
        yield f"Not part of this fix: {advisory.id}, which the log shows, cannot apply to this environment"
    for command in plan.by_user:
        yield f"Still to do: {command.does}: {command.text}"
    for problem, remedy in plan.diagnosis.by_hand:
        yield f"Still to do by hand: {problem}; fix: {remedy}"
    for row in plan.libraries:
        loaded = next((copy for copy in after.libraries if copy.loaded and copy.name == row.library), None)
        yield f"Loaded now: {loaded}" if loaded else f"{row.library}: not loaded by import torch"
    for result in () if isinstance(run, str) else run.results:
        yield f"{result.probe}: {result.status}{f': {result.reason}' if result.reason else ''}"


def _planned_outdated_requirements(plan: RepairPlan, held: Holdings) -> list[str]:
    """Describe the lines in the project's own files that will exclude the installed version after the commands."""
    from envbuild.repair import project_requirement_check

    if not plan.printed:
        return []
    planned = project_requirement_check.planned_versions(held.installed, plan.diagnosis.changes)
    return _outdated_requirements(plan, held.installed, planned)


def _outdated_requirements(plan: RepairPlan, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe the lines in the project's own files that exclude a new version. uv and Poetry keep the files of their
    projects up to date."""
    from envbuild.repair import project_requirement_check

    if plan.manager.kind not in ("pip", "uv"):
        return []
    return project_requirement_check.outdated_requirements(plan.manager.prefix.parent, before, after)


def _undo_line(plan: RepairPlan) -> str:
    from envbuild.repair import file_backup

    return file_backup.undo_command(plan.manager.prefix)


def _undo(python: str | None, as_json: bool) -> None:
    from envbuild.repair import repair_output, repair_run
    from envbuild.runners import host_runner

    found = host_runner.find_interpreter(python or audit_command.nearest_python())
    prefix = host_runner.environment_folder(found)
    undone = repair_run.undo_repair(prefix, lambda text: click.echo(printable(text), err=True))
    names = tuple(sorted(undone.distributions))
    if as_json:
        emit(repair_output.UndoneRepair(str(found), "undone", names, undone.project, undone.left))
        return
    restored = ", ".join((*names, *undone.project))
    click.echo(
        printable(f"Restored: {restored}" if restored else "The repair changed no distribution and no project file.")
    )
    for file in undone.left:
        click.echo(printable(f"Not restored, because it was changed after --apply: {file}"))


def read_explanation(logs: tuple[str, ...]) -> Explanation | None:
    """Return the explanation of the logs; None if no log is given."""
    if not logs:
        return None
    from envbuild.explain import cause_ranking, log_files_and_folders_reader

    log, notes = log_files_and_folders_reader.read_logs(logs)
    for note in notes:
        click.echo(printable(note), err=True)
    return cause_ranking.explain(log)


def planned_repair(
    logs: tuple[str, ...], python: str | None, gpus: Sequence[Gpu], *, files_only: bool = False
) -> tuple[RepairPlan, Holdings]:
    """Return the repair plan for an environment, and the environment's contents. `logs`: from that environment; `gpus`:
    the GPUs to judge it for, as for expected_hardware_from. `files_only`: as in required_changes.diagnose. Raises
    FileError if torch is not installed there."""
    from envbuild.audit import environment_audit
    from envbuild.repair import repair_plan, required_changes
    from envbuild.repair.repair_plan import DiagnosisInput

    found = read_explanation(logs)
    interpreter, held = audit_command.collect_from_environment(python or audit_command.nearest_python())
    if held.torch is None:
        text = f"torch is not installed in the environment of {interpreter}"
        near = os.access(".venv/bin/python", os.X_OK) and not Path(interpreter).parent.samefile(".venv/bin")
        elsewhere = DiagnosisInput(".venv" if near else "ENV", logs, tuple(gpu.id for gpu in gpus))
        words = elsewhere.run_with_fix() if files_only else elsewhere.fix()
        raise FileError(text, hint=f"name another environment: {shlex.join(words)}")
    hardware = required_changes.expected_hardware_from(held, found, gpus)
    audited = environment_audit.assess(str(interpreter), held, hardware)
    named = [gpu.id for gpu in gpus]
    return repair_plan.plan_repair(audited, found, logs=logs, gpus=named, files_only=files_only), held


def environment_probe_commands(plan: RepairPlan) -> tuple[list[str], str | None]:
    """Return the command that tests the fix in the plan's environment, and the profile that it uses.

    The command is in a list, which is empty if no probe can test the fix. The profile is that of the first
    diagnosed GPU that has one. If no GPU has one, the returned profile is None, and the command contains the
    placeholder NAME.
    """
    from envbuild.profile import profile_and_lock_name_lookup

    known = profile_and_lock_name_lookup.profile_names()
    profile = next((gpu.id for gpu in plan.diagnosis.gpus if gpu.id in known), None)
    probes = [word for probe in plan.diagnosis.probes for word in ("--probe", probe)]
    if not probes:
        return [], profile
    return [shlex.join(["envbuild", "test", profile or "NAME", "--python", plan.target, *probes])], profile
