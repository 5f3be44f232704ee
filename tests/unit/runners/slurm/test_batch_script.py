"""The batch script: golden for every container runtime; and values that must not be in one."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import PurePosixPath
from typing import Any

import pytest

from envbuild.facts import database
from envbuild.runners.slurm import batch_script, slurm_settings
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.util import settings
from envbuild.util.errors import UsageError
from unit.regenerate import GOLDEN
from unit.runners.scripts import CASES, CPU, FOLDER, ID, JOB, rendered
from unit.support import configure


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_as_it_was(case: str) -> None:
    assert rendered(case) == (GOLDEN / "slurm" / f"{case}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_can_read_it(case: str) -> None:
    done = subprocess.run(["bash", "-n"], input=rendered(case), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("case", CASES)
def test_no_array_without_elements_ends_it_in_an_old_bash(case: str) -> None:
    """Before bash 4.4 an empty array counts as unset, and the scripts use `set -u`."""
    guarded = re.sub(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\]\}"\}', "", rendered(case))
    assert "[@]}" not in guarded.replace("${#fabric[@]}", "")


@pytest.mark.parametrize("case", CASES)
def test_a_script_asks_for_its_gpus_and_no_more(case: str) -> None:
    expected = {"cpu": [], "docker": ['#SBATCH --gres="gpu:nvidia_h20:2"']}.get(case, ['#SBATCH --gres="gpu:h20:2"'])
    assert [line for line in rendered(case).splitlines() if "gres" in line] == expected


def parsed(**values: Any) -> SlurmSite:
    return slurm_settings.parse(values, {}, database.gpus().__contains__)


HOSTILE = ["x\n#SBATCH --uid=0", "$(id)", "a b", '"', "'", "x#y", "-x", "é", "", "%j", "`id`", "x;y", "\x1b[2J", 7.5]


@pytest.mark.parametrize("key", ["partition", "account", "constraint", "time", "container", "program", "registry",
                                 "folder", "requeue", "qos", "reservation", "cpus_per_task", "mem"])  # fmt: skip
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_hostile_setting_is_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(**{key: value})
    assert [fault.field for fault in caught.value.faults] == [key]
    assert "\x1b" not in str(caught.value.faults)


@pytest.mark.parametrize("value", [*(value for value in HOSTILE), -1, 10_000_000, True], ids=repr)
@pytest.mark.parametrize("key", ["grace", "queue"])
def test_a_hostile_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError):
        parsed(**{key: value})


@pytest.mark.parametrize(
    ("text", "time", "account"),
    [
        ("{time: 30, account: 12345}", "30", "12345"),
        ("{time: 1:30:00, account: 0123}", "1:30:00", "0123"),
        ('{time: "30:00", account: team}', "30:00", "team"),
    ],
)
def test_numbers_need_no_quotes(text: str, time: str, account: str) -> None:
    """YAML 1.1 reads 1:30:00 as 5400, which Slurm would take as minutes, and 0123 as 83."""
    configure(f"slurm: {text}\n")
    found = slurm_settings.parse(settings.section("slurm"), {}, database.gpus().__contains__)
    assert (found.time, found.account) == (time, account)


@pytest.mark.parametrize("value", [100000, -1, True, 0, "0", "00", "0:00", "0-0", "0-00:00:00"], ids=repr)
def test_an_invalid_time_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parsed(time=value)


@pytest.mark.parametrize("value", ["0", "08", "10000", "1.5", True, -1], ids=repr)
def test_an_invalid_number_of_processors_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parsed(cpus_per_task=value)


@pytest.mark.parametrize("value", ["64g", "64GB", "G", "00", "064", -1, True], ids=repr)
def test_an_invalid_memory_size_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parsed(mem=value)
    assert (parsed(mem=64000).mem, parsed(mem="64G").mem, parsed(mem=0).mem) == ("64000", "64G", "0")


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_hostile_gres_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parsed(gres={"h20": value})
    with pytest.raises(UsageError):
        parsed(gres={value: "gpu:h20"})


def test_all_faults_come_at_once_and_the_command_line_wins() -> None:
    with pytest.raises(UsageError) as caught:
        parsed(partion="x", time="soon", gres=["h20"], container="pyxis")
    assert [fault.field for fault in caught.value.faults] == ["partion", "time", "gres", "registry"]
    given = {"partition": "b", "gres.h20": "gpu:x", "requeue": "yes"}
    found = slurm_settings.parse(
        {"partition": "a", "gres": {"h20": "y", "a100": "z"}}, given, database.gpus().__contains__
    )
    assert (found.partition, found.gres, found.requeue) == ("b", {"h20": "gpu:x", "a100": "z"}, True)
    assert (parsed(grace=3).grace, parsed(grace="3").grace, parsed().grace) == (3, 3, 20)
    assert (parsed(queue=0).queue, parsed(queue="60").queue, parsed().queue) == (0, 60, None)


@pytest.mark.parametrize("folder", ["/a b", "/a'b", "/a%jb", "relative", "/a$b", "/a\nb"])
def test_a_folder_that_slurm_or_a_shell_would_read_is_refused(folder: str) -> None:
    with pytest.raises(UsageError):
        batch_script.render(CPU, SlurmSite(), PurePosixPath(folder), "envbuild-x-1", (ID,))


@pytest.mark.parametrize("name", ["cpu:latest", f"x y@{ID}", f"$(id)@{ID}", ID[:-1], ""])
def test_an_image_without_a_digest_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        batch_script.render(CPU, SlurmSite(), FOLDER, "envbuild-x-1", (name,))


@pytest.mark.parametrize("case", CASES)
def test_no_script_uses_a_clock_that_can_be_set(case: str) -> None:
    """A clock that was set back during the run gave a negative duration, which is not a result."""
    code = re.sub("#.*", "", rendered(case))
    assert "/proc/uptime" in code and not re.search(r"SECONDS|\bdate\b|EPOCH|printf '%\(", code)


def test_one_of_several_gpus_must_be_named() -> None:
    with pytest.raises(UsageError) as caught:
        batch_script.render(
            dataclasses.replace(JOB, models=("h20", "a100")), SlurmSite(), FOLDER, "envbuild-x-1", (ID,)
        )
    assert caught.value.hint == "--gpu h20 or --gpu a100"


def test_the_goldens_are_these() -> None:
    assert {file.stem for file in (GOLDEN / "slurm").iterdir()} == set(CASES)
