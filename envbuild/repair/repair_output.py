"""Renders a repair plan: lines for a terminal, and the document for `--json`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild.facts import database
from envbuild.repair.image_repair_plan import ImageRepairPlan
from envbuild.repair.repair_plan import Command, LibraryOutcome, RepairPlan
from envbuild.repair.required_changes import Diagnosis
from envbuild.testrun.json_test_report import ProbeRow
from envbuild.util.json_output_types import AdvisoryRow


@dataclass(frozen=True)
class CommandDocument:
    """A command. `argv`: the program and its arguments; `text`: the same as one line, quoted for a shell; `shell`: true
    if it changes the variables of the shell itself."""

    does: str
    argv: tuple[str, ...]
    text: str
    shell: bool


@dataclass(frozen=True)
class ManualFix:
    """A fault that the user has to fix, and how to fix it."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class FixedProblem:
    """A fault without an advisory that the plan fixes. `id`: that of the audit's finding, driver-too-old, or
    companion-build."""

    id: str
    message: str


@dataclass(frozen=True)
class RepairDocument:
    """The document of `envbuild fix --json`.

    `state`: healthy, fixable or by-hand; after `--apply`, fixed, or by-hand if the user still has to do something, such
    as to set a variable. `profile`: the profile whose probes test the fix.
    `manager`: what manages the environment; for an image, "profile" if it was built from a known profile, otherwise
    "image". `advisories`: the ones that the plan fixes; `problems`: other faults that it fixes; `absent`: the
    advisories that the log shows but that cannot apply to this environment. `overrides`: requirements for [tool.uv]
    override-dependencies of the project. `refused`: why `--apply` would not run the commands. `dockerfile`: the lines
    that build a fixed image; `profile_change`: the lines to write into the profile. `backup`: the folder that keeps the
    replaced files. `probes`: the results in the fixed environment.
    """

    target: str
    state: Literal["healthy", "fixable", "by-hand", "fixed"]
    profile: str | None
    manager: str
    advisories: tuple[AdvisoryRow, ...]
    problems: tuple[FixedProblem, ...]
    absent: tuple[str, ...]
    commands: tuple[CommandDocument, ...]
    overrides: tuple[str, ...]
    libraries: tuple[LibraryOutcome, ...]
    by_hand: tuple[ManualFix, ...]
    notes: tuple[str, ...]
    prove: tuple[str, ...]
    refused: ManualFix | None
    dockerfile: tuple[str, ...] = ()
    profile_change: tuple[str, ...] = ()
    backup: str | None = None
    probes: tuple[ProbeRow, ...] = ()


@dataclass(frozen=True)
class UndoneRepair:
    """The document of `envbuild fix --undo --json`. `restored`: the distributions that were restored; `project`: the
    project files that were restored; `left`: project files that were not, because they changed after the repair."""

    target: str
    state: Literal["undone"]
    restored: tuple[str, ...]
    project: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True)
class ProgramDocument:
    """The document of `envbuild run --json`. `variables`: the values to set, null for a variable to unset; `libraries`:
    the file from which each library should be loaded."""

    target: str
    state: Literal["healthy", "fixable", "by-hand"]
    advisories: tuple[AdvisoryRow, ...]
    commands: tuple[CommandDocument, ...]
    variables: Mapping[str, str | None]
    libraries: Mapping[str, str]


def advisory_rows(diagnosis: Diagnosis) -> tuple[AdvisoryRow, ...]:
    """The advisories that a plan fixes."""
    return tuple(AdvisoryRow(one.id, "affected", one.title, one.remedy) for one in diagnosis.advisories)


def repair_document(plan: RepairPlan, prove: Sequence[str], profile: str | None) -> RepairDocument:
    commands = (CommandDocument(item.does, item.argv, item.text, item.shell) for item in plan.printed)
    return RepairDocument(
        target=plan.target,
        state=plan.state,
        profile=profile,
        manager=plan.manager.kind,
        advisories=advisory_rows(plan.diagnosis),
        problems=tuple(FixedProblem(*problem) for problem in plan.diagnosis.problems),
        absent=tuple(advisory.id for advisory in plan.diagnosis.absent),
        commands=tuple(commands),
        overrides=plan.overrides.requirements if plan.overrides else (),
        libraries=plan.libraries,
        by_hand=tuple(ManualFix(*fix) for fix in plan.diagnosis.by_hand),
        notes=(*plan.warnings, *plan.diagnosis.notes),
        prove=tuple(prove),
        refused=ManualFix(*plan.refused) if plan.refused else None,
    )


def repair_lines(
    plan: RepairPlan, torch: str | None, prove: Sequence[str], apply: str | None, outdated: Sequence[str] = ()
) -> Iterator[str]:
    """The lines of a plan. `prove`: commands that test the fix; `apply`: the command that makes envbuild run the plan,
    None if it runs the plan now; `outdated`: lines in files of the project that the commands do not change."""
    yield f"Environment: {plan.manager.prefix} ({plan.manager.label}: {plan.manager.reason})"
    yield from _judged(plan.diagnosis, torch, "--python")
    if plan.diagnosis.healthy:
        return
    yield from _loaded(plan.libraries)
    if plan.printed or plan.overrides:
        yield "Fix:"
        yield from _commands(plan)
    for what, remedy in plan.diagnosis.by_hand:
        yield f"By hand: {what}"
        yield f"  fix: {remedy}"
    for warning in plan.warnings:
        yield f"Warning: {warning}"
    yield from (f"Not changed by these commands: {text}" for text in outdated)
    if apply and plan.refused and (plan.printed or plan.overrides or not plan.diagnosis.changes.empty):
        yield f"--apply would refuse: {plan.refused[0]}; {plan.refused[1]}"
    elif apply and (plan.printed or plan.overrides):
        yield "To let envbuild run these commands, back up the replaced files and test the result:"
        yield f"  {apply}"
    if prove:
        yield "Prove:"
        yield from (f"  {command}" for command in prove)


def image_repair_document(plan: ImageRepairPlan, commands: Sequence[Command], prove: Sequence[str]) -> RepairDocument:
    """The document of a plan for an image. `commands`: what builds the fixed image."""
    return RepairDocument(
        target=plan.image,
        state=plan.state,
        profile=plan.profile,
        manager="profile" if plan.profile else "image",
        advisories=advisory_rows(plan.diagnosis),
        problems=tuple(FixedProblem(*problem) for problem in plan.diagnosis.problems),
        absent=tuple(advisory.id for advisory in plan.diagnosis.absent),
        commands=tuple(CommandDocument(item.does, item.argv, item.text, item.shell) for item in commands),
        overrides=(),
        libraries=plan.libraries,
        by_hand=tuple(ManualFix(*fix) for fix in plan.diagnosis.by_hand),
        notes=(*plan.warnings, *plan.diagnosis.notes),
        prove=tuple(prove),
        refused=None,
        dockerfile=plan.dockerfile,
        profile_change=plan.profile_change,
    )


def image_repair_lines(
    plan: ImageRepairPlan, torch: str | None, commands: Sequence[Command], prove: Sequence[str]
) -> Iterator[str]:
    """The lines of a plan for an image. `commands`: what builds the fixed image; `prove`: commands that check it."""
    origin = f"built from the lock of profile {plan.profile}" if plan.profile else "of no known profile"
    yield f"Image: {plan.image} ({origin})"
    yield from _judged(plan.diagnosis, torch, "--image")
    if plan.diagnosis.healthy:
        return
    yield from _loaded(plan.libraries)
    if plan.dockerfile:
        yield "Fix: save these lines as fixed/Dockerfile, in a new folder"
    elif plan.rebuild:
        yield f"Fix: in the profile {plan.profile}" if plan.profile_change else "Fix: build the image again"
    yield from (f"  {line}" for line in plan.dockerfile or plan.profile_change)
    for command in commands:
        yield from command_lines(command)
    for what, remedy in plan.diagnosis.by_hand:
        yield f"By hand: {what}"
        yield f"  fix: {remedy}"
    for warning in plan.warnings:
        yield f"Warning: {warning}"
    if prove:
        yield "Check the new image:"
        yield from (f"  {command}" for command in prove)


def _judged(diagnosis: Diagnosis, torch: str | None, option: str) -> Iterator[str]:
    """The lines on what was judged, and what was found. `option`: names a different environment or image."""
    gpus = ", ".join(gpu.id for gpu in diagnosis.gpus) or "GPU unknown"
    yield f"Judged for: {gpus}; torch {torch or 'unknown'}"
    yield from _found(diagnosis, option)
    if diagnosis.healthy:
        yield "Nothing to fix."


def _found(diagnosis: Diagnosis, option: str) -> Iterator[str]:
    for advisory in diagnosis.advisories:
        yield f"Found: {advisory.id} ({advisory.severity}): {advisory.title}"
        yield f"  sources: {', '.join(advisory.cite[:2])}"
    for ident, text in diagnosis.problems:
        yield f"Found: {ident}: {text}"
    for advisory in diagnosis.absent:
        by_version = advisory.id in diagnosis.absent_by_version
        versions = "the versions that are installed now do not have this fault"
        text = versions if by_version else "the packages or the GPU here do not match"
        elsewhere = f"if the job ran elsewhere, say where with {option}"
        if by_version and set(advisory.change.pins) & set(database.libraries()):
            elsewhere += (
                "; if it ran here, LD_LIBRARY_PATH or LD_PRELOAD of the job script may select an old copy: run "
                "envbuild audit in that script"
            )
        yield f"Ruled out here: {advisory.id}, which the log shows; {text}: {elsewhere}"
    for note in diagnosis.notes:
        yield f"Note: {note}"


def _loaded(libraries: Sequence[LibraryOutcome]) -> Iterator[str]:
    for row in libraries:
        measured = "" if row.measured or row.before is None else ", by the loader's rules"
        way = f", by {row.before_way}" if row.before_way else ""
        version = row.before_version or "version unknown"
        yield f"Loaded now: {row.before or f'no {row.library}'} ({version}{way}{measured})"
        if row.after:
            yield f"Afterwards: {row.after} ({row.after_version or 'version unknown'}, by {row.after_way})"


def _commands(plan: RepairPlan) -> Iterator[str]:
    if plan.overrides:
        yield f"  # in {plan.overrides.file}, so that uv sync keeps the new version:"
        yield "  [tool.uv]"
        yield f"  override-dependencies = {json.dumps(plan.overrides.requirements)}"
    for command in plan.printed:
        yield from command_lines(command)


def command_lines(command: Command) -> Iterator[str]:
    """Yield a comment that says what a command does, then the command."""
    yield f"  # {command.does}"
    yield f"  {command.text}"
