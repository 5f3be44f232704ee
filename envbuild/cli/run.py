from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli import fix as fix_command
from envbuild.cli.command_options import json_option, judged_gpus_option
from envbuild.cli.console import emit
from envbuild.util.errors import UsageError, printable

if TYPE_CHECKING:
    from envbuild.facts.gpu_fact_types import Gpu
    from envbuild.repair.fixed_library_folder_and_variables import ProgramEnvironment

_PYTHON = re.compile(r"python[0-9.]*")


@click.command(
    "run",
    short_help="Run a program with fixed libraries, and change nothing.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--with-fix", "logs", is_flag=False, flag_value="", multiple=True, metavar="[LOG]",
    help="Required. Use the fixes for the GPUs in this log. Without LOG: for the GPUs of --gpu, else this machine's. "
    "Repeat it for several logs.",
)  # fmt: skip
@click.option(
    "--python", metavar="ENV",
    help="The environment of the program; its programs come first on PATH. Default: that of PROGRAM, or of the shell.",
)  # fmt: skip
@judged_gpus_option
@json_option
@click.argument("program", metavar="-- PROGRAM...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    logs: tuple[str, ...], python: str | None, gpus: tuple[Gpu, ...], as_json: bool, program: tuple[str, ...]
) -> None:
    """Start a program with fixed libraries from a private folder, whose files are checked at every start.

    The environment is not changed, so this also works with conda, the system's Python and environments that you cannot
    write to. The libraries are selected with LD_LIBRARY_PATH or, if the loader would ignore that, with LD_PRELOAD.
    stderr shows which files the program and its child processes actually load. The exit code is the program's. With
    --json, the variables are printed and nothing is started.

    Example: envbuild run --with-fix train.log -- python train.py
    Example: envbuild run --with-fix --python .venv -- torchrun --nproc-per-node 8 train.py
    """
    if not logs:
        raise UsageError("--with-fix is missing", hint="envbuild run --with-fix train.log -- python train.py")
    from envbuild.repair import fixed_library_folder_and_variables, repair_output, required_changes

    interpreter = python or _interpreter(program[0])
    plan, held = fix_command.planned_repair(tuple(filter(None, logs)), interpreter, gpus, files_only=True)
    environment = fixed_library_folder_and_variables.program_environment(plan, held, _say)
    if python:  # the program is the one of this environment
        environment = replace(environment, variables={**_path(Path(plan.target).parent), **environment.variables})
    if as_json:
        command = repair_output.CommandDocument("starts the program", program, shlex.join(program), shell=False)
        emit(
            repair_output.ProgramDocument(
                target=plan.target,
                state=plan.state,
                advisories=repair_output.advisory_rows(plan.diagnosis),
                commands=(command,),
                variables=environment.variables,
                libraries=environment.libraries,
            )
        )
        return
    if plan.diagnosis.healthy:
        _say("nothing to fix; the program starts with its own libraries")
    if not plan.diagnosis.gpus:
        _say(required_changes.NO_GPU)
    for problem, remedy in plan.diagnosis.by_hand:
        _say(f"not fixed: {problem}; fix: {remedy}")
    for name, value in environment.variables.items():
        _say(f"unset {name}" if value is None else f"{name}={shlex.quote(value)}")
    if environment.libraries:
        _say(environment.reason)
    click.get_current_context().exit(_started(program, environment))


def _started(program: tuple[str, ...], environment: ProgramEnvironment) -> int:
    from envbuild.repair.mapped_library_watch import LibraryWatch
    from envbuild.util import host_processes

    expected = {os.path.realpath(path) for path in environment.libraries.values()}

    def report(pid: int, path: str) -> None:
        fixed = "" if path in expected else "WARNING: not the fixed file: "
        _say(f"process {pid}: {fixed}{path}")

    watch = LibraryWatch(environment.libraries, report)
    try:
        code = host_processes.run_attached(program, env=environment.variables, on_start=watch.start)
    finally:
        seen = watch.stop()
    if not seen and environment.libraries:
        _say(f"not loaded by the program, as far as was seen: {', '.join(environment.libraries)}")
    return code


def _path(folder: Path) -> dict[str, str | None]:
    """The variable PATH on which the programs in `folder` come first; nothing if they do already."""
    path = os.environ.get("PATH", os.defpath)
    return {} if path.split(os.pathsep)[0] == str(folder) else {"PATH": f"{folder}{os.pathsep}{path}"}


def _interpreter(name: str) -> str | None:
    """Return the path of the program `name` if it is a Python interpreter, else None."""
    found = shutil.which(name)
    return found if found and _PYTHON.fullmatch(Path(found).name) else None


def _say(text: str) -> None:
    click.echo(printable(f"envbuild run: {text}"), err=True)
