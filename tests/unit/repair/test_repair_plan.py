"""Small environments that the dynamic loader accepts: what to run for each manager, and which file is loaded
afterwards."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version
from selftest.environments import SONAMES, Environment, built, extension, good, library, virtual

from envbuild.audit import environment_audit, library_and_distribution_findings
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.cli import audit as audit_command
from envbuild.cli import fix as fix_command
from envbuild.explain import cause_ranking, log_reader_and_search
from envbuild.explain.cause_ranking import Explanation
from envbuild.facts import database
from envbuild.repair import (
    environment_manager_detection,
    fixed_library_folder_and_variables,
    repair_output,
    repair_plan,
    repair_run,
    required_changes,
)
from envbuild.repair.repair_plan import RepairPlan
from envbuild.repair.required_changes import Changes, LibraryPin
from envbuild.resolve import advisory_remedy
from envbuild.util.errors import CheckFailed
from unit import collected
from unit.support import envbuild

LOG = """NVIDIA H20, driver 550.54.15
torch 2.3.1+cu121
Fatal Python error: Floating point exception
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 116 in forward
"""
REQUIRED = 'nvidia-cublas-cu12 (==12.1.3.1) ; platform_system == "Linux"'
pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with")


@pytest.fixture(autouse=True)
def no_loader_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def faulty(site: Path, cublas: str = "12.1.3.1") -> Environment:
    """An environment with torch 2.3.1, which requires cuBLAS 12.1.3.1."""
    made = Environment(site)
    made.cublas(cublas)
    made.nvidia("cudnn", "9.1.0.70")
    made.nvidia("nccl", "2.26.2")
    made.torch(requires=(REQUIRED,))
    return made


@dataclasses.dataclass(frozen=True)
class Place:
    prefix: Path
    python: Path
    made: Environment

    @property
    def site(self) -> Path:
        return self.made.site

    def held(self) -> Holdings:
        return collected.collect(self.python, self.prefix.parent)

    def audited(self) -> Audit:
        return environment_audit.assess(str(self.python), self.held(), Expected(image=False))

    def plan(
        self, log: str | None = LOG, held: Holdings | None = None, paths: Sequence[str] = (), gpus: Sequence[str] = ()
    ) -> RepairPlan:
        """Plan the repair. `paths`: those of the log; `gpus`: ids of GPUs that the user names."""
        held, found = held or self.held(), explained(log) if log else None
        wanted = required_changes.expected_hardware_from(held, found, [database.gpus()[name] for name in gpus])
        audited = environment_audit.assess(str(self.python), held, wanted)
        return repair_plan.plan_repair(audited, found, logs=paths, gpus=gpus)


def explained(log: str) -> Explanation:
    import io

    return cause_ranking.explain(log_reader_and_search.read(io.BytesIO(log.encode()), 1, ""))


def placed(folder: Path, fill: Callable[[Path], Environment]) -> Place:
    python, site = virtual(folder.resolve() / "venv")
    return Place(folder.resolve() / "venv", python, fill(site))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return placed(tmp_path, faulty)


def texts(plan: RepairPlan) -> list[str]:
    return [command.text for command in plan.printed]


def installs(plan: RepairPlan) -> list[tuple[str, ...]]:
    return [command.argv for command in plan.commands]


def metadata(place: Place) -> Path:
    return place.site / "torch-2.3.1.dist-info" / "METADATA"


def test_a_log_of_h20_gives_the_cublas_that_fixes_it(place: Place) -> None:
    plan = place.plan()
    assert [advisory.id for advisory in plan.diagnosis.advisories] == ["cublas-hopper-fpe"]
    assert installs(plan) == [
        ("uv", "pip", "install", "--python", str(place.python), "--no-deps", "nvidia-cublas-cu12==12.4.5.8")
    ]
    assert (plan.manager.kind, plan.state, plan.refused) == ("pip", "fixable", None)
    assert plan.touched == {"nvidia-cublas-cu12"}, "of torch, only METADATA and RECORD change"
    rows = {row.library: row for row in plan.libraries}
    cublas = rows["libcublas.so.12"]
    path = str(place.site / "nvidia/cublas/lib/libcublas.so.12")
    assert (cublas.before, cublas.before_version, cublas.measured) == (path, "12.1.3.1", True)
    assert (cublas.after, cublas.after_version) == (path, "12.4.5.8")
    assert (cublas.after_way or "").startswith("RPATH of ")
    assert rows["libcublasLt.so.12"].after_version == "12.4.5.8"
    assert plan.diagnosis.probes == ("gemm.crash",)


def test_with_pip_in_it_the_command_is_pips(place: Place) -> None:
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    assert installs(place.plan()) == [
        (str(place.python), "-m", "pip", "install", "--no-deps", "nvidia-cublas-cu12==12.4.5.8")
    ]


def test_the_printed_edit_changes_what_torch_requires_in_a_new_file(place: Place, tmp_path: Path) -> None:
    """Run by the shell. A different file with the same content (a hard link) is not changed."""
    shared = tmp_path / "shared"
    shared.hardlink_to(metadata(place))
    (edit,) = [command for command in place.plan().printed if command.argv[0] == "sed"]
    before = metadata(place).read_text()
    assert REQUIRED in before
    subprocess.run(["sh", "-c", edit.text], check=True)
    after = metadata(place).read_text()
    assert 'Requires-Dist: nvidia-cublas-cu12==12.4.5.8 ; platform_system == "Linux"' in after
    assert len(after.splitlines()) == len(before.splitlines())
    assert shared.read_text() == before
    assert "modified-file" not in {finding.id for finding in place.audited().findings}
    metadata(place).write_text(f"{after}\n")
    record = metadata(place).with_name("RECORD")
    record.write_text(record.read_text().replace("METADATA,,", f"METADATA,sha256={'A' * 43},1"))
    assert "modified-file" in {finding.id for finding in place.audited().findings}


def test_a_fixed_environment_needs_nothing(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    plan = place.plan()
    assert (plan.state, plan.commands, plan.libraries) == ("healthy", (), ())
    assert [advisory.id for advisory in plan.diagnosis.absent] == ["cublas-hopper-fpe"]
    (line,) = [line for line in repair_output.repair_lines(plan, "2.3.1", [], None) if line.startswith("Ruled out")]
    assert "the versions that are installed now do not have this fault" in line
    assert "LD_PRELOAD of the job script may select an old copy" in line
    (line,) = [
        line for line in repair_output.repair_lines(place.plan(gpus=["a100"]), "2.3.1", [], None) if "Ruled" in line
    ]
    assert "the packages or the GPU here do not match" in line


def test_without_a_log_and_a_gpu_nothing_is_certain(place: Place) -> None:
    plan = place.plan(None)
    assert plan.state == "healthy"
    assert any("cublas-hopper-fpe" in note and "h20" in note for note in plan.diagnosis.notes)


@pytest.mark.slow
def test_without_a_log_the_gpu_can_be_named(place: Place) -> None:
    done = envbuild("fix", "--python", str(place.python), "--gpu", "NVIDIA H20")
    assert done.code == 0 and "nvidia-cublas-cu12==12.4.5.8" in done.stdout
    assert f"envbuild fix --gpu h20 --python {place.python} --apply" in done.stdout
    audited = envbuild("audit", "--python", str(place.python), "--gpu", "h20")
    assert audited.code == 5 and "cublas-hopper-fpe" in audited.stdout and "judged for h20" in audited.stdout
    assert "judged for" not in envbuild("audit", "--python", str(place.python)).stdout


def test_a_named_gpu_comes_before_the_logs(place: Place) -> None:
    held = place.held()
    a100 = database.gpus()["a100"]
    wanted = required_changes.expected_hardware_from(held, explained(LOG), (a100,))
    assert wanted.gpus == (a100,)
    plan = repair_plan.plan_repair(environment_audit.assess(str(place.python), held, wanted), explained(LOG))
    assert "cublas-hopper-fpe" in [advisory.id for advisory in plan.diagnosis.absent]


def test_a_gpu_that_no_fact_knows_is_refused(place: Place) -> None:
    done = envbuild("fix", "--python", str(place.python), "--gpu", "h2000")
    assert done.code == 2 and "'h2000' is not a known GPU" in done.stderr
    assert "did you mean" in envbuild("audit", "--here", "--gpu", "h10").stderr
    assert envbuild("audit", "--here", "--profile", "h20", "--gpu", "h20").code == 2
    assert envbuild("fix", "--undo", "--here", "--gpu", "h20").code == 2


def test_uvs_environment(place: Place) -> None:
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    with (place.prefix / "pyvenv.cfg").open("a") as file:
        file.write("uv = 0.9.0\n")
    plan = place.plan()
    assert plan.manager.kind == "uv"
    assert plan.commands[0].argv[:3] == ("uv", "pip", "install")


def test_a_uv_project_gets_an_override(place: Place) -> None:
    (place.prefix.parent / "uv.lock").write_text('[[package]]\nname = "torch"\nversion = "2.3.1"\n')
    (place.prefix.parent / "pyproject.toml").write_text('[project]\ndependencies = ["numpy", "Torch==2.3.1"]\n')
    plan = place.plan()
    assert plan.manager.kind == "uv-project"
    assert plan.overrides and plan.overrides.requirements == (
        'nvidia-cublas-cu12==12.4.5.8 ; platform_system == "Linux"',
    )
    words = ("uv", "sync", "--project", str(place.prefix.parent), "--inexact")
    assert installs(plan) == [("env", f"UV_PROJECT_ENVIRONMENT={place.prefix}", *words)], "uv would change .venv"
    assert [pin.owner for pin in plan.metadata] == ["torch"], "uv pip, called elsewhere, does not read the override"
    moved = dataclasses.replace(plan.manager, prefix=place.prefix.parent / ".venv")
    steps = repair_plan._Steps(place.held(), moved, plan.diagnosis.changes, {}, plan.source)
    own = ("env", f"UV_PROJECT_ENVIRONMENT={moved.prefix}")
    assert [command.argv for command in steps.commands()] == [(*own, *words)], "the shell may have another value"


PYTORCH_INDEXES = "".join(
    f'[[tool.uv.index]]\nname = "{label}"\nurl = "https://download.pytorch.org/whl/{label}"\nexplicit = true\n'
    for label in ("cpu", "cu126", "cu130")
)


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('{ index = "cpu" }', True),
        ('{ index = "cu130" }', True),
        ('{ path = "torch.whl" }', True),
        ('{ index = "cu126" }', False),
        ("""[{ index = "cpu", marker = "sys_platform != 'linux'" }, { index = "cu126" }]""", False),
        ("""[{ index = "cpu", marker = "invalid" }, { index = "cu126" }]""", True),
    ],
)
def test_a_uv_project_that_takes_torch_from_elsewhere(place: Place, source: str, refused: bool) -> None:
    """`uv add` would install the build for the CPU again, for example."""
    with_torch(place, "2.7.1+cpu", None)
    project = place.prefix.parent
    (project / "uv.lock").write_text('[[package]]\nname = "torch"\nversion = "2.7.1+cpu"\n')
    (project / "pyproject.toml").write_text(f"{PYTORCH_INDEXES}[tool.uv.sources]\nTorch = {source}\n")
    text = f"{project}/pyproject.toml sets a source for torch, under [tool.uv.sources]"
    found = place.plan(CPU_LOG).refused
    assert (found and found[0]) == (text if refused else None)


def test_a_uv_project_without_torch_in_its_lock_is_an_environment(place: Place) -> None:
    (place.prefix.parent / "uv.lock").write_text('[[package]]\nname = "numpy"\n')
    assert place.plan().manager.kind == "pip"


def test_poetry_cannot_override(place: Place) -> None:
    (place.prefix.parent / "poetry.lock").write_text("")
    plan = place.plan()
    assert plan.manager.kind == "poetry"
    assert plan.commands[0].argv[-1] == "nvidia-cublas-cu12==12.4.5.8"
    assert any("poetry sync" in warning for warning in plan.warnings)
    assert plan.refused and "Poetry" in plan.refused[0]


def test_poetry_changes_this_environment_not_the_active_one(place: Place) -> None:
    (place.prefix.parent / "poetry.lock").write_text("")
    with_torch(place, "2.7.1+cpu", None)
    assert installs(place.plan(CPU_LOG))[-1] == (
        "env", "-u", "CONDA_DEFAULT_ENV", f"VIRTUAL_ENV={place.prefix}",
        "poetry", "--directory", str(place.prefix.parent), "add", "torch==2.7.1",
    )  # fmt: skip


@pytest.mark.parametrize("pip", [False, True])
def test_poetry_installs_what_it_would_keep_because_the_version_fits(place: Place, pip: bool) -> None:
    """`poetry add` changes nothing if the installed version fits, and has no option that installs it again."""
    (place.prefix.parent / "poetry.lock").write_text("")
    with_torch(place, "2.7.1", None, torchvision="0.22.1+cu128", torchaudio="2.6.0+cu124")
    if pip:
        place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    remove, add = place.plan(CPU_LOG).commands
    python = str(place.python)
    words = (python, "-m", "pip", "uninstall", "--yes") if pip else ("uv", "pip", "uninstall", "--python", python)
    assert remove.argv == (*words, "torch", "torchvision")
    assert remove.does == "remove torch, torchvision, which Poetry would keep"
    assert add.argv[-4:] == ("add", "torch==2.7.1", "torchvision==0.22.*", "torchaudio==2.7.*")


def test_a_torch_of_the_system_cannot_be_fixed_from_a_virtual_environment(place: Place, tmp_path: Path) -> None:
    """pip would install a second cuBLAS in the virtual environment, and the system's torch would not load it."""
    held = place.held()
    (tmp_path / "own").mkdir()
    (place.prefix / "pyvenv.cfg").rename(tmp_path / "own" / "pyvenv.cfg")
    own = held.model_copy(update={"python": held.python.model_copy(update={"prefix": str(tmp_path / "own")})})
    plan = place.plan(held=own)
    assert plan.manager.kind == "pip"
    assert [argv[:2] for argv in installs(plan)] == [("envbuild", "run")] and plan.metadata == ()
    assert plan.refused and plan.refused[0] == f"torch is installed in {place.site}, outside this environment"


def outside(place: Place) -> Holdings:
    """The contents of a virtual environment that takes torch from the system's packages."""
    held = place.held()
    own = place.prefix.parent / "own"
    own.mkdir()
    (place.prefix / "pyvenv.cfg").rename(own / "pyvenv.cfg")
    return held.model_copy(update={"python": held.python.model_copy(update={"prefix": str(own)})})


def test_other_library_files_do_not_replace_the_unrelated_apex(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    place.made.wheel("apex", "0.9.10.dev0", {"apex/__init__.py": b"", "apex/lib/libapex.py": b""})
    held = outside(place)
    plan = place.plan(None, held)
    assert plan.diagnosis.changes.needs_changed_packages and installs(plan) == []
    assert plan.refused and "envbuild run" not in plan.refused[1]
    with pytest.raises(repair_run.RepairRefused, match="the fix must remove apex; other library files"):
        fixed_library_folder_and_variables.program_environment(plan, held, print)


def test_a_leftover_is_harmless_only_if_its_library_is_loaded_from_a_different_folder() -> None:
    paths = ("/v/nvidia/cublas/lib/libcublasLt.so.12", "/v/nvidia/nccl/lib/libnccl.so.2")
    pin = LibraryPin("cublas", "nvidia-cublas-cu12", "12.4.5.8", None)
    assert Changes((pin,), leftovers=paths).harmful_leftovers == paths[1:]
    assert not Changes((pin,), leftovers=paths[:1]).needs_changed_packages
    assert Changes((dataclasses.replace(pin, installed=True),), leftovers=paths[:1]).needs_changed_packages


def test_an_environment_that_no_command_can_fix_is_reported_with_the_reason(place: Place) -> None:
    with_torch(place, "2.7.1", "12.6", torchvision="0.22.1+cpu")
    plan = place.plan("NVIDIA H20, driver 570.86.10\n", outside(place))
    assert [argv for argv in installs(plan) if argv[0] != "export"] == []
    lines = list(repair_output.repair_lines(plan, "2.7.1", [], "envbuild fix --apply"))
    assert any(line.startswith("Found: companion-build") for line in lines)
    reason = f"torch is installed in {place.site}, outside this environment; install torch in a virtual environment"
    assert f"--apply would refuse: {reason}" in lines


def test_a_variable_of_the_shell_needs_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = placed(tmp_path, good)
    with_runpath(place)
    old = tmp_path.resolve() / "old"
    for kind in ("cublas", "cublasLt"):
        place.made.put(old / SONAMES[kind], library(kind, "12.1.3.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/other:{old}")
    held = place.held()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    plan = place.plan(held=held)
    assert [argv[0] for argv in installs(plan)] == ["export"]
    assert plan.refused and plan.refused[0].startswith("the fix only changes shell variables")


def test_a_system_that_forbids_pip_needs_a_virtual_environment_for_another_torch(place: Place) -> None:
    """`run --with-fix` loads different library files, and would refuse this fix. The marker is in lib64."""
    with_torch(place, "2.7.1+cpu", None, torchvision="0.22.1+cpu")
    held = place.held()
    (place.prefix / "pyvenv.cfg").unlink()
    version = ".".join(held.python.version.split(".")[:2])
    if (place.prefix / "lib64").is_symlink():
        (place.prefix / "lib64").unlink()
    (place.prefix / "lib64" / f"python{version}").mkdir(parents=True)
    (place.prefix / "lib64" / f"python{version}" / "EXTERNALLY-MANAGED").touch()
    plan = place.plan(CPU_LOG, held)
    assert installs(plan) == [
        (str(place.python), "-m", "venv", "NEW_FOLDER"),
        ("NEW_FOLDER/bin/python", "-m", "pip", "install", "torch==2.7.1", "torchvision==0.22.*"),
    ]
    assert plan.refused and plan.refused[1] == "install torch in a virtual environment"


def test_a_folder_without_write_permission_is_reported_with_the_commands(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(place.site))
    plan = place.plan()
    assert plan.refused and plan.refused[0] == f"no permission to write to {place.site}"
    assert "envbuild run --with-fix" in plan.refused[1] and plan.commands


@pytest.mark.parametrize("found", [None, "/usr/bin/uv"])
def test_a_missing_uv_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: found)
    warned = [text for text in place.plan().warnings if text.startswith("uv is not on PATH: write /")]
    assert len(warned) == (found is None)


def test_the_systems_python_is_refused(place: Place) -> None:
    held = place.held()
    (place.prefix / "pyvenv.cfg").unlink()
    version = ".".join(held.python.version.split(".")[:2])
    (place.prefix / "lib" / f"python{version}" / "EXTERNALLY-MANAGED").touch()
    plan = place.plan(held=held)
    assert (plan.manager.kind, plan.manager.locked_down) == ("system", True)
    assert plan.refused and "system's Python" in plan.refused[0]
    assert installs(plan) == [("envbuild", "run", "--with-fix", "--python", str(place.python), "--", "PROGRAM")]
    assert plan.metadata == ()


def test_a_torch_of_the_user_with_the_systems_python_keeps_its_pin(place: Place, tmp_path: Path) -> None:
    """torch is installed as pip installs it for a user: in ~/.local, outside the folder of the system's Python."""
    held = place.held()
    own = held.model_copy(update={"python": held.python.model_copy(update={"prefix": str(tmp_path / "usr")})})
    plan = place.plan(held=own)
    assert plan.manager.kind == "system"
    assert [pin.file for pin in plan.metadata] == [metadata(place)]


def test_the_command_that_changes_nothing_can_be_pasted(place: Place, tmp_path: Path) -> None:
    """The command repeats the logs and GPUs from which the fix was found, even if a path has a space."""
    spaced = tmp_path / "of rank 0"
    spaced.mkdir()
    logs = [str(spaced / "train.log"), "b.log"]
    words = [word for log in logs for word in ("--with-fix", log)]
    target = ["--python", str(place.python), "--", "PROGRAM"]
    held = place.held()
    (place.prefix / "pyvenv.cfg").unlink()
    plan = place.plan(held=held, paths=logs, gpus=["h20"])
    assert plan.refused
    printed = plan.refused[1].partition(": ")[2]
    assert shlex.split(printed) == ["envbuild", "run", *words, "--gpu", "h20", *target]
    assert shlex.join(plan.source.fix("--apply")) == shlex.join(
        ["envbuild", "fix", *logs, "--gpu", "h20", "--python", str(place.python), "--apply"]
    )
    for unreadable in ("-", "/dev/fd/63"):
        plan = place.plan(held=held, paths=[unreadable])
        assert plan.refused and "envbuild run --with-fix LOG --python" in plan.refused[1]


def conda(place: Place, packages: Mapping[str, tuple[str, list[str], list[str]]]) -> Holdings:
    """Turn the environment into a conda environment. `packages`: for each name its version, requirements and files."""
    held = place.held()
    (place.prefix / "pyvenv.cfg").unlink()
    (place.prefix / "conda-meta").mkdir()
    for name, (version, depends, files) in packages.items():
        text = json.dumps({"name": name, "version": version, "depends": depends, "files": files})
        (place.prefix / "conda-meta" / f"{name}-{version}-0.json").write_text(text)
    return held


def test_a_package_of_pip_in_a_conda_environment_is_fixed_with_pip(place: Place) -> None:
    held = conda(place, {"python": ("3.11.9", [], ["bin/python"])})
    plan = place.plan(held=held)
    assert plan.manager.kind == "conda"
    assert "nvidia-cublas-cu12==12.4.5.8" in plan.commands[0].argv
    assert plan.refused is None


def test_what_pip_would_bring_back_in_a_conda_environment_is_kept(tmp_path: Path) -> None:
    place = placed(tmp_path, partial(faulty, cublas="12.4.5.8"))
    held = conda(place, {"python": ("3.11.9", [], ["bin/python"])})
    plan = place.plan(held=held)
    assert [(pin.owner, pin.name) for pin in plan.metadata] == [("torch", "nvidia-cublas-cu12")]
    assert plan.refused is None
    file = metadata(place).relative_to(place.prefix)
    (place.prefix / "conda-meta" / "pytorch-2.3.1-0.json").write_text(
        json.dumps({"name": "pytorch", "version": "2.3.1", "depends": [], "files": [str(file)]})
    )
    assert place.plan(held=held).state == "healthy", "conda does not read this file"


def test_commands_of_a_remedy_are_for_this_environments_pip(place: Place) -> None:
    own = shlex.join(environment_manager_detection.pip_words(place.held(), "install"))
    text = "pip install a; uv pip install b; /x/python -m pip install c"
    assert (
        required_changes._with_own_pip(text, place.held()) == f"{own} a; uv pip install b; /x/python -m pip install c"
    )


@pytest.mark.parametrize("bounds", [">=12.1.0.26,<12.1.4", "1.*"])
def test_a_package_of_conda_is_fixed_with_conda_only(place: Place, bounds: str) -> None:
    folder = place.site.relative_to(place.prefix)
    files = [f"{folder}/nvidia/cublas/lib/libcublas.so.12", f"{folder}/nvidia/cublas/lib/libcublasLt.so.12"]
    packages = {
        "libcublas": ("12.1.3.1", [], files),
        "pytorch": ("2.3.1", ["libcublas"], [f"{folder}/torch-2.3.1.dist-info/METADATA"]),
        "pytorch-cuda": ("12.1", [f"libcublas {bounds}"], []),
    }
    plan = place.plan(held=conda(place, packages))
    assert installs(plan) == [("conda", "install", "--prefix", str(place.prefix), "libcublas=12.4.5.8")]
    assert plan.metadata == ()
    assert plan.refused and "conda owns" in plan.refused[0]
    assert [warning for warning in plan.warnings if "pytorch-cuda 12.1 requires libcublas" in warning]


def test_conda_owns_its_files_if_the_environment_is_reached_through_a_link(tmp_path: Path) -> None:
    package = environment_manager_detection.CondaPackage("libcublas", "12.1", (), frozenset({"lib/libcublas.so.12"}))
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    manager = environment_manager_detection.EnvironmentManager(
        "conda", "python", tmp_path / "linked", "conda-meta", conda=(package,)
    )
    assert manager.conda_owner(str(tmp_path.resolve() / "real" / "lib" / "libcublas.so.12")) == package


def test_invalid_files_of_conda_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta" / "a.json").write_text("[1]")
    (tmp_path / "conda-meta" / "b.json").write_text("{")
    assert environment_manager_detection._conda_packages(tmp_path) == ()


def with_runpath(place: Place) -> None:
    """Give torch's library a RUNPATH instead of an RPATH, so that LD_LIBRARY_PATH comes first."""
    needed = {SONAMES[kind]: library(kind, "1.0.0") for kind in ("cublasLt", "cublas", "cudnn", "nccl")}
    rpath = ":".join(f"$ORIGIN/../../nvidia/{name}/lib" for name in ("cublas", "cudnn", "nccl"))
    flags = [f"-l:{name}" for name in needed]
    content = built("", "libtorch_cuda.so", f"-Wl,--enable-new-dtags,-rpath,{rpath}", *flags, linked=needed)
    (place.site / "torch/lib/libtorch_cuda.so").write_bytes(content)


def test_an_old_copy_on_ld_library_path_is_taken_off_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = placed(tmp_path, good)
    with_runpath(place)
    old = tmp_path.resolve() / "cuda-12.1" / "lib64"
    for kind in ("cublas", "cublasLt"):
        place.made.put(old / SONAMES[kind], library(kind, "12.1.3.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/other:{old}")
    plan = place.plan()
    assert installs(plan) == [("export", "LD_LIBRARY_PATH=/opt/other")]
    assert plan.commands[0].shell
    row = next(row for row in plan.libraries if row.library == "libcublas.so.12")
    assert (row.before, row.before_way) == (f"{old}/libcublas.so.12", "LD_LIBRARY_PATH")
    assert (row.after, row.after_version) == (f"{place.site}/nvidia/cublas/lib/libcublas.so.12", "12.5.2.13")
    assert plan.refused and "shell" in plan.refused[0]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
    assert place.plan().state == "healthy"


SHADOW_LOG = """GPU 0: NVIDIA A100-SXM4-80GB, driver 570.124.06
torch 2.10.0+cu128
RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx( handle, opa, opb, m, n, k )`
"""


def test_a_fault_that_ld_library_path_causes_is_fixed_by_the_variable(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer torch that fixes it does not run on this driver, and the installed torch must not be a plan."""
    with_torch(place, "2.10.0", "12.8")
    plan = place.plan(SHADOW_LOG)
    assert installs(plan) == [("unset", "LD_LIBRARY_PATH")]
    does = plan.commands[0].does
    assert does.startswith("in this shell, LD_LIBRARY_PATH leads to no other CUDA library")
    assert f"run `envbuild audit --python {place.python}` inside the job script" in does
    assert [advisory.id for advisory in plan.diagnosis.advisories] == ["cublaslt-shadow-runpath"]
    assert plan.refused == (
        "the fix only changes shell variables",
        "envbuild cannot set variables of your shell; in the shell or job script that starts the program: "
        "unset LD_LIBRARY_PATH",
    )
    old = tmp_path.resolve() / "cuda-12.1" / "lib64"
    for kind in ("cublas", "cublasLt"):
        place.made.put(old / SONAMES[kind], library(kind, "12.1.3.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/other:{old}:")
    plan = place.plan(SHADOW_LOG)
    assert installs(plan) == [("export", "LD_LIBRARY_PATH=/opt/other")]
    assert str(old) in plan.commands[0].does and plan.diagnosis.by_hand == ()
    environment = fixed_library_folder_and_variables.program_environment(plan, place.held(), print)
    assert environment.variables == {"LD_LIBRARY_PATH": "/opt/other"}


def test_the_installed_torch_is_not_a_plan(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One advisory excludes the installed release, and another one the newer releases."""
    with_torch(place, "2.10.0", "12.8")
    held, found, nearest = place.held(), explained(SHADOW_LOG), advisory_remedy._torch
    monkeypatch.setattr(advisory_remedy, "_torch", lambda wanted, known, own, driver: nearest(wanted, known, own, None))
    wanted = dataclasses.replace(required_changes.expected_hardware_from(held, found), image=True)
    diagnosis = required_changes.diagnose(environment_audit.assess("it", held, wanted), found)
    assert diagnosis.changes.torch is None and diagnosis.changes.empty
    assert diagnosis.advisories == ()
    assert [problem.partition(":")[0] for problem, _ in diagnosis.by_hand] == ["cublaslt-shadow-runpath"]
    cublas = held.installed["nvidia-cublas-cu12"]
    monkeypatch.setattr(environment_audit, "libraries_to_keep", lambda *arguments: [("cublas", cublas)])
    diagnosis = required_changes.diagnose(environment_audit.assess("it", held, wanted), found)
    assert [(pin.library, pin.installed) for pin in diagnosis.changes.pins] == [("cublas", True)], "kept"


def test_a_fault_of_the_last_chosen_torch_is_left_to_the_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(place, "2.3.1+cpu", None)
    monkeypatch.setattr(required_changes, "_MOST_ROUNDS", 0)
    plan = place.plan("NVIDIA H20, driver 550.54.15\nCUDA available: False\n")
    assert plan.diagnosis.changes.torch == "2.3.1" and plan.diagnosis.advisories == ()
    assert [problem.partition(":")[0] for problem, _ in plan.diagnosis.by_hand] == ["cublas-hopper-fpe"]


NAN_LOG = "torch 2.3.1+cu121, NVIDIA A100-SXM4-80GB\nthe unet of onediff in fp16 returns nan\n"


def test_a_variable_of_an_installed_package_is_the_fix(place: Place, tmp_path: Path) -> None:
    assert place.plan(NAN_LOG).state == "by-hand"
    place.made.wheel("oneflow", "0.9.1", {"oneflow/__init__.py": b""})
    plan = place.plan(NAN_LOG)
    name = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION"
    assert installs(plan) == [("export", f"{name}=0")] and plan.diagnosis.by_hand == ()
    environment = fixed_library_folder_and_variables.program_environment(plan, place.held(), print)
    assert environment.variables == {name: "0"}
    log = tmp_path / "run.log"
    log.write_text(NAN_LOG)
    done = envbuild("fix", str(log), "--python", str(place.python), "--apply")
    assert done.code == 6 and done.stderr.strip().endswith(f"starts the program: export {name}=0")


def test_run_names_a_fix_that_it_does_not_make(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(NAN_LOG)
    words = [sys.executable, "-m", "envbuild", "run", "--with-fix", str(log), "--python", str(place.python)]
    done = subprocess.run([*words, "--", "true"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "not fixed: half-attention-nan" in done.stderr


def test_a_library_that_the_next_installation_would_replace_is_kept(tmp_path: Path) -> None:
    """As after `pip install --no-deps nvidia-cublas-cu12==12.4.5.8`: the fault is gone, and would come back."""
    place = placed(tmp_path, partial(faulty, cublas="12.4.5.8"))
    plan = place.plan()
    assert (plan.state, plan.commands, plan.refused) == ("fixable", (), None)
    (pin,) = plan.metadata
    assert (pin.owner, pin.name, pin.version) == ("torch", "nvidia-cublas-cu12", "12.4.5.8")
    assert [ident for ident, _ in plan.diagnosis.problems] == ["requirement-unmet"]
    assert any(line.startswith("  sed -i") for line in repair_output.repair_lines(plan, "2.3.1", [], "apply"))
    unknown = place.plan(None)
    assert unknown.state == "healthy"
    (note,) = [note for note in unknown.diagnosis.notes if "may bring the required version back" in note]
    assert "no action is needed unless you install packages later" in note
    (place.prefix.parent / "poetry.lock").write_text("")
    assert place.plan().state == "healthy", "Poetry does not read METADATA: its own files decide"


def test_an_old_copy_without_a_known_fault_is_left_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = placed(tmp_path, good)
    with_runpath(place)
    place.made.put(tmp_path.resolve() / "old" / SONAMES["nccl"], library("nccl", "2.20.5"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path.resolve()}/old")
    plan = place.plan(None)
    assert plan.state == "by-hand"
    assert any("unset LD_LIBRARY_PATH" in remedy for _, remedy in plan.diagnosis.by_hand)


def test_a_copy_that_an_upgrade_left_is_removed(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    shutil.rmtree(place.site / "nvidia" / "cublas")
    place.made.put(place.site / "nvidia/cublas/lib" / SONAMES["cublas"], library("cublas", "12.1.3.1"))
    place.made.put(place.site / "nvidia/cublas/lib" / SONAMES["cublasLt"], library("cublasLt", "12.1.3.1"))
    plan = place.plan()
    removed = [command.argv[-1] for command in plan.commands if command.argv[0] == "rm"]
    assert sorted(Path(path).name for path in removed) == ["libcublas.so.12", "libcublasLt.so.12"]
    assert plan.commands[-1].argv[-1] == "nvidia-cublas-cu12==12.4.5.8"
    row = next(row for row in plan.libraries if row.library == "libcublas.so.12")
    assert row.after_version == "12.4.5.8"


@pytest.mark.slow
@pytest.mark.parametrize("required", ["nvidia-cublas-cu12==12.5.2.13", "nvidia-cublas-cu12"])
def test_a_copy_without_its_distribution_is_installed_before_it_is_missed(tmp_path: Path, required: str) -> None:
    """Without a known fault too: if the files were only removed, torch would not find the library."""
    place = placed(tmp_path, good)
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch(requires=(required,))
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    plan = place.plan(None)
    version = required.partition("==")[2] or "12.1.3.1"
    assert [command.argv[0] for command in plan.commands] == ["rm", "rm", "uv"]
    assert plan.commands[-1].argv[-1] == f"nvidia-cublas-cu12=={version}"
    assert place.plan(LOG).commands[-1].argv[-1] == f"nvidia-cublas-cu12=={max(version, '12.4.5.8')}"


def left_behind(place: Place, log: str, *, files_only: bool) -> required_changes.Diagnosis:
    """Leave nccl's file behind without its distribution."""
    shutil.rmtree(next(place.site.glob("nvidia_nccl*")))
    held, found = place.held(), explained(log)
    wanted = required_changes.expected_hardware_from(held, found)
    return required_changes.diagnose(environment_audit.assess("it", held, wanted), found, files_only=files_only)


def test_a_copy_that_torch_still_needs_is_replaced_not_only_removed(place: Place) -> None:
    diagnosis = left_behind(place, LOG, files_only=True)
    (remedy,) = [remedy for problem, remedy in diagnosis.by_hand if problem.startswith("left-behind")]
    assert remedy == "remove the file, then install nvidia-nccl-cu12: torch needs the library"


def test_a_copy_of_a_library_that_the_new_torch_brings_is_not_left_to_the_user(place: Place) -> None:
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.11.0", cuda="13.0")
    diagnosis = left_behind(place, "NVIDIA A100-SXM4-80GB, driver 550.54.15\n", files_only=False)
    assert diagnosis.changes.torch and not diagnosis.changes.leftovers
    assert diagnosis.by_hand == ()
    assert "left-behind" in [ident for ident, _ in diagnosis.problems]


def test_a_torch_that_bundles_cublas_gets_a_release_that_does_not(place: Place) -> None:
    """Installing the library would have no effect, because torch's own copy is loaded."""
    shutil.rmtree(place.site / "torch-2.3.1.dist-info")
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    shutil.rmtree(place.site / "nvidia" / "cublas")
    bundled = {f"torch/lib/{SONAMES[kind]}": library(kind, "12.1.3.1") for kind in ("cublas", "cublasLt")}
    place.made.torch("2.3.1", bundled=bundled, requires=())
    plan = place.plan()
    torch = plan.diagnosis.changes.torch
    assert torch and plan.commands[-1].argv[-1] == f"torch=={torch}"
    assert not plan.diagnosis.changes.pins
    (warning,) = [text for text in place.plan(paths=["my log"]).warnings if "bundles" in text]
    command = f"envbuild run --with-fix 'my log' --python {place.python} -- PROGRAM"
    assert warning.startswith("torch bundles cublas") and warning.endswith(f": {command}")


def test_two_distributions_that_own_one_path(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    with (place.site / "nvidia/nccl/lib" / SONAMES["nccl"]).open("ab") as file:
        file.write(b"of the other wheel")
    plan = place.plan(None)
    assert plan.commands[-1].argv[-3:] == ("--no-deps", "--reinstall", "nvidia-nccl-cu12==2.26.2")


@pytest.mark.parametrize(
    ("owners", "clause"),
    [(("one",), "one requires"), (("one", "two"), "one and two require"), (("a", "b", "c"), "a, b and c require")],
)
def test_several_packages_that_require_an_overwriting_one_are_a_plural(owners: Sequence[str], clause: str) -> None:
    wanted = "nvidia-nccl-cu13"
    assert library_and_distribution_findings.requirement_clause(owners, wanted) == f"{clause} {wanted}"


def test_the_unrelated_apex_is_removed(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    place.made.wheel("apex", "0.9.10.dev0", {"apex/__init__.py": b"", "apex/lib/libapex.py": b""})
    plan = place.plan(None)
    assert installs(plan) == [("uv", "pip", "uninstall", "--python", str(place.python), "apex")]
    words = f"APEX_CPP_EXT=1 APEX_CUDA_EXT=1 uv pip install --python {place.python} --no-build-isolation "
    assert plan.diagnosis.by_hand == ()
    (note,) = [note for note in plan.diagnosis.notes if "NVIDIA's apex" in note]
    assert "removing the unrelated package is enough: no action is needed unless" in note
    assert note.endswith(f"{words}git+https://github.com/NVIDIA/apex")
    place.made.wheel("trainer", "1.0", {"trainer.py": b""}, requires=("apex",))
    assert place.plan(None).diagnosis.by_hand[0] == (
        "NVIDIA's apex is not on the package index, and trainer requires it",
        f"build it from source, with nvcc of torch's CUDA version: {words}git+https://github.com/NVIDIA/apex",
    )


def test_a_fault_that_the_versions_in_the_log_contradict_is_ruled_out_by_name(tmp_path: Path) -> None:
    """LD_LIBRARY_PATH of the job may select an old copy, so the fault is not left out."""
    place = placed(tmp_path, good)
    plan = place.plan("torch 2.5.1+cu124, NVIDIA H20\nSignal 8 (SIGFPE) received by PID 4711\n")
    assert [advisory.id for advisory in plan.diagnosis.absent] == ["cublas-hopper-fpe"] and plan.state == "healthy"
    text = " ".join(repair_output.repair_lines(plan, None, (), None))
    assert "if it ran here, LD_LIBRARY_PATH or LD_PRELOAD of the job script may select an old copy" in text


def test_without_the_unrelated_apex_transformers_stays(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    place.made.wheel("apex", "0.9.10.dev0", {"apex/__init__.py": b"", "apex/lib/libapex.py": b""})
    place.made.wheel("transformers", "4.44.2", {"transformers/__init__.py": b""})
    log = (
        "torch 2.3.1, NVIDIA A100-SXM4-40GB\ntransformers/models/t5/modeling_t5.py, in forward\n"
        "apex/normalization/fused_layer_norm.py, in FusedRMSNorm\n"
        "RuntimeError: expected scalar type Float but found Half\n"
    )
    plan = place.plan(log)
    assert plan.diagnosis.advisories == (), "the advisory is about NVIDIA's apex, which is not installed here"
    assert [advisory.id for advisory in plan.diagnosis.absent] == ["apex-t5-mixed-dtype"]
    assert [problem for problem, _ in plan.diagnosis.problems] == ["wrong-apex"]
    assert [argv[-1] for argv in installs(plan)] == ["apex"] and plan.diagnosis.by_hand == ()
    document = repair_output.repair_document(plan, [], None)
    printed = fix_command._applied_lines(plan, document, "no probe detects this fault", place.held())
    assert "Not part of this fix: apex-t5-mixed-dtype, which the log shows, cannot apply to this environment" in printed
    shutil.rmtree(place.site / "apex")
    shutil.rmtree(next(place.site.glob("apex-*")))
    plan = place.plan(log)
    assert plan.state == "healthy", "the log's fault needs apex"
    program = place.plan("torch 2.3.1\nImportError: cannot import name 'amp' from 'apex' (unknown location)\n")
    ((problem, remedy),) = program.diagnosis.by_hand
    assert problem == "NVIDIA's apex is not on the package index, and the log shows that the program uses it"
    assert "APEX_CUDA_EXT=1" in remedy
    assert [advisory.id for advisory in plan.diagnosis.absent] == ["apex-t5-mixed-dtype"]


def test_flash_attn_of_another_torch_is_built_again(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    broken = extension("flash_attn_2_cuda", "sm_90", more="extern void other_torch(void);", first="other_torch()")
    place.made.wheel("flash-attn", "2.5.8", {"flash_attn_2_cuda.so": broken})
    plan = place.plan(None)
    (row,) = plan.diagnosis.by_hand
    assert "undefined symbol" in row[0] and "--force-reinstall flash-attn==2.5.8" in row[1]
    assert plan.state == "by-hand"
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    (row,) = place.plan(None).diagnosis.by_hand
    assert f": {place.python} -m pip install --no-deps " in row[1]


def test_torch_for_the_cpu_where_the_log_has_a_gpu(place: Place) -> None:
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.7.1+cpu", cuda=None)
    plan = place.plan("NVIDIA H20, driver 570.86.10\nCUDA available: False\n")
    assert plan.diagnosis.changes.torch == "2.7.1"
    assert plan.commands[-1].argv[-2:] == ("torch", "torch==2.7.1")


CPU_LOG = "NVIDIA H20, driver 570.86.10\nCUDA available: False\n"


def test_packages_that_do_not_work_with_the_new_torch_are_replaced_with_it(place: Place) -> None:
    with_torch(place, "2.3.1", "12.1", numpy="2.2.6")
    plan = place.plan("NVIDIA A100-SXM4-80GB, driver 470.57.02\ntorch 2.3.1+cu121\n")
    assert plan.diagnosis.changes.torch and Version(plan.diagnosis.changes.torch) < Version("2.3")
    assert plan.diagnosis.changes.packages == ("numpy<2",)


def test_a_driver_that_runs_no_release_for_the_gpu_is_named_with_the_one_to_install(place: Place) -> None:
    log = (
        "NVIDIA H20, driver 470.57.02\nUserWarning: CUDA initialization: The NVIDIA driver on your system is too old\n"
    )
    for version, cuda in (("2.3.1", "12.1"), ("2.14.0", "13.0")):
        with_torch(place, version, cuda)
        rows = [row for row in place.plan(log).diagnosis.by_hand if "driver" in row[0]]
        assert rows == [
            (
                "driver-too-old: no torch release runs with driver 470.57.02 on h20",
                "install driver 525.60.13 or newer, then run this command again",
            )
        ]


def with_torch(place: Place, version: str, cuda: str | None, **others: str) -> None:
    """Replace torch, and install other distributions, by name and version."""
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch(version, cuda=cuda)
    for name, number in others.items():
        place.made.wheel(name, number, {f"{name}/__init__.py": b""})


def test_torchvision_and_torchaudio_for_the_cpu_are_replaced_with_torch(place: Place) -> None:
    """Their installed versions would fit the new torch, so the commands must request that they are installed again."""
    with_torch(place, "2.7.1+cpu", None, torchvision="0.22.1+cpu", torchaudio="2.7.1+cpu")
    plan = place.plan(CPU_LOG)
    again = [word for name in ("torch", "torchvision", "torchaudio") for word in ("--reinstall-package", name)]
    assert plan.commands[-1].argv == (
        "uv", "pip", "install", "--python", str(place.python), *again,
        "torch==2.7.1", "torchvision==0.22.*", "torchaudio==2.7.*",
    )  # fmt: skip
    assert "install the build of torchvision and torchaudio for the CUDA version of torch" in plan.commands[-1].does
    assert {"torchvision", "torchaudio"} <= plan.touched
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    assert [argv[1:] for argv in installs(place.plan(CPU_LOG))][-2:] == [
        ("-m", "pip", "uninstall", "--yes", "torch", "torchvision", "torchaudio"),
        ("-m", "pip", "install", "torch==2.7.1", "torchvision==0.22.*", "torchaudio==2.7.*"),
    ], "--force-reinstall would also replace numpy"


@pytest.mark.parametrize("pip", [False, True])
def test_a_torchvision_that_does_not_fit_the_new_torch_is_replaced_without_force(place: Place, pip: bool) -> None:
    """PyTorch's own package index gives each build a local label."""
    with_torch(place, "2.14.0+cu130", "13.0", torchvision="0.29.0+cu130", torchaudio="2.11.0+cu130")
    if pip:
        place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    plan = place.plan("NVIDIA A100-SXM4-80GB, driver 550.54.15\n")
    words = (
        (str(place.python), "-m", "pip", "install") if pip else ("uv", "pip", "install", "--python", str(place.python))
    )
    assert installs(plan) == [(*words, "torch==2.10.0", "torchvision==0.25.*", "torchaudio==2.10.*")]


def test_a_new_torch_gets_the_releases_of_torchvision_and_torchaudio_that_belong_to_it(place: Place) -> None:
    with_torch(place, "2.14.0", "13.0", torchvision="0.29.0", torchaudio="2.11.0")
    plan = place.plan("NVIDIA A100-SXM4-80GB, driver 550.54.15\n")
    torch = plan.diagnosis.changes.torch
    assert torch == "2.10.0"
    assert plan.commands[-1].argv[-3:] == ("torch==2.10.0", "torchvision==0.25.*", "torchaudio==2.10.*")


def test_torchvision_for_the_cpu_with_a_torch_for_cuda_is_replaced_alone(place: Place) -> None:
    with_torch(place, "2.7.1", "12.6", torchvision="0.22.1+cpu", torchaudio="2.7.1")
    plan = place.plan("NVIDIA H20, driver 570.86.10\n")
    (command,) = [one for one in plan.commands if "torchvision" in one.does]
    assert command.argv[-3:] == ("--no-deps", "--reinstall", "torchvision==0.22.1")
    assert ("companion-build", "torchvision 0.22.1+cpu has no GPU code; torch 2.7.1 was built for CUDA 12.6") in (
        plan.diagnosis.problems
    )
    assert plan.diagnosis.changes.torch is None and "torchvision" in plan.touched
    assert not [text for text in plan.warnings if "old build" in text]


@pytest.mark.parametrize(("lock", "commands"), [("uv.lock", "`uv sync` and `uv run`"), ("poetry.lock", "`poetry ")])
def test_a_project_brings_the_old_build_of_torchvision_back(place: Place, lock: str, commands: str) -> None:
    with_torch(place, "2.7.1", "12.6", torchvision="0.22.1+cpu")
    (place.prefix.parent / lock).write_text('[[package]]\nname = "torch"\n')
    (warning,) = [text for text in place.plan("NVIDIA H20, driver 570.86.10\n").warnings if "old build" in text]
    assert commands in warning and warning.endswith("repeat the command that installs the new build")


@pytest.mark.parametrize(
    ("torch", "torchvision", "installed"),
    [
        ("2.7.1+cu128", "0.22.1+cpu", ("--index-url", "https://download.pytorch.org/whl/cu128", "0.22.1+cu128")),
        ("2.7.1+cu128", "0.22.1+cu118", ("--index-url", "https://download.pytorch.org/whl/cu128", "0.22.1+cu128")),
        ("2.7.1+cu128", "0.22.1+cu126", None),
        ("2.7.1", "0.22.1", None),
        ("2.7.1", "0.21.0+cpu", None),  # belongs to a different torch
        ("2.7.1a0+vendor", "0.22.1+cpu", None),
    ],
)
def test_torchvision_becomes_the_same_build_as_torch(
    place: Place, torch: str, torchvision: str, installed: tuple[str, ...] | None
) -> None:
    with_torch(place, torch, "12.8", torchvision=torchvision)
    commands = [one.argv for one in place.plan("NVIDIA H20, driver 570.86.10\n").commands]
    found = [argv[-3:] for argv in commands if argv[-1].startswith("torchvision")]
    assert found == ([(*installed[:2], f"torchvision=={installed[2]}")] if installed else [])


def test_a_torch_without_gpu_code_after_the_fix_is_an_error(place: Place) -> None:
    """For example if pip takes torch from the index for the CPU."""
    with_torch(place, "2.7.1+cpu", None)
    plan = place.plan(CPU_LOG)
    with pytest.raises(CheckFailed, match=r"torch 2\.7\.1\+cpu has no GPU code"):
        repair_run.require_loaded(plan, place.held())


def test_conda_must_not_keep_its_torch_for_the_cpu(place: Place) -> None:
    """conda's torch for the CPU has the requested version, so `conda install` with the version alone would keep it."""
    with_torch(place, "2.7.1", None, torchvision="0.22.1")
    files = [f"{place.site.relative_to(place.prefix)}/torch-2.7.1.dist-info/METADATA"]
    plan = place.plan(CPU_LOG, conda(place, {"pytorch": ("2.7.1", [], files)}))
    assert installs(plan)[-1] == ("conda", "install", "--prefix", str(place.prefix), "pytorch=2.7.1=*cuda*")
    assert "conda installed torch, and pip installed torchvision: install both with the same tool" in plan.warnings


def test_a_driver_that_is_too_old_gets_an_older_torch(place: Place) -> None:
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.11.0", cuda="13.0")
    plan = place.plan("NVIDIA A100-SXM4-80GB, driver 550.54.15\n")
    torch = plan.diagnosis.changes.torch
    assert torch and tuple(map(int, torch.split("."))) < (2, 11)


def test_damaged_libraries_of_a_replaced_torch_keep_the_versions_of_the_new_one(place: Place) -> None:
    """The installed version belongs to the old torch. Only a library that torch does not require is installed in its
    old version again."""
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.11.0", cuda="13.0", requires=("nvidia-cublas-cu12", "nvidia-nccl-cu12"))
    for kind in ("nccl", "cudnn"):
        with (place.site / f"nvidia/{kind}/lib" / SONAMES[kind]).open("ab") as file:
            file.write(b"of the other wheel")
    plan = place.plan("NVIDIA A100-SXM4-80GB, driver 550.54.15\n")
    torch = plan.diagnosis.changes.torch
    assert [command.argv[5:] for command in plan.commands] == [
        ("--reinstall-package", "nvidia-nccl-cu12", f"torch=={torch}"),
        ("--no-deps", "--reinstall", "nvidia-cudnn-cu12==9.1.0.70"),
    ]
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    commands = installs(place.plan("NVIDIA A100-SXM4-80GB, driver 550.54.15\n"))
    assert [argv[3:] for argv in commands[:2]] == [
        ("uninstall", "--yes", "nvidia-nccl-cu12"),
        ("install", f"torch=={torch}"),
    ]


def with_library(place: Place, name: str, version: str) -> None:
    """Replace a library for CUDA 13 by another version."""
    for folder in place.site.glob(f"nvidia_{name}*"):
        shutil.rmtree(folder)
    files = {f"nvidia/{name}/lib/{SONAMES[name]}": library(name, version)}
    place.made.wheel(f"nvidia-{name}-cu13", version, files)


def test_a_new_torch_would_replace_an_installed_library_that_fits(place: Place) -> None:
    """torch 2.3.1 requires cuBLAS 12.1.3.1, so the installed 12.4.5.8 must be installed again after it."""
    with_torch(place, "2.3.1+cpu", None)
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    place.made.cublas("12.4.5.8")
    plan = place.plan("NVIDIA H20, driver 550.54.15\nCUDA available: False\n")
    assert [argv[-1] for argv in installs(plan)] == ["torch==2.3.1", "nvidia-cublas-cu12==12.4.5.8"]


def test_a_library_version_for_the_replaced_torch_is_not_installed(place: Place) -> None:
    """NCCL 2.29.7 fixes the installed NCCL. The torch for this driver brings 2.27.5, which does not have the fault."""
    with_torch(place, "2.13.0", "13.0")
    with_library(place, "nccl", "2.29.2")
    hang = "NVIDIA H100 80GB HBM3\nworld_size=2\nNCCL version 2.29.2+cuda13.0: all_reduce hangs at step 1\n"
    plan = place.plan(hang)
    assert "nvidia-nccl-cu13==2.29.7" in installs(plan)[-1]
    plan = place.plan(f"{hang}The NVIDIA driver on your system is too old (found version 12080).\n")
    found = {advisory.id for advisory in plan.diagnosis.advisories}
    assert {"nccl-2.28.3-2.29.2", "driver-too-old-cu13"} <= found and plan.diagnosis.by_hand == ()
    pins = {pin.library for pin in plan.diagnosis.changes.pins}
    assert plan.diagnosis.changes.torch == "2.10.0" and "nccl" not in pins


def test_a_fault_in_the_log_without_a_known_feature_is_fixed_with_a_new_torch(place: Place) -> None:
    """An environment does not show whether a program uses deterministic mode. Only the log shows it."""
    with_torch(place, "2.13.0", "13.0")
    plan = place.plan(
        "NVIDIA H100 80GB HBM3, driver 550.54.15\ntorch 2.13.0+cu130\nRuntimeError: this operation is not "
        "deterministic because it uses CuBLAS and you have CUDA >= 10.2\n"
    )
    assert plan.diagnosis.changes.torch == "2.10.0"
    assert "cublas-determinism" in {advisory.id for advisory in plan.diagnosis.advisories}
    assert ("export", "CUBLAS_WORKSPACE_CONFIG=:4096:8") in installs(plan)
    plan = place.plan(
        "NVIDIA H100 80GB HBM3, driver 550.54.15\nRuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when "
        "calling `cublasCreate(handle)`\n"
    )
    assert any(problem.startswith("cublas-not-initialized: ") for problem, _ in plan.diagnosis.by_hand)


def test_a_new_torch_fixes_a_fault_that_it_rules_out(place: Place) -> None:
    """The environment does not show whether the system has a cuDNN, but the new torch is not built for CUDA 13."""
    with_torch(place, "2.13.0", "13.0")
    with_library(place, "cudnn", "9.20.0.48")
    plan = place.plan(
        "NVIDIA H100 80GB HBM3, driver 550.54.15\ntorch 2.13.0+cu130\nRuntimeError: cuDNN error: "
        "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH\n"
    )
    assert plan.diagnosis.changes.torch == "2.10.0" and plan.diagnosis.by_hand == ()
    assert "cudnn-sublibrary-mismatch" in {advisory.id for advisory in plan.diagnosis.advisories}


def test_a_fault_without_a_fixed_version_for_this_cuda_is_left_to_the_user(tmp_path: Path) -> None:
    """cuBLAS 12.4.5.8 exists only for CUDA 12 and newer."""
    place = placed(tmp_path, good)
    with_torch(place, "2.3.1+cu118", "11.8")
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    files = {f"nvidia/cublas/lib/{SONAMES[kind]}": library(kind, "11.11.3.6") for kind in ("cublas", "cublasLt")}
    place.made.wheel("nvidia-cublas-cu11", "11.11.3.6", files)
    plan = place.plan(None, gpus=("h20",))
    assert plan.diagnosis.advisories == () and plan.diagnosis.changes.empty
    (row,) = [row for row in plan.diagnosis.by_hand if row[0].startswith("cublas-hopper-fpe: ")]
    assert row[1].startswith("cuBLAS 12.4.5.8 or newer: torch 2.5 or newer for CUDA 12.4 or newer")
    assert plan.state == "by-hand"


def test_a_driver_that_is_not_a_version_is_passed_over(place: Place) -> None:
    """The environment's Python says which driver it found."""
    held = place.held()
    machine = held.machine.model_copy(update={"gpus": ["NVIDIA H20"], "driver": "newest"})
    plan = place.plan(None, held.model_copy(update={"machine": machine}))
    assert plan.diagnosis.problems == () and plan.state == "fixable"


HOSTILE = "$(touch hacked); `touch hacked` '; touch hacked #"


def test_words_of_a_log_never_reach_a_command(place: Place) -> None:
    """Versions, names and paths in the log are data; only the facts' versions come into commands."""
    log = f"{LOG}torch 2.3.1{HOSTILE}\nnvidia-cublas-cu12=={HOSTILE}\nName: NVIDIA H20 {HOSTILE}\n{HOSTILE} SIGFPE\n"
    plan = place.plan(log)
    assert all("hacked" not in word for command in plan.printed for word in command.argv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version"),
    [("nvidia-evil @ https://evil.example/x.whl", "1"), ("nvidia-evil", "1 --index-url https://evil.example")],
)
def test_a_name_of_a_distribution_cannot_make_pip_fetch_from_elsewhere(tmp_path: Path, name: str, version: str) -> None:
    """The library differs from its checksum, so the distribution would be reinstalled."""
    place = placed(tmp_path, good)
    place.made.put(place.site / "nvidia/evil/lib" / SONAMES["cudnn"], library("cudnn", "9.0.0"))
    info = place.site / "evil-1.dist-info"
    place.made.put(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode())
    place.made.put(info / "RECORD", f"nvidia/evil/lib/{SONAMES['cudnn']},sha256={'A' * 43},1\n".encode())
    plan = place.plan(None)
    damaged = [copy.distribution or "" for copy in place.held().libraries if copy.record is False]
    assert [one.partition(" ")[0] for one in damaged] == ["nvidia-evil"]
    assert not any("evil" in word for command in plan.printed for word in command.argv)


def test_a_folder_with_a_hostile_name_is_quoted(tmp_path: Path) -> None:
    place = placed(tmp_path / HOSTILE.replace("/", ""), faulty)
    plan = place.plan()
    for command in plan.printed:
        assert shlex.split(command.text) == list(command.argv)
    (edit,) = [command for command in plan.printed if command.argv[0] == "sed"]
    subprocess.run(["sh", "-c", edit.text], check=True, cwd=tmp_path)
    assert "==12.4.5.8" in metadata(place).read_text()
    assert not list(tmp_path.rglob("hacked"))


def test_the_command_prints_the_fix(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    done = envbuild("fix", str(log), "--python", str(place.prefix))
    assert done.code == 0
    assert f"uv pip install --python {place.python} --no-deps nvidia-cublas-cu12==12.4.5.8" in done.stdout
    assert f"Loaded now: {place.site}/nvidia/cublas/lib/libcublas.so.12 (12.1.3.1" in done.stdout
    assert "envbuild test h20 --python" in done.stdout
    document = json.loads(envbuild("fix", str(log), "--python", str(place.prefix), "--json").stdout)
    assert (document["state"], document["profile"], [row["id"] for row in document["advisories"]]) == (
        "fixable",
        "h20",
        ["cublas-hopper-fpe"],
    )
    assert all(shlex.split(row["text"]) == row["argv"] for row in document["commands"])


@pytest.mark.parametrize("order", [("VIRTUAL_ENV", "CONDA_PREFIX"), ("CONDA_PREFIX", "VIRTUAL_ENV")])
def test_here_is_the_environment_that_was_activated_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    for name in order:
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name / "bin") for name in order))
    assert audit_command.nearest_python() == str(tmp_path / order[0] / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "CONDA_PREFIX" / "bin"))
    assert audit_command.nearest_python() == str(tmp_path / "VIRTUAL_ENV" / "bin" / "python")


@pytest.mark.slow
def test_undo_finds_the_environment_through_a_link_to_its_interpreter(tmp_path: Path) -> None:
    """Python follows the link: it leads to an interpreter in a different folder, as of conda."""
    python = Path(os.path.realpath(sys.executable))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "linked").symlink_to(python)
    done = envbuild("fix", "--python", str(tmp_path / "bin" / "linked"), "--undo")
    assert f"{sys.base_prefix} has no fix to undo" in done.stderr


def test_the_command_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    done = envbuild("fix", "--python", str(place.prefix))
    assert (done.code, done.stdout.splitlines()[-1]) == (0, "Nothing to fix.")


def test_an_environment_without_torch_is_refused(tmp_path: Path) -> None:
    python, _ = virtual(tmp_path / "venv")
    done = envbuild("fix", "--python", str(python))
    assert done.code == 3 and "torch is not installed" in done.stderr
    assert envbuild("fix", "--python", str(python), "--here").code == 2
