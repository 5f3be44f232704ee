"""What fixes an image: the lines of a Dockerfile, or the change of its profile. The lines are run by a shell; the
contents of the image are collected in an environment here, or are a document that a hostile image returns."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selftest.environments import SONAMES, good, library

from envbuild.audit import environment_audit, image_collector
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import Expected
from envbuild.cli import audit as audit_command
from envbuild.facts import database
from envbuild.image import docker_engine
from envbuild.repair import image_repair_plan, repair_output
from envbuild.repair.image_repair_plan import ImageRepairPlan
from unit.repair import test_repair_plan
from unit.repair.test_repair_plan import LOG, Place, explained, faulty, placed
from unit.support import CommandResult, envbuild, image_of

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with")
no_loader_variables = test_repair_plan.no_loader_variables
H20 = database.gpus()["h20"]
IMAGE = "registry.example/team/train:1"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = placed(tmp_path, faulty)
    found.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    return found


def plan(held: Holdings, log: str | None = LOG, user: str = "", **expected: Any) -> ImageRepairPlan:
    found = explained(log) if log else None
    wanted = image_repair_plan.expected_in_image(Expected(**expected) if expected else None, found, ())
    return image_repair_plan.plan_image_repair(environment_audit.assess(IMAGE, held, wanted), found, user)


def test_a_log_of_h20_gives_the_lines_of_a_dockerfile(place: Place) -> None:
    found = plan(place.held())
    assert (found.state, found.profile, found.profile_change) == ("fixable", None, ())
    first, install, edit = found.dockerfile
    assert first == f"FROM {IMAGE}"
    assert install == f"RUN {place.python} -m pip install --no-deps nvidia-cublas-cu12==12.4.5.8"
    assert edit.startswith("RUN sed -i") and "==12.4.5.8" in edit
    assert {(row.library, row.before_version) for row in found.libraries} == {
        ("libcublas.so.12", "12.1.3.1"),
        ("libcublasLt.so.12", "12.1.3.1"),
    }
    assert found.diagnosis.probes == ("gemm.crash",)


def test_the_edit_of_the_metadata_leaves_an_environment_that_the_audit_accepts(place: Place) -> None:
    record = place.site / "torch-2.3.1.dist-info" / "RECORD"
    metadata = record.with_name("METADATA")
    others = {path: path.read_bytes() for path in place.site.glob("nvidia*.dist-info/*")}
    text = record.read_text().replace("METADATA,,", f"METADATA,sha256={'A' * 43},9")
    record.write_text(text)
    held = place.held()
    assert [Path(item.path).name for item in held.altered] == ["METADATA"]
    edit = plan(held).dockerfile[-1]
    subprocess.run(["sh", "-c", edit.removeprefix("RUN ")], check=True)
    assert place.held().altered == []
    assert "Requires-Dist: nvidia-cublas-cu12 ==12.4.5.8 ;" in metadata.read_text()
    assert record.read_text() == text.replace(f"METADATA,sha256={'A' * 43},9", "METADATA,,")
    assert {path: path.read_bytes() for path in others} == others


def test_the_edit_leaves_packages_that_accept_the_new_version(place: Place) -> None:
    """The checksum of their METADATA also stays right, so that the audit of the fixed image finds no changed file."""
    place.made.wheel("fused-Ops", "1.0", {}, ["nvidia-cublas-cu12>=12.1"])
    place.made.wheel("Other_ops", "2.0", {}, ["nvidia-cublas-cu12==12.1.3.1", "nvidia-cudnn-cu12==9.1.0.70"])
    (edit,) = [line for line in plan(place.held()).dockerfile if line.startswith("RUN sed")]
    subprocess.run(["sh", "-c", edit.removeprefix("RUN ")], check=True)
    required = [
        line
        for name in ("fused_Ops-1.0", "Other_ops-2.0", "torch-2.3.1")
        for line in (place.site / f"{name}.dist-info" / "METADATA").read_text().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    assert [line.removeprefix("Requires-Dist: ").rstrip() for line in required] == [
        "nvidia-cublas-cu12>=12.1",
        "nvidia-cublas-cu12==12.4.5.8",
        "nvidia-cudnn-cu12==9.1.0.70",
        'nvidia-cublas-cu12 ==12.4.5.8 ; platform_system == "Linux"',
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "first", "last"),
    [
        ("", "RUN", "RUN"),
        ("root", "RUN", "RUN"),
        ("1000:1000", "USER root", "USER 1000:1000"),
        ("a\nRUN touch /hacked", "USER root", "RUN"),
    ],
)
def test_the_lines_run_as_root_and_keep_the_images_user(place: Place, user: str, first: str, last: str) -> None:
    found = plan(place.held(), user=user)
    lines = found.dockerfile
    assert any("runs as root" in warning for warning in found.warnings) == ("hacked" in user)
    assert lines[1].startswith(first) and lines[-1].startswith(last)
    assert not any("hacked" in line for line in lines)


def test_an_image_of_a_known_profile_gets_a_change_of_the_profile(place: Place) -> None:
    known: dict[str, Any] = {"profile": "mine", "cli_words": "mine", "claimed": True, "gpus": (H20,)}
    found = plan(place.held(), None, **known)
    assert (found.profile, found.profile_change, found.dockerfile) == ("mine", ("pins: {cublas: 12.4.5.8}",), ())
    accepted = plan(place.held(), None, **known, accepted={"cublas-hopper-fpe": "tested"})
    assert accepted.profile_change == ()


OUT_OF_MEMORY = """NVIDIA A100-SXM4-80GB, driver 550.54.15
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB
"""


def test_an_image_of_a_known_profile_is_built_again_only_if_that_fixes_something(place: Place) -> None:
    known: dict[str, Any] = {"profile": "mine", "cli_words": "mine", "claimed": True, "gpus": (H20,)}
    held = place.held().model_copy(update={"unrecorded": []})
    found = plan(held, OUT_OF_MEMORY, **known)
    assert found.diagnosis.by_hand and found.diagnosis.changes.empty
    assert (found.rebuild, found.state) == (False, "by-hand")
    assert not [line for line in repair_output.image_repair_lines(found, "2.3.1", [], []) if line.startswith("Fix:")]
    found = plan(held.model_copy(update={"unrecorded": ["/opt/venv/added.py"]}), OUT_OF_MEMORY, **known)
    assert (found.rebuild, found.state, found.profile_change) == (True, "fixable", ())
    assert "Fix: build the image again" in repair_output.image_repair_lines(found, "2.3.1", [], [])


def test_torch_for_the_cpu_is_a_change_of_torch(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.7.1+cpu", cuda=None)
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    assert plan(place.held(), None, gpus=(H20,)).dockerfile == (
        f"FROM {IMAGE}",
        f"RUN {place.python} -m pip uninstall --yes torch",
        f"RUN {place.python} -m pip install torch==2.7.1",
    )
    known: dict[str, Any] = {"profile": "mine", "cli_words": "mine", "claimed": True, "gpus": (H20,)}
    assert plan(place.held(), None, **known).profile_change == ("torch: 2.7.1", "cuda: '12.6'")
    place.made.wheel("torchvision", "0.22.1+cpu", {"torchvision/__init__.py": b""})
    removed, added = plan(place.held(), None, gpus=(H20,)).dockerfile[1:]
    assert removed.endswith(" uninstall --yes torch torchvision")
    assert added.endswith(" install torch==2.7.1 'torchvision==0.22.*'")
    shutil.rmtree(next(place.site.glob("pip-*")))
    (added,) = plan(place.held(), None, gpus=(H20,)).dockerfile[1:]
    assert added.endswith(
        " --reinstall-package torch --reinstall-package torchvision torch==2.7.1 'torchvision==0.22.*'"
    )
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.7.1", cuda="12.6")
    assert plan(place.held(), None, gpus=(H20,)).dockerfile[1] == (
        f"RUN {place.python} -m pip install --no-deps --force-reinstall torchvision==0.22.1"
    )


def test_a_damaged_library_is_installed_again_with_the_new_torch(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.11.0", cuda="13.0", requires=("nvidia-cublas-cu12", "nvidia-nccl-cu12"))
    place.made.wheel("pip", "24.0", {"pip/__init__.py": b""})
    with (place.site / "nvidia/nccl/lib" / SONAMES["nccl"]).open("ab") as file:
        file.write(b"of the other wheel")
    found = plan(place.held(), "NVIDIA A100-SXM4-80GB, driver 550.54.15\n")
    torch = found.diagnosis.changes.torch
    assert found.dockerfile == (
        f"FROM {IMAGE}",
        f"RUN {place.python} -m pip uninstall --yes nvidia-nccl-cu12",
        f"RUN {place.python} -m pip install torch=={torch}",
    )


def test_without_pip_the_missing_tool_is_named(place: Place) -> None:
    shutil.rmtree(next(place.site.glob("pip-*")))
    found = plan(place.held())
    assert found.dockerfile[1].startswith(f"RUN uv pip install --python {place.python} ")
    assert any("has no pip" in warning for warning in found.warnings)


def test_a_library_of_conda_is_left_to_conda(place: Place) -> None:
    held = place.held()
    moved = [
        copy.model_copy(update={"path": f"/opt/conda/lib/{copy.name}", "owner": "unowned", "record": None})
        for copy in held.libraries
    ]
    found = plan(held.model_copy(update={"libraries": moved}))
    assert any("/opt/conda/lib/libcublas.so.12" in warning for warning in found.warnings)


def test_a_variable_that_leads_to_an_old_copy_is_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = placed(tmp_path, good)
    test_repair_plan.with_runpath(place)
    old = tmp_path.resolve() / "cuda"
    for kind in ("cublas", "cublasLt"):
        place.made.put(old / SONAMES[kind], library(kind, "12.1.3.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old))
    found = plan(place.held())
    assert found.dockerfile == () and found.state == "by-hand"
    assert any("unset LD_LIBRARY_PATH" in remedy for _, remedy in found.diagnosis.by_hand)


HOSTILE = ["a'b $(touch hacked) `touch hacked`", "#", "<<EOF", "x && touch hacked", "-rf /"]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_hostile_image_stay_words(place: Place, tmp_path: Path, text: str) -> None:
    """The texts are the paths and names that the image's Python returns. Each line is run by a shell that has only
    harmless programs."""
    held = place.held()
    python = held.python.model_copy(update={"executable": f"/opt/{text}"})
    spoiled = [
        item.model_copy(update={"folder": f"{tmp_path}/{text}", "name": text if item.name == "pip" else item.name})
        for item in held.distributions
    ]
    leftovers = [
        copy.model_copy(update={"record": None, "path": f"/x/site-packages/nvidia/{text}/{copy.name}"})
        for copy in held.libraries
    ]
    document = held.model_copy(update={"python": python, "distributions": spoiled, "libraries": leftovers})
    found = plan(document)
    assert found.dockerfile
    for line in found.dockerfile:
        assert len(line.splitlines()) == 1 and re.match(r"(FROM|RUN|ENV|USER) ", line)
        script = f"uv() {{ :; }}; rm() {{ :; }}; sed() {{ :; }}; {line.removeprefix('RUN ')}"
        if line.startswith("RUN "):
            subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True)
    assert not list(tmp_path.glob("hacked"))


# the command


class OneImage:
    """An engine with one image."""

    def get(self, reference: str) -> docker_engine.Image:
        return dataclasses.replace(image_of(), user="1000")


@pytest.fixture
def fix(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CommandResult]:
    held = place.held()
    monkeypatch.setattr(docker_engine, "Engine", OneImage)
    monkeypatch.setattr(image_collector, "collect_from_image", lambda *arguments: held)
    (tmp_path / "train.log").write_text(LOG)
    return lambda *words: envbuild("fix", str(tmp_path / "train.log"), "--image", *words)


def test_the_command_prints_a_dockerfile(fix: Callable[..., CommandResult]) -> None:
    done = fix(IMAGE)
    assert done.code == 0, done.stderr
    assert f"  FROM {IMAGE}\n  USER root\n" in done.stdout and "  USER 1000\n" in done.stdout
    assert f"docker build --tag {IMAGE}-fixed fixed\n" in done.stdout
    assert f"envbuild audit {IMAGE}-fixed --gpu h20" in done.stdout
    assert "Loaded now: " in done.stdout and "12.1.3.1" in done.stdout
    document = fix(IMAGE, "--json").document
    assert (document["state"], document["manager"]) == ("fixable", "image")
    assert document["dockerfile"][0] == f"FROM {IMAGE}" and document["commands"][0]["argv"][:2] == ["docker", "build"]
    ruled_out = fix(IMAGE, "--gpu", "a100")
    assert ruled_out.stdout.splitlines()[-1] == "Nothing to fix."
    assert "do not match: if the job ran elsewhere, say where with --image" in ruled_out.stdout


@pytest.mark.parametrize(
    ("image", "fixed"),
    [
        ("train", "train:fixed"),
        ("team/train:1", "team/train:1-fixed"),
        ("localhost:5000/train", "localhost:5000/train:fixed"),
        ("localhost:5000/train:1@sha256:" + "0" * 64, "localhost:5000/train:1-fixed"),
        ("train@sha256:" + "0" * 64, "train:fixed"),
    ],
)
def test_the_fixed_image_replaces_no_other_tag(image: str, fixed: str) -> None:
    assert image_repair_plan.fixed_image_name(image) == fixed


def test_the_command_names_the_profile_and_its_change(
    fix: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Expected(profile="mine", cli_words="mine", claimed=True, gpus=(H20,))
    monkeypatch.setattr(audit_command, "contents_by_label", lambda image: known)
    done = fix(IMAGE)
    assert "Fix: in the profile mine\n  pins: {cublas: 12.4.5.8}\n" in done.stdout
    assert "  envbuild make mine\n" in done.stdout
    document = json.loads(fix(IMAGE, "--json").stdout)
    assert (document["manager"], document["profile"]) == ("profile", "mine")


def test_an_image_is_never_changed(fix: Callable[..., CommandResult]) -> None:
    for words in (("--apply",), ("--undo",), ("--here",), ("--python", "/x")):
        done = fix(IMAGE, *words)
        assert done.code == 2 and "fixed by building a new one" in done.stderr
    for name in ("a b", "a\nRUN x", "-x", "a$(b)"):
        assert fix(name).code == 2
