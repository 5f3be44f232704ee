"""No test depends on the path of the checkout: some tests are run from a copy whose path contains `envbuild` and a
space.

`make test-elsewhere` runs all unit and self-test tests from such a copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Tests that read tracebacks and their own paths, start Python, pipe through a shell, or read the checkout.
SLICE = (
    "tests/selftest/harness/test_project_test_spec_reader.py::test_a_scripts_stacks_have_its_own_frames_alone_under_its_own_name",
    "tests/selftest/harness/test_script_tracebacks.py",
    *(
        f"tests/unit/cli/test_entry.py::test_a_closed_output_is_not_a_fault[n 1-{command}]"
        for command in ("export schema", "show", "show cpu", "status --help", "advisories")
    ),
    "tests/unit/explain/test_log_decompression.py::test_several_files_are_one_run",
    "tests/unit/facts/test_probe_catalogue_reader.py",
    "tests/unit/runners/test_host_runner.py::test_an_interpreter_is_found_by_path_or_in_its_environment",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as they are in the working tree, with a virtual environment that has the packages of this
    one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0 or not (ROOT / ".git").exists():
        pytest.skip("this checkout is not a git repository: nothing says which files are tracked")
    folder = tmp_path_factory.mktemp("elsewhere") / "my envbuild" / "check out"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    lent = [path for path in sys.path if path.endswith("-packages")]
    (packages / "lent.pth").write_text("\n".join([str(folder), *lent]) + "\n", encoding="utf-8")
    return folder


def test_some_tests_pass_in_a_checkout_whose_path_holds_envbuild_and_a_space(copy: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON"))}
    python = copy / ".venv" / "bin" / "python"
    code = "import envbuild; print(envbuild.__file__)"
    mine = subprocess.run([python, "-c", code], cwd="/", env=environment, capture_output=True, text=True, check=True)
    assert Path(mine.stdout.strip()).is_relative_to(copy)
    command: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *SLICE]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
