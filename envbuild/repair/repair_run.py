"""Runs the commands of a repair plan, backs up the files that they replace, and tests the result. Also undoes a
repair."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.audit import library_and_distribution_findings
from envbuild.audit.collected_environment import Copy, Holdings
from envbuild.facts import database
from envbuild.fetch import wheel_resolution_and_download
from envbuild.profile.model import SelfTest
from envbuild.repair import file_backup, mapped_library_watch, repair_plan, requirement_edits
from envbuild.repair.file_backup import BackupFolder, Restoration
from envbuild.repair.repair_plan import Command, RepairPlan
from envbuild.runners import host_runner
from envbuild.testrun import output_judge, selftest_job
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import Expectations, RunRequest
from envbuild.util import disk_space, process_locks
from envbuild.util.errors import CheckFailed, DiskError, EnvbuildError, FileError
from envbuild.util.host_processes import run

_MOST_NAMED = 5
_LAST_LINES = 8


class RepairRefused(EnvbuildError):
    """envbuild must not change the environment, or cannot change it now."""

    code, kind = 6, "refused"


class RepairFailed(EnvbuildError):
    """A command of the repair failed; the environment's files were restored."""

    code, kind = 6, "repair"


@dataclass(frozen=True)
class ProcessUsing:
    """A running process that has a file of the environment mapped."""

    pid: int
    name: str
    path: str


def needed_space(plan: RepairPlan, held: Holdings) -> int:
    """Estimate the disk space that the repair needs, in bytes: the size of the files to replace. The old files are
    kept, and the new ones are assumed to have the same size."""
    files = file_backup.distribution_files(plan.manager.prefix, repair_plan.package_folders(plan.manager.prefix, held))
    return file_backup.file_sizes(files, plan.touched)


def require_changeable(plan: RepairPlan, held: Holdings) -> None:
    """Raise RepairRefused if envbuild must not run the commands: the plan is refused, a permission is missing, or files
    are in use. Raise DiskError if the disk has too little free space."""
    if plan.refused:
        raise RepairRefused(f"not changed: {plan.refused[0]}", hint=plan.refused[1])
    sites = repair_plan.package_folders(plan.manager.prefix, held)
    if not sites:
        raise RepairRefused(
            f"{plan.manager.prefix} has no package folder of its own",
            hint="name a virtual environment that contains torch",
        )
    files = file_backup.distribution_files(plan.manager.prefix, sites)
    touched = {path for info, paths in files.items() if _of(info, plan.touched) for path in paths}
    edited = {pin.file.parent for pin in plan.metadata}
    folders = {plan.manager.prefix, *map(Path, sites), *edited, *(path.parent for path in touched if path.exists())}
    locked = sorted(str(folder) for folder in folders if not os.access(folder, os.W_OK | os.X_OK))
    if locked:
        raise RepairRefused(
            f"no permission to write to {', '.join(locked[:_MOST_NAMED])}",
            hint=f"repeat it as the owner of the environment{plan.or_unchanged}",
        )
    using = list(processes_using({str(path) for path in touched} | set(plan.diagnosis.changes.leftovers)))
    if using:
        listed = ", ".join(f"{one.name} ({one.pid}) has {one.path}" for one in using[:_MOST_NAMED])
        raise RepairRefused(
            f"files are in use by running processes: {listed}", hint="stop them, then run the command again"
        )
    needed = file_backup.file_sizes(files, plan.touched)
    free = shutil.disk_usage(plan.manager.prefix).free
    if free < needed:
        raise DiskError(
            f"the repair needs about {needed / 1e9:.1f} GB: {disk_space.free_space(plan.manager.prefix)}",
            hint="free disk space, then run the command again",
        )


def _of(info: str, names: frozenset[str]) -> bool:
    return file_backup.name_in_dist_info(info) in names


def processes_using(paths: set[str]) -> Iterator[ProcessUsing]:
    """The other processes that have one of these files mapped, as far as this user may read their maps."""
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            used = mapped_library_watch.all_mapped_files(int(folder.name)) & paths
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if used:
            yield ProcessUsing(int(folder.name), name, min(used))


def apply_repair(plan: RepairPlan, held: Holdings, say: Callable[[str], None]) -> BackupFolder:
    """Run the commands of the plan and return the backup of the files that they replaced. If a command fails, all files
    are restored.

    Raises RepairRefused or DiskError before anything changes, also if the environment changed after `held` was read,
    for example by another repair that this one waited for; FileError if an earlier repair was interrupted; RepairFailed
    if a command fails or writes into a file instead of replacing it.
    """
    prefix = plan.manager.prefix
    with process_locks.exclusive_environment(prefix, say):
        _require_unchanged(plan, held)
        require_changeable(plan, held)
        project = _project_files(plan)
        edited = [file for pin in plan.metadata for file in pin.files]
        others = [*edited, *map(Path, plan.diagnosis.changes.leftovers)]
        backup = file_backup.take_backup(
            prefix, repair_plan.package_folders(plan.manager.prefix, held), others, plan.touched, project
        )
        try:
            _run_all(plan, say)
            damaged = file_backup.written_into(backup, others)
            if damaged:
                raise RepairFailed(f"a command wrote into {', '.join(damaged[:_MOST_NAMED])} instead of replacing it")
            return file_backup.finish_backup(backup, project)
        except BaseException:
            say("restoring the files of the environment")
            file_backup.restore(backup)
            raise


def _require_unchanged(plan: RepairPlan, held: Holdings) -> None:
    """Raise RepairRefused if distributions were installed or removed after `held` was read: the plan is for those."""
    sites = repair_plan.package_folders(plan.manager.prefix, held)
    planned = {(canonicalize_name(one.name), one.version) for one in held.distributions if one.folder in sites}
    found = [one for one in metadata.distributions(path=sites) if one.metadata["Name"]]
    changed = planned ^ {(canonicalize_name(one.metadata["Name"]), str(one.version)) for one in found}
    if changed:
        names = sorted({name for name, _ in changed})
        raise RepairRefused(
            f"{plan.manager.prefix} changed after the fix was planned: {', '.join(names[:_MOST_NAMED])}",
            hint="run the command again: it plans the fix for the present state",
        )


def _project_files(plan: RepairPlan) -> list[Path]:
    """The files of a uv project that the commands may change. For a symbolic link, also the file to which it leads."""
    folder = plan.manager.project if plan.manager.kind == "uv-project" else None
    files = [folder / name for name in file_backup.PROJECT_FILES] if folder else []
    return [*files, *(file.resolve() for file in files if file.is_symlink())]


def _run_all(plan: RepairPlan, say: Callable[[str], None]) -> None:
    if plan.overrides:
        requirement_edits.override_project(plan.overrides.file, plan.overrides.requirements)
    for command in plan.commands:
        if not command.shell:
            _run_one(command, plan, say)
    for pin in plan.metadata:
        if pin.file.is_file():  # uv sync may have replaced torch by the version of the project's lock
            requirement_edits.pin_metadata(pin.file, pin.name, pin.version)


def _run_one(command: Command, plan: RepairPlan, say: Callable[[str], None]) -> None:
    say(command.text)
    argv = list(command.argv)
    if "uv" in argv:
        argv[argv.index("uv")] = str(shutil.which("uv") or wheel_resolution_and_download.uv_binary())
    own = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "VIRTUAL_ENV": None}
    if plan.manager.kind == "uv-project":  # the user's own value may name a different environment
        own["UV_PROJECT_ENVIRONMENT"] = str(plan.manager.prefix)
    done = run(argv, env=own)
    if done.code:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-_LAST_LINES:]
        raise RepairFailed(
            f"{command.text} ended with exit code {done.code}; the environment is as before",
            hint="\n".join(lines) or None,
        )


def require_loaded(plan: RepairPlan, held: Holdings) -> None:
    """Raise CheckFailed unless the planned torch is installed, and torch now loads the planned versions. `held`: the
    environment's contents after the repair."""
    wrong = list(_wrong_torch(plan.diagnosis.changes.torch, held))
    for pin in plan.diagnosis.changes.pins:
        loaded = held.loaded(pin.library)
        if held.torch and held.torch.imported and loaded and not _is(loaded, pin.version):
            wrong.append(f"{pin.library}: {loaded} is loaded, not {pin.version}")
        elif held.installed.get(pin.distribution) != pin.version:
            wrong.append(f"{pin.distribution} is {held.installed.get(pin.distribution, 'absent')}, not {pin.version}")
    if wrong:
        raise CheckFailed("; ".join(wrong), hint=f"undo it: {file_backup.undo_command(plan.manager.prefix)}")


def _wrong_torch(release: str | None, held: Holdings) -> Iterator[str]:
    """Yield the faults of torch after a repair that had to install `release`; none if `release` is None. For example,
    the installed build has no GPU code if the user's settings name a package index for the CPU."""
    if release is None:
        return
    found = held.installed.get("torch", "absent")
    if held.torch is None or not held.torch.imported:
        yield f"torch {found} cannot be imported"
    elif found.partition("+")[0] != release:
        yield f"torch is {found}, not {release}"
    elif not held.torch.cuda:
        yield f"torch {found} has no GPU code: is the package index of pip or uv the one for the CPU?"


def _is(copy: Copy, version: str) -> bool:
    """Whether a library has this version. The version that a library itself reports may have fewer parts, such as
    12.4.5 for 12.4.5.8."""
    return copy.version is not None and library_and_distribution_findings.agree(copy.version, version)


def run_probes(plan: RepairPlan, held: Holdings) -> TestRun | str:
    """Run, in the environment, the probes that the plan's advisories name. Return the run, or the reason why they
    cannot run here."""
    probes = plan.diagnosis.probes
    if not probes:
        return "no probe detects this fault"
    if held.torch is None or not held.torch.imported:
        return "torch cannot be imported"
    if not held.machine.gpus:
        return "this machine has no GPU"
    wanted = SelfTest(require=probes)
    names = [name for gpu in database.gpus().values() for name in gpu.all_names if name in held.machine.gpus]
    if not names:
        return f"unknown GPU: {', '.join(held.machine.gpus)}"
    version = ".".join(held.python.version.split(".")[:2])
    job = selftest_job.make_job("", wanted, Expectations({}, version, names), RunRequest(probes=probes))
    output = host_runner.run_on_host(Path(held.python.executable), job)
    return output_judge.judge_output(output, job.nonce, job.require)


def require_probes_passed(run: TestRun, plan: RepairPlan) -> None:
    """Raise CheckFailed, listing every failure, if the run has a failure."""
    failures = run.failures()
    if failures:
        details = [f"{one.probe}: {one.detail}" if one.probe else one.detail for one in failures]
        undo = f"undo it: {file_backup.undo_command(plan.manager.prefix)}"
        raise CheckFailed("the fixed environment fails a probe", hint="\n".join([*details, undo]))


def undo_repair(prefix: Path, say: Callable[[str], None]) -> Restoration:
    """Restore the files that the last repair of an environment replaced. Raises FileError if there is nothing to undo,
    HashMismatch if a file in the backup has changed."""
    with process_locks.exclusive_environment(prefix, say):
        backup = file_backup.latest_backup(prefix)
        if backup is None:
            raise FileError(
                f"{prefix} has no fix to undo", hint="only envbuild fix --apply makes a backup that can be restored"
            )
        return file_backup.restore(backup)
