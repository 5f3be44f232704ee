"""GPUs by name on the command line: GPUs with a shipped profile, GPUs for which envbuild can write a profile, and GPUs
that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from envbuild.facts import database
from envbuild.pipeline import make_build_and_test, multi_profile_make
from envbuild.pipeline.step_context import StepContext
from envbuild.profile import profile_and_lock_name_lookup, starter_profile
from envbuild.profile.value_types import PLATFORM
from envbuild.resolve import cuda_line_lookup, plan_resolver, profile_reader_and_overrides
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import EngineError
from unit.support import envbuild, write_profile

SUPPORTED = [gpu.id for gpu in database.gpus().values() if database.unsupported(gpu.id, PLATFORM) is None]
UNSUPPORTED = [gpu.id for gpu in database.gpus().values() if gpu.id not in SUPPORTED]


def files(project: Path) -> list[str]:
    return sorted(file.name for file in project.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H20", "h20"),
        ("H20", "h20"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("rtx 4090", "rtx4090"),
        ("H100 PCIe", "h100"),
        ("NVIDIA H20, 550.54.15", "h20"),  # nvidia-smi --query-gpu=name,driver_version --format=csv
        ("NVIDIA H20, 97871 MiB, 550.54.15", "h20"),
        ("h20-3e", "h20"),  # the two models share evidence
        ("NVIDIA A800-SXM4-80GB", "a100"),
    ],
)
@pytest.mark.usefixtures("project")
def test_the_name_of_a_gpu_stands_for_its_shipped_profile(name: str, profile: str) -> None:
    done = envbuild("show", name)
    assert (done.code, done.stdout, done.stderr) == (0, envbuild("show", profile).stdout, "")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", SUPPORTED)
def test_every_supported_gpu_has_a_profile_that_resolves(gpu: str, project: Path) -> None:
    loaded = profile_reader_and_overrides.unwritten(gpu)
    plan = plan_resolver.resolve(loaded)
    assert [found.id for found in plan.choice.situation.gpus] == [gpu]
    assert not [item for item in plan.choice.advice if item.state == "refused"]
    assert files(project) == []


@pytest.mark.parametrize("name", profile_and_lock_name_lookup.profile_names())
def test_no_shipped_profile_has_a_warning_that_it_does_not_accept(name: str) -> None:
    """A new advisory may apply to a profile: pin other versions, or accept it with a reason."""
    plan = plan_resolver.resolve(profile_reader_and_overrides.load(name))
    assert [item.advisory.id for item in plan.choice.advice if item.state not in ("noted", "accepted")] == []


def test_the_documented_profile_compiles_apex_for_cuda_12(project: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "profiles.md"
    _, begin, rest = page.read_text(encoding="utf-8").partition("# profiles/h20-cu124.yaml\n")
    assert begin
    write_profile(project, yaml.safe_load(rest.partition("```")[0]), "h20-cu124")
    plan = plan_resolver.resolve(profile_reader_and_overrides.load("h20-cu124"))
    assert plan.extensions["apex"] and plan.extension_toolchain
    assert (plan.core[-1], plan.extension_toolchain.arch) == ("torch===2.6.0", "9.0")
    assert plan.extension_toolchain.toolchain.debian
    assert not [item for item in plan.choice.advice if item.state == "refused"]


@pytest.mark.parametrize("gpu", UNSUPPORTED)
@pytest.mark.usefixtures("project")
def test_every_unsupported_gpu_is_refused_by_each_of_its_names(gpu: str) -> None:
    reason = database.unsupported(gpu, PLATFORM)
    for name in (gpu, *database.gpus()[gpu].names):
        done = envbuild("show", name)
        assert done.code == 3 and done.stderr == f"error: {reason}\n"


@pytest.mark.parametrize(
    ("gpu", "parent"),
    [
        ("rtx2080ti", "t4"),
        ("titan-v", "v100"),
        ("a10", "a100"),
        ("rtx3090", "a100"),
        ("l20", "l40s"),
        ("rtx6000-ada", "l40s"),
        ("rtx4080", "rtx4090"),
        ("rtx4090-laptop", "rtx4090"),
        ("h800", "h100"),
        ("b300", "b200"),
        ("rtx5080-laptop", "rtx5090"),
        ("rtxpro6000", "rtx5090"),
    ],
)
def test_the_pins_are_those_of_the_nearest_gpu(gpu: str, parent: str) -> None:
    assert yaml_and_project_paths.parse(starter_profile.for_gpu(gpu), gpu).data == {
        "description": database.gpus()[gpu].names[0], "extends": parent, "gpus": [gpu],
    }  # fmt: skip


def test_show_writes_nothing_and_new_writes_the_profile_that_was_shown(project: Path) -> None:
    before = envbuild("show", "NVIDIA GeForce RTX 5080 Laptop GPU")
    assert before.code == 0 and before.stdout.startswith("rtx5080-laptop: NVIDIA GeForce RTX 5080 Laptop GPU\n")
    note = "no profile is shipped for rtx5080-laptop: using the profile that `envbuild init rtx5080-laptop` would write"
    assert before.stderr == f"note: {note}, with the pins of rtx5090\n"
    assert files(project) == []
    done = envbuild("init", "RTX 5080 Laptop")
    assert (done.code, files(project)) == (0, ["rtx5080-laptop.yaml"])
    after = envbuild("show", "rtx5080-laptop")
    assert (after.code, after.stderr) == (0, "")
    assert after.stdout == before.stdout.replace("next: envbuild init", "next: envbuild lock")


@pytest.mark.usefixtures("project")
def test_a_profile_that_is_not_written_can_be_shown_with_pins_and_as_json() -> None:
    done = envbuild("show", "l20", "--pin", "cublas=13.1.1.3", "--json")
    assert done.code == 0
    shown = json.loads(done.stdout)
    assert (shown["profile"], shown["gpus"], shown["pins"]["cublas"]) == ("l20", ["l20"], "13.1.1.3")


@pytest.mark.parametrize(
    "command",
    [["lock", "l20"], ["lock", "--check", "l20"], ["build", "NVIDIA L20"], ["make", "--locked", "l20"],
     ["export", "check", "l20"], ["status", "l20"], ["init", "mine", "--from", "l20"]],
)  # fmt: skip
def test_other_commands_name_the_command_that_writes_the_profile(command: list[str], project: Path) -> None:
    done = envbuild(*command)
    assert done.code == 3
    assert "no profile is shipped for l20, and profiles/l20.yaml does not exist" in done.stderr
    assert "create it: envbuild init l20" in done.stderr
    assert files(project) == []


def test_make_writes_the_profile_and_reports_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(name: str, *_: object) -> None:
        made.append(profile_reader_and_overrides.load(name).name)
        raise EngineError("no engine")

    monkeypatch.setattr(make_build_and_test, "make", make)
    done = envbuild("make", "NVIDIA L20")
    assert (done.code, made) == (6, ["l20"])
    assert "note: no profile is shipped for l20; wrote profiles/l20.yaml\n" in done.stderr
    assert (project / "profiles" / "l20.yaml").read_text(encoding="utf-8") == starter_profile.for_gpu("l20")


@pytest.mark.usefixtures("project")
def test_init_refuses_anything_but_a_gpu_without_a_profile() -> None:
    there = envbuild("init", "NVIDIA H20")
    assert there.code == 2 and "the profile h20 exists already" in there.stderr
    refused = envbuild("init", "Tesla P100-PCIE-16GB")
    assert refused.code == 3 and "unsupported: p100" in refused.stderr
    other = envbuild("init", "myproject")
    assert other.code == 2 and "or the name of a GPU" in other.stderr


@pytest.mark.parametrize(
    ("name", "parent", "gpus"),
    [("rtx3090", "a100", ["rtx3090"]), ("rtx3090-cu12", "a100-cu12", ["rtx3090"]), ("mine", "a100", ["a100"])],
)
def test_a_new_profile_with_a_gpus_name_is_for_that_gpu(name: str, parent: str, gpus: list[str], project: Path) -> None:
    assert envbuild("init", name, "--from", parent).code == 0
    assert (project / "profiles" / f"{name}.yaml").is_file()
    assert envbuild("show", name, "--json").document["gpus"] == gpus


def test_a_new_profile_that_extends_a_devel_variant_is_one_too(project: Path) -> None:
    assert envbuild("init", "mine", "--from", "h20-devel").code == 0
    assert "extends: h20  #" in (project / "profiles" / "mine.yaml").read_text(encoding="utf-8")
    assert envbuild("show", "mine", "--json").document["variant"] == "devel"


@pytest.mark.usefixtures("project")
def test_an_ambiguous_name_is_refused_with_the_candidates() -> None:
    done = envbuild("show", "RTX 6000")
    assert done.code == 3
    assert "quadro-rtx6000 (Quadro RTX 6000), rtx6000-ada (NVIDIA RTX 6000 Ada Generation)" in done.stderr


def test_a_profile_of_ones_own_comes_before_a_gpu(project: Path) -> None:
    write_profile(project, {"extends": "h20", "description": "mine"}, "l4")
    assert envbuild("show", "l4").stdout.startswith("l4: mine\n")
    assert envbuild("show", "NVIDIA L4").stdout.startswith("l4: mine\n")


def test_a_folder_and_a_path_are_not_gpus(project: Path) -> None:
    (project / "l20").mkdir()
    assert "l20 is a folder" in envbuild("show", "l20").stderr
    for path in ("./l40", "/l40", "~/l40", "l40/", "l40.yaml", "profiles/l40", "AD103M / l40.yaml"):
        assert f"file not found: {path}" in envbuild("show", path).stderr


PCI_NAMES = [
    ("AD103M / GN21-X11 [GeForce RTX 4090 Laptop GPU]", "rtx4090-laptop"),
    ("GB206M [GeForce RTX 5060 Max-Q / Mobile]", "rtx5060-laptop"),
    ("NVIDIA Corporation AD107M [GeForce RTX 4060 Max-Q / Mobile] (rev a1)", "rtx4060-laptop"),
]


@pytest.mark.parametrize(("name", "gpu"), PCI_NAMES)
def test_a_name_on_the_pci_bus_with_a_slash_is_that_of_a_gpu(name: str, gpu: str, project: Path) -> None:
    done = envbuild("show", name)
    assert (done.code, done.stdout) == (0, envbuild("show", gpu).stdout)
    assert envbuild("init", name).stdout.startswith(f"profiles/{gpu}.yaml; next:")
    assert envbuild("show", name).stderr == ""


@pytest.mark.usefixtures("project")
def test_a_name_on_the_pci_bus_of_several_gpus_is_refused_with_these() -> None:
    done = envbuild("show", "GA107 [A2 / A16]")
    assert done.code == 3 and "several GPUs: a2 (" in done.stderr


def test_a_path_that_exists_comes_before_a_gpu(project: Path) -> None:
    name = PCI_NAMES[1][0]
    (project / name).parent.mkdir()
    (project / name).mkdir()
    assert f"{name} is a folder" in envbuild("show", name).stderr
    write_profile(project, {"extends": "h20", "description": "mine"}, "mine")
    (project / "a2").mkdir()
    (project / "a2" / "a16").symlink_to(project / "profiles" / "mine.yaml")
    assert envbuild("show", "a2/a16").stdout.startswith("a16: mine\n")


@pytest.mark.usefixtures("project")
def test_a_gpu_of_the_profile_is_named_as_on_its_box() -> None:
    done = envbuild("test", "fleet", "--on", "slurm", "--gpu", "RTX 6000")
    assert done.code == 2 and "several GPUs: quadro-rtx6000, rtx6000-ada" in done.stderr


def test_make_writes_no_profile_where_its_options_are_refused(project: Path) -> None:
    done = envbuild("make", "rtx5080-laptop", "h20", "--pin", "cublas=12.6.4.1")
    assert (done.code, files(project)) == (2, [])


@pytest.mark.parametrize(("name", "near"), [("RTX 4900", "rtx4090"), ("H2O", "h20")])
def test_init_suggests_gpus_of_a_similar_name(project: Path, name: str, near: str) -> None:
    done = envbuild("init", name)
    assert (done.code, files(project)) == (2, [])
    assert near in done.stderr.partition("did you mean ")[2]


@pytest.mark.parametrize(
    ("name", "profile", "parent"),
    [("l20-cu12", "l20-cu12", "l40s-cu12"), ("RTX 3090-cu12", "rtx3090-cu12", "a100-cu12")],
)
def test_a_gpu_without_a_profile_has_the_lines_of_its_parent(
    name: str, profile: str, parent: str, project: Path
) -> None:
    before = envbuild("show", name)
    note = f"no profile is shipped for {profile}: using the profile that `envbuild init {profile}` would write"
    assert (before.code, before.stderr) == (0, f"note: {note}, with the pins of {parent}\n")
    gpu = profile.removesuffix("-cu12")
    assert f"  other profile for this GPU: {gpu}, for driver 580.65.06 or newer\n" in before.stdout
    assert files(project) == []
    assert envbuild("init", name).code == 0
    assert files(project) == [f"{profile}.yaml"]
    text = (project / "profiles" / f"{profile}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {
        "description": f"{database.gpus()[gpu].names[0]}, CUDA 12", "extends": parent, "gpus": [gpu],
    }  # fmt: skip
    after = envbuild("show", profile)
    assert (after.code, after.stderr) == (0, "")
    assert after.stdout == before.stdout.replace("next: envbuild init", "next: envbuild lock")


@pytest.mark.usefixtures("project")
def test_show_names_the_line_of_a_gpu_without_a_profile() -> None:
    shown = envbuild("show", "l20", "--json")
    assert shown.document["other_lines"] == [{"profile": "l20-cu12", "driver": "525.60.13"}]


@pytest.mark.usefixtures("project")
def test_the_line_of_a_gpu_that_shares_evidence_is_the_shipped_one() -> None:
    done = envbuild("show", "h20-3e-cu12")
    assert (done.code, done.stdout, done.stderr) == (0, envbuild("show", "h20-cu12").stdout, "")


@pytest.mark.parametrize("name", ["b300-cu12", "rtx5080-laptop-cu12", "titan-v-cu12", "l20-cu11", "p100-cu12"])
def test_a_line_that_the_parent_does_not_have_is_refused(name: str, project: Path) -> None:
    assert envbuild("show", name).code == 3
    assert envbuild("init", name).code in (2, 3)
    assert files(project) == []


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["RTX 3090", "--line", "cu12"], "rtx3090-cu12"),
        (["rtx3090", "--line", "cu13"], "rtx3090"),
        (["rtx3090-cu12"], "rtx3090-cu12"),
        (["l20", "--driver", "550.54.14"], "l20-cu12"),
        (["l20", "--driver", "580.65.06", "--line", "auto"], "l20"),
        (["titan-v", "--line", "cu12"], "titan-v"),
    ],
)
def test_make_writes_the_profile_of_the_selected_line(
    words: list[str], made: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def make(name: str, *_: object) -> None:
        names.append(profile_reader_and_overrides.load(name).name)
        raise EngineError("no engine")

    monkeypatch.setattr(make_build_and_test, "make", make)
    done = envbuild("make", *words)
    assert (done.code, names, files(project)) == (6, [made], [f"{made}.yaml"])
    assert f"note: no profile is shipped for {made}; wrote profiles/{made}.yaml\n" in done.stderr


def test_make_of_several_writes_the_profile_of_each_selected_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise EngineError("no engine")

    monkeypatch.setattr(multi_profile_make, "make_profiles", stop)
    assert envbuild("make", "l20", "RTX 3090", "h20", "--line", "cu12").code == 6
    assert files(project) == ["l20-cu12.yaml", "rtx3090-cu12.yaml"]


@pytest.mark.parametrize("words", [["--line", "cu11"], ["--driver", "470.57.02"]])
def test_make_writes_no_profile_if_no_line_fits(words: list[str], project: Path) -> None:
    done = envbuild("make", "l20", *words)
    assert done.code in (2, 4) and "l20" in done.stderr
    assert files(project) == []


def test_a_dry_run_selects_the_line_before_its_profile_exists(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(context: StepContext) -> object:
        raise EngineError("no engine")

    monkeypatch.setattr(StepContext, "engine", property(connect))
    (project / "requirements.txt").write_text("einops\n", encoding="utf-8")
    words = ["make", "rtx3090", "--driver", "550.54.14", "--line", "auto", "--dry-run"]
    done = envbuild(*words)
    assert done.code == 0
    assert "  line: rtx3090-cu12, --line auto, driver 550.54.14; driver 525.60.13 or newer\n" in done.stdout
    assert "GB, estimated from the lock of a100-cu12\n" in done.stdout
    assert "extension:" not in done.stdout, "the line for CUDA 12 has no apex"
    assert "  extension: apex will be compiled\n" in envbuild("make", "rtx3090", "--dry-run").stdout
    found = envbuild(*words, "--requirements", "requirements.txt", "--json").document
    assert found["profile"] == f"rtx3090-cu12-{project.name.replace('_', '-')}"
    assert found["bytes_from"] == "a100-cu12" and found["fetch_bytes"] > 1e9
    assert files(project) == ["requirements.txt"]


@pytest.mark.usefixtures("project")
def test_a_profile_with_a_different_torch_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(context: StepContext) -> object:
        raise EngineError("no engine")

    monkeypatch.setattr(StepContext, "engine", property(connect))
    found = envbuild("make", "l20", "--pin", "torch=2.13.0", "--dry-run", "--json").document
    assert (found["bytes_from"], found["fetch_bytes"]) == (None, None)


def test_a_profile_of_ones_own_for_other_gpus_has_no_lines_of_the_gpu_with_its_name(project: Path) -> None:
    write_profile(project, {"extends": "h20"}, "l4")
    assert [line.profile for line in cuda_line_lookup.gpu_lines("l4")] == ["l4"]
    write_profile(project, {"extends": "l40s", "gpus": ["l4"]}, "l4")
    assert [line.profile for line in cuda_line_lookup.gpu_lines("l4")] == ["l4", "l4-cu12"]
