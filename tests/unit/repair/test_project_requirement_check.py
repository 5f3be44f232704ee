"""Lines of a project's files that still require the replaced versions."""

from __future__ import annotations

from pathlib import Path

from envbuild.facts import database
from envbuild.repair import project_requirement_check
from envbuild.repair.required_changes import Changes

BEFORE = {"torch": "2.5.1+cu121", "torchvision": "0.20.1+cu121", "numpy": "1.26.4"}
AFTER = {"torch": "2.8.0", "torchvision": "0.23.0", "numpy": "1.26.4"}


def found(folder: Path) -> list[str]:
    lines = project_requirement_check.outdated_requirements(folder, BEFORE, AFTER)
    return [line.removeprefix(f"{folder}/") for line in lines]


def test_requirements_and_constraints(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "--extra-index-url https://download.pytorch.org/whl/cu121\n-r other.txt\ntorch==2.5.1+cu121  # of the team\n"
        "numpy==1.0\nTorchVision<0.21 ; python_version < '4' --config-settings=a=b\nnot a requirement !\ntorch\n"
    )
    (tmp_path / "constraints.txt").write_text("torch>=2.5\ntorch<2.6\n")
    assert found(tmp_path) == [
        "requirements.txt:3 still requires torch==2.5.1+cu121: write torch==2.8.0",
        'requirements.txt:5 still requires TorchVision<0.21; python_version < "4": '
        'write TorchVision==0.23.0; python_version < "4"',
        "requirements.txt:1 names the index of the builds for cu121: torch 2.8.0 is not one of these; remove this line",
        "constraints.txt:2 still requires torch<2.6: write torch==2.8.0",
    ]


def test_lines_with_hashes(tmp_path: Path) -> None:
    """As pip-compile and uv write them. A backslash may also follow the version directly."""
    (tmp_path / "requirements.txt").write_text(
        "# by uv\nnumpy==1.26.4 \\\n    --hash=sha256:00\n"
        "torch==2.5.1\\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n"
        "    # via it\ntorchvision \\\n    ==0.20.1 --hash=sha256:00\napex==0.1 \\\n    --hash=sha256:00"
    )
    lines = project_requirement_check.outdated_requirements(tmp_path, {**BEFORE, "apex": "0.1"}, AFTER)
    torch, torchvision, apex = [line.removeprefix(f"{tmp_path}/") for line in lines]
    start = "requirements.txt:4 still requires torch==2.5.1: write torch==2.8.0 with the hashes of that version"
    assert torch.startswith(f"{start} in place of the present ones")
    assert "`pip download --no-deps torch==2.8.0`, then `pip hash`" in torch
    assert torchvision.startswith(
        "requirements.txt:8 still requires torchvision==0.20.1: write torchvision==0.23.0 with"
    )
    assert apex == "requirements.txt:10 still requires apex==0.1: remove the line and its hashes"


def test_a_build_of_pytorchs_index_is_downloaded_from_there(tmp_path: Path) -> None:
    """numpy is not on that index."""
    (tmp_path / "requirements.txt").write_text("torch==2.5.1 --hash=sha256:00\nnumpy==1.0 --hash=sha256:00\n")
    after = {"torch": "2.7.1+cu126", "numpy": "2.0"}
    torch, numpy = project_requirement_check.outdated_requirements(tmp_path, {"torch": "2.5.1", "numpy": "1.0"}, after)
    address = database.torch_index().address.format(build="cu126")
    assert f"`pip download --no-deps --index-url {address} torch==2.7.1+cu126`" in torch
    assert "`pip download --no-deps numpy==2.0`" in numpy


def test_a_companion_of_which_only_the_series_is_planned(tmp_path: Path) -> None:
    """A plan leaves the last number of the versions of torchvision and torchaudio to pip."""
    changes = Changes(torch="2.8.0", companions=("torchvision==0.23.*",))
    after = project_requirement_check.planned_versions(BEFORE, changes)
    (tmp_path / "requirements.txt").write_text(
        "torchvision==0.20.1\ntorchvision>=0.20\ntorchvision==0.23.1\ntorchvision\ntorchvision<0.23\n"
    )
    lines = project_requirement_check.outdated_requirements(tmp_path, BEFORE, after)
    assert [line.removeprefix(f"{tmp_path}/") for line in lines] == [
        "requirements.txt:1 still requires torchvision==0.20.1: write torchvision==0.23.*",
        "requirements.txt:5 still requires torchvision<0.23: write torchvision==0.23.*",
    ]


def test_a_removed_package_and_a_line_for_another_system(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("apex\ntorch==2.5.1; sys_platform == 'win32'\nnumpy==1.0\n")
    before = {**BEFORE, "apex": "0.9.10.dev0"}
    (line,) = project_requirement_check.outdated_requirements(tmp_path, before, AFTER)
    assert line == f"{tmp_path}/requirements.txt:1 still requires apex: remove the line"


def test_a_project_without_uv_and_poetry(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "it"\ndependencies = [\n  "torch==2.5.1",\n  "numpy",\n]\n'
        '[project.optional-dependencies]\nvision = ["torchvision[scipy]==0.20.1"]\n'
        '[dependency-groups]\ndev = ["torch==2.5.*", {include-group = "x"}]\n'
    )
    assert [line.partition(" ")[0] for line in found(tmp_path)] == [
        "pyproject.toml:4", "pyproject.toml:8", "pyproject.toml:10",
    ]  # fmt: skip
    assert found(tmp_path)[1].endswith("write torchvision[scipy]==0.23.0")


def test_requirements_that_uv_add_does_not_change(tmp_path: Path) -> None:
    """`uv add` replaces the first two, and the extra allows the new version."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = [\n  "torch==2.5.1",\n  "torchvision>=0.20,<0.21",\n'
        "  \"torch==2.5.1; sys_platform == 'darwin'\",\n]\n"
        '[project.optional-dependencies]\ngpu = ["torch>=2.5"]\n'
        '[dependency-groups]\ngpu = ["torch==2.5.1"]\n'
        '[tool.uv]\nconstraint-dependencies = ["torch<2.6"]\n'
        '[tool.uv.workspace]\nmembers = ["parts/*", "/absolute", ""]\nexclude = ["parts/other"]\n'
    )
    for name in ("mine", "other"):
        (tmp_path / "parts" / name).mkdir(parents=True)
        (tmp_path / "parts" / name / "pyproject.toml").write_text('[project]\ndependencies = ["torch==2.5.1"]\n')
    lines = project_requirement_check.requirements_kept_by_uv_add(tmp_path, BEFORE, AFTER)
    assert [line.removeprefix(f"{tmp_path}/") for line in lines] == [
        'pyproject.toml:5 still requires torch==2.5.1; sys_platform == "darwin": '
        'write torch==2.8.0; sys_platform == "darwin"',
        "pyproject.toml:10 still requires torch==2.5.1: write torch==2.8.0",
        "pyproject.toml:12 still requires torch<2.6: write torch==2.8.0",
        "parts/mine/pyproject.toml:2 still requires torch==2.5.1: write torch==2.8.0",
    ]


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[")
    (tmp_path / "requirements.txt").mkdir()
    (tmp_path / "requirements-big.txt").write_text("torch==2.5.1\n" * (1 << 17))
    assert found(tmp_path) == []


def test_versions_after_the_planned_changes() -> None:
    """Bounds that leave the version open are left out."""
    changes = Changes(torch="2.7.1", companions=("torchvision==0.22.1",), packages=("numpy>=2",))
    before = {**BEFORE, "nvidia-cublas-cu12": "12.1.3.1"}
    planned = project_requirement_check.planned_versions(before, changes)
    new = {"torch": "2.7.1", "torchvision": "0.22.1", "nvidia-cublas-cu12": "12.6.4.1"}
    assert planned == {**before, **new}


def test_versions_after_removals() -> None:
    """A removed distribution is left out, unless the changes install it again."""
    changes = Changes(torch="2.7.1", uninstall=("apex",), overwriting=("nvidia-cublas", "nvidia-cublas-cu12"))
    before = {**BEFORE, "apex": "0.9.10.dev0", "nvidia-cublas": "13.0.0.19", "nvidia-cublas-cu12": "12.1.3.1"}
    planned = project_requirement_check.planned_versions(before, changes)
    assert planned == {**BEFORE, "torch": "2.7.1", "nvidia-cublas-cu12": "12.6.4.1"}


def test_a_removed_distribution_with_a_new_bound_stays() -> None:
    """The changes install some version of it again, which is not known before."""
    changes = Changes(packages=("apex>=1",), uninstall=("apex",))
    before = {**BEFORE, "apex": "0.9.10.dev0"}
    assert project_requirement_check.planned_versions(before, changes) == before
