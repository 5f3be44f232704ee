from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError
from selftest.named import RECORDED

from envbuild.facts import (
    database,
    extension_compilers,
    fact_file_reader,
    log_signatures,
    mixed_gpu_settings,
    probe_catalogue_reader,
)
from envbuild.facts.advisory_model import Advisory, Change, Match, Shows, Situation
from envbuild.facts.fact_field_types import AnyPattern, LazyPattern, VersionRange
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import FactsError
from unit.support import envbuild, write_profile

SHIPPED = ("gpus", "cuda", "torch", "libraries", "advisories", "fleet", "debian", "xids", "compilers")


def words(text: str) -> list[str]:
    return text.split()


ADVISORIES = words("""
    numpy2-old-torch cublas-hopper-fpe cublas-k0-fpe cublas-tmem-silent cublas-nvfp4-scale cublas-13-5-rtx50
    cublas-blackwell-719 cublas-r535-multicontext-hang cublaslt-shadow-runpath nvjitlink-shadow
    avg-pool2d-channels-last
    cudnn-sublibrary-mismatch cudnn-sdpa-2.5.0 cudnn-sdpa-bwd-nan-hopper cudnn-sdpa-bwd-9.26 cudnn-sdpa-b200-gqa
    cudnn-sdpa-b300-noplan cudnn-9.24-fp8-splitkv conv3d-bf16 no-kernel-image-blackwell volta-dropped bf16-pre-ampere
    tf32-default fp16-reduced-precision-reduction cublas-determinism int-mm-cuda121u1 nccl-2.18.1
    nccl-unequal-cards
    nccl-bf16-misaligned-h100 nccl-2.19.3-graph-leak nccl-2.20.5-graph-hang nccl-abort-hang nccl-2.27-fp8-symmetric
    nccl-2.28.3-2.29.2 nccl-4090-p2p nccl-h800-nvls-bf16 error-802-fabricmanager error-804-forward-compat
    driver-too-old-cu13 fp8-scaled-mm-cc triton-ptxas-unknown-arch apex-t5-mixed-dtype half-attention-nan
    apex-adam-capturable-moments
    rmsnorm-half-torch-2.4 cublas-not-initialized h20-cluster-launch nccl-gh200-ll128 apex-rmsnorm-no-grad-leak
""")
REFUSED = {
    "cublas-hopper-fpe",
    "cublas-tmem-silent",
    "no-kernel-image-blackwell",
    "volta-dropped",
    "driver-too-old-cu13",
    "fp8-scaled-mm-cc",
    "nccl-2.18.1",
    "nccl-unequal-cards",
}


def advisory(name: str) -> Advisory:
    return next(item for item in database.advisories() if item.id == name)


def situation(gpu: str | None = None, torch: str | None = None, **more: Any) -> Situation:
    """Return the situation of a GPU and a torch release with its required libraries, changed by `libraries` and other
    arguments."""
    release = database.torch_release(torch) if torch else None
    libraries = {**(database.libraries_of(release) if release else {}), **more.pop("libraries", {})}
    cards = (database.gpus()[gpu],) if gpu else ()
    cuda = release.cuda if release else None
    return Situation(**{"gpus": cards, "torch": torch, "cuda": cuda, "libraries": libraries, **more})


def hits(*args: Any, **kwargs: Any) -> set[str]:
    return {item.id for item in database.matching(situation(*args, **kwargs))}


def site(text: str, name: str = "own.yaml") -> Path:
    """Write a site's own facts file where envbuild reads it."""
    file = Path(os.environ["XDG_CONFIG_HOME"], "envbuild", "facts.d", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def index_hosts() -> set[str]:
    """Return the hosts of the package index that pip itself contains."""
    from pip._internal.models.index import PyPI, TestPyPI

    return {str(host) for known in (PyPI, TestPyPI) for host in (known.netloc, known.file_storage_domain)}


def test_the_facts_are_whole() -> None:
    assert database.suites()["bookworm"] == database.Suite("bookworm", "3.11", "2.36", 12)
    assert "python3" in database.base_packages()


def test_a_missing_facts_file_is_an_error_of_its_kind() -> None:
    with pytest.raises(FactsError):
        fact_file_reader.read("nosuch")


# Fields of every row


def test_every_row_has_source_status_and_date() -> None:
    rows: list[Any] = [*database.gpus().values(), *database.toolkits().values(), *database.torch_releases().values()]
    rows += [*database.libraries().values(), *database.advisories()]
    rows += [
        *fact_file_reader.rows("fleet", "settings", mixed_gpu_settings._Rule),
        *fact_file_reader.rows("fleet", "dtypes", mixed_gpu_settings._Dtype),
    ]
    assert len(rows) > 120
    for row in rows:
        assert row.source
        assert row.status
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", row.as_of)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_file_names_an_index_or_a_path_of_a_machine(name: str) -> None:
    text = (fact_file_reader._FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert not re.search(r"/root/|/home/|/tmp/", text)
    assert not any(host in text for host in index_hosts())


@pytest.mark.parametrize("name", SHIPPED[:6])
def test_every_source_that_is_described_is_used(name: str) -> None:
    read = yaml_and_project_paths.read(fact_file_reader._FOLDER / f"{name}.yaml")
    rest = {key: value for key, value in read.data.items() if key != "sources"}
    assert [key for key in read.data["sources"] if f"'{key}'" not in str(rest)] == []


# GPUs


def test_every_source_of_a_gpu_names_a_page() -> None:
    """`public-logs` only says where a figure comes from, so no row may have it as its only source."""
    sources = yaml_and_project_paths.read(fact_file_reader._FOLDER / "gpus.yaml").data["sources"]
    assert [key for key, text in sources.items() if "https://" not in text] == ["public-logs"]
    assert [gpu.id for gpu in database.gpus().values() if gpu.source == ("public-logs",)] == []


def test_every_gpu_of_the_facts_is_there() -> None:
    expected = """v100 t4 a100 a800 a30 a10 a40 rtx3090 rtx4090 l4 l20 l40s h100 h800 h20 h20-3e h200 gh200 b200 b300
        gb200 gb300 gb10 rtx5090 rtxpro6000
        rtx2060 rtx2060-super rtx2070 rtx2070-super rtx2080 rtx2080-super rtx2080ti titan-rtx quadro-rtx3000
        quadro-rtx4000 quadro-rtx5000 quadro-rtx6000 quadro-rtx8000 a2 a10g a10m a16 rtx2050 rtx3050 rtx3060
        rtx3060ti rtx3070 rtx3070ti rtx3080 rtx3080ti rtx3090ti rtx3050-laptop rtx3050ti-laptop rtx3060-laptop
        rtx3070-laptop rtx3070ti-laptop rtx3080-laptop rtx3080ti-laptop rtxa400 rtxa1000 rtxa2000 rtxa4000
        rtxa4500 rtxa5000 rtxa5500 rtxa6000 rtxa500-laptop rtxa1000-laptop rtxa2000-laptop rtxa3000-laptop
        rtxa4000-laptop rtxa4500-laptop rtxa5000-laptop rtxa5500-laptop l2 l40 rtx3050a-laptop rtx4060 rtx4060ti
        rtx4070 rtx4070-super rtx4070ti rtx4070ti-super rtx4080 rtx4080-super rtx4090d rtx4050-laptop
        rtx4060-laptop rtx4070-laptop rtx4080-laptop rtx4090-laptop rtx2000-ada rtx4000-ada rtx4000-sff-ada
        rtx4500-ada rtx5000-ada rtx5880-ada rtx6000-ada rtx500-ada-laptop rtx1000-ada-laptop rtx2000-ada-laptop
        rtx3000-ada-laptop rtx3500-ada-laptop rtx4000-ada-laptop rtx5000-ada-laptop rtx5050 rtx5060 rtx5060ti
        rtx5070 rtx5070ti rtx5080 rtx5090d rtx5050-laptop rtx5060-laptop rtx5070-laptop rtx5070ti-laptop
        rtx5080-laptop rtx5090-laptop rtxpro2000 rtxpro4000 rtxpro4000-sff rtxpro4500 rtxpro5000 rtx6000d
        rtxpro500-laptop rtxpro1000-laptop rtxpro2000-laptop rtxpro3000-laptop rtxpro4000-laptop
        rtxpro5000-laptop quadro-gv100 titan-v p100 quadro-gp100 p40 p4 titan-xp gtx1080ti gtx1080 gtx1070ti
        gtx1070 gtx1060 gtx1050 quadro-p6000 quadro-p5000 quadro-p4000 quadro-p2000 m60 m40 gtx980ti gtx980
        gtx970 k80 jetson-orin jetson-thor
        gtx1630 gtx1650 gtx1650-super gtx1650ti gtx1660 gtx1660-super gtx1660ti mx450 mx550 t400 t500
        t550-laptop t600 t600-laptop t1000 t1200-laptop quadro-t1000 quadro-t2000 ax800 mx570
        rtxa500-embedded rtxa1000-embedded rtxa2000-embedded rtxa4500-embedded rtx2000-ada-embedded
        rtx3500-ada-embedded rtx5000-ada-embedded h20-nvl16 rtxpro4500-server rtxpro500-embedded
        rtxpro2000-embedded rtxpro4000-embedded rtxpro5000-embedded titan-x gtx1050ti gt1030 mx350 mx330
        mx250 mx230 mx150 p6 quadro-p5200 quadro-p4200 quadro-p3200 quadro-p3000 quadro-p2200 quadro-p1000
        quadro-p620 quadro-p600 quadro-p500 quadro-p400 gtx-titan-x gtx960 gtx950 quadro-m6000 quadro-m5000
        quadro-m4000 quadro-m2000 gtx750ti gtx750 k40 k20 jetson-xavier jetson-tx2 jetson-nano"""
    assert sorted(database.gpus()) == sorted(words(expected))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB10", "gb10"),
        ("Tesla T4", "t4"),
        ("NVIDIA H20 MIG 1g.12gb", "h20"),
        ("NVIDIA H200 MIG 1g.18gb+me", "h200"),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "a100"),
        ("NVIDIA H2", None),
        ("NVIDIA L40", "l40"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L2", "l2"),
        ("NVIDIA A2", "a2"),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", "rtx5080-laptop"),
        ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA L4S", None),
        ("NVIDIA A10H", None),
        ("NVIDIA A100", None),
        ("NVIDIA T4", None),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090d"),
        ("NVIDIA GeForce RTX 4090 E", None),
        ("NVIDIA GeForce RTX 5080 Laptop", None),
        ("H20 HBM3e", None),
        ("NVIDIA H20 MIG", None),
        ("NVIDIA H2 MIG 1g.12gb", None),
        ("H20", None),
        ("nvidia h20", None),
        ("", None),
    ],
)
def test_a_gpu_is_found_by_its_whole_name(name: str, found: str | None) -> None:
    gpu = database.gpu_by_name(name)
    assert (gpu.id if gpu else None) == found


def test_the_gpus_of_arm64_hosts_are_known() -> None:
    arm64 = {gpu.id for gpu in database.gpus().values() if gpu.host == "arm64"}
    jetsons = {f"jetson-{name}" for name in ("orin", "thor", "xavier", "tx2", "nano")}
    assert arm64 == {"gh200", "gb200", "gb300", "gb10", *jetsons}


@pytest.mark.parametrize("command", ["show", "lock", "make"])
@pytest.mark.parametrize("gpu", ["gh200", "gb10"])
def test_a_gpu_on_an_arm64_host_is_refused(command: str, gpu: str, project: Path) -> None:
    """A mixed fleet is refused too: the image would not start on some of its machines."""
    write_profile(project, {"extends": "h200", "gpus": ["h200", gpu]})
    done = envbuild(command, "sample")
    assert done.code == 3
    reason = f"gpus[1]: unsupported: {gpu} has an arm64 host, and envbuild builds only linux/amd64 images"
    assert reason in done.stderr


@pytest.mark.usefixtures("project")
def test_the_name_of_a_gpu_on_an_arm64_host_has_the_reason() -> None:
    done = envbuild("show", "gh200")
    assert done.code == 3 and "unsupported: gh200 has an arm64 host" in done.stderr and "h200?" not in done.stderr


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ("p100", "p100 has compute capability 6.0, and envbuild builds for 7.0 and newer"),
        ("p100", "the last torch whose default build has code for it is 2.7.1"),
        ("gtx1080ti", "the last torch whose default build has code for it is 2.7.1"),
        ("m60", "the last torch whose default build has code for it is 2.7.1"),
        ("gtx750ti", "the last torch whose default build has code for it is 2.7.1"),
        ("k40", "no known torch has code for it"),
        ("k80", "the last torch whose default build has code for it is 2.0.1"),
        ("jetson-orin", "jetson-orin has an arm64 host, and envbuild builds only linux/amd64 images"),
        ("jetson-orin", "its torch comes from another index, NVIDIA's for JetPack"),
        ("jetson-thor", "its torch comes from another index, NVIDIA's for JetPack"),
        ("jetson-nano", "its torch comes from another index, NVIDIA's for JetPack"),
        ("gb300", "gb300 has an arm64 host"),
    ],
)
def test_an_unsupported_gpu_has_the_reason(gpu: str, reason: str, project: Path) -> None:
    write_profile(project, {"extends": "h200", "gpus": [gpu]})
    done = envbuild("show", "sample")
    assert done.code == 3 and "gpus[0]: unsupported: " in done.stderr and reason in done.stderr


def test_which_gpus_are_unsupported() -> None:
    for gpu in database.gpus().values():
        fits = gpu.host == "amd64" and Version(gpu.compute_capability) >= Version("7.0")
        assert (database.unsupported(gpu.id, "linux/amd64") is None) == fits
    assert database.unsupported("nosuch", "linux/amd64") is None


def test_a_site_can_say_that_its_gpu_has_an_arm64_host(project: Path) -> None:
    row = database.gpus()["h200"]
    site(
        "as_of: 2026-11\ngpus:\n"
        f"  - {{id: h200arm, names: [Own H200], family: h200arm, compute_capability: '{row.compute_capability}',\n"
        "     memory_gb: [141], features: [], first_cuda: '11.8', datacentre: true, host: arm64,\n"
        "     source: [pytorch/pytorch#123835], status: reported}\n"
    )
    write_profile(project, {"extends": "h200", "gpus": ["h200arm"]})
    assert "h200arm has an arm64 host" in envbuild("show", "sample").stderr


def test_the_sources_of_the_h20_name_it() -> None:
    """NVIDIA's list of compute capabilities does not contain the H20."""
    assert "compute-capabilities" not in database.gpus()["h20"].source
    assert "mig-guide" in database.gpus()["h20"].source


def test_families_are_those_that_a_source_calls_the_same_silicon() -> None:
    families = {frozenset(gpu.id for gpu in database.family(card)) for card in database.gpus().values()}
    assert {members for members in families if len(members) > 1} == {
        frozenset({"a100", "a800"}),
        frozenset({"h20", "h20-3e"}),
    }


def test_features_follow_the_compute_capability() -> None:
    for gpu in database.gpus().values():
        capability = Version(gpu.compute_capability)
        assert ("tf32" in gpu.features) == ("bf16" in gpu.features) == (capability >= Version("8.0"))
        assert ("fp8" in gpu.features) == (capability >= Version("8.9"))


def test_a_datasheet_without_a_source_has_no_figures() -> None:
    for gpu in database.gpus().values():
        figures = dataclasses.asdict(gpu.datasheet)
        assert figures.pop("source") or not any(figures.values())


# CUDA, torch, libraries


@pytest.mark.parametrize(
    ("cuda", "exact", "compatible"),
    [
        ("12.1", "530.30.02", "525.60.13"),
        ("12.4", "550.54.14", "525.60.13"),
        ("12.4.1", "550.54.15", "525.60.13"),
        ("13.0", "580.65.06", "580"),
        ("11.7", None, "450.80.02"),
        ("10.2", None, None),
        ("none", None, None),
    ],
)
def test_driver_minimum(cuda: str, exact: str | None, compatible: str | None) -> None:
    assert database.driver_minimum(cuda) == (exact, compatible)


def test_a_toolkits_cublas_is_looked_up_and_not_derived() -> None:
    assert database.toolkits()["13.0.2"].cublas == "13.1.0.3"
    assert database.toolkits()["12.4.1"].cublas == "12.4.5.8"
    assert "12.5.3.2" in (database.toolkits()["12.5.1"].caution or "")


def test_a_local_build_of_torch_is_not_the_indexs() -> None:
    assert database.torch_release("2.13.0")
    assert database.torch_release("2.13.0+cpu") is None
    assert database.torch_release("2.5.0+cu121") is None
    assert database.torch_release("2.5.0+cu124") == database.torch_release("2.5.0")
    assert database.torch_release("9.9.9") is None


@pytest.mark.parametrize(
    ("torch", "libraries"),
    [
        (
            "2.3.1",
            {"cublas": "12.1.3.1", "cudnn": "8.9.2.26", "nccl": "2.20.5", "triton": "2.3.1", "cudart": "12.1.105"},
        ),
        ("2.11.0", {"cublas": "13.1.0.3", "cudnn": "9.19.0.56", "nccl": "2.28.9", "nvshmem": "3.4.5"}),
        ("2.12.0", {"cublas": "13.1.1.3"}),
    ],
)
def test_the_libraries_that_a_torch_release_brings(torch: str, libraries: dict[str, str]) -> None:
    release = database.torch_release(torch)
    assert release
    assert database.libraries_of(release).items() >= libraries.items()


@pytest.mark.parametrize(
    ("torch", "capability", "kernels"),
    [
        ("2.10.0", "7.0", "compiled"),
        ("2.11.0", "7.0", None),
        ("2.7.1", "12.0", None),
        ("2.8.0", "12.0", "compiled"),
        ("2.8.0", "8.9", "compiled"),
        ("2.8.0", "10.3", "compiled"),
        ("2.8.0", "11.0", None),
        ("2.11.0", "13.0", "ptx"),
        ("2.11.0", "11.0", None),
    ],
)
def test_which_gpus_a_wheel_has_code_for(torch: str, capability: str, kernels: str | None) -> None:
    release = database.torch_release(torch)
    assert release
    assert release.kernels(capability) == kernels


def test_pythons_and_pins_of_a_release() -> None:
    release = database.torch_releases()["2.7.0"]
    assert release.pythons == ("3.9", "3.10", "3.11", "3.12", "3.13", "3.13t")
    assert database.torch_releases()["2.12.0"].pins["nvidia-cublas"] == "<=13.1.1.3,>=13.1.0.3"
    assert "cublas" not in database.torch_releases()["2.12.0"].toolkit_extras
    for row in database.torch_releases().values():
        assert row.cuda in {".".join(toolkit.split(".")[:2]) for toolkit in database.toolkits()} | {"11.7"}


def test_short_names_and_distributions() -> None:
    assert database.distribution_of("cublas", "12.1") == "nvidia-cublas-cu12"
    assert database.distribution_of("cublas", "13.0") == "nvidia-cublas"
    assert database.distribution_of("cudart", "11") == "nvidia-cuda-runtime-cu11"
    assert database.distribution_of("cusparselt", "11.8") is None
    assert database.distribution_of("nosuch", "12") is None
    assert database.library_of("NVIDIA_cublas") == "cublas"
    assert database.library_of("numpy") is None
    assert "12.5.3.2" in database.known_versions("nvidia-cublas-cu12")
    assert database.known_versions("nvidia-cublas")[-1] == "13.10.0.20"
    assert database.known_versions("numpy") == ()


# Advisories as data


def test_all_advisories_are_there_once() -> None:
    assert sorted(item.id for item in database.advisories()) == sorted(ADVISORIES), (
        "advisories.yaml and ADVISORIES of this file differ: add the id to ADVISORIES"
    )
    assert len(ADVISORIES) == 49, "a new advisory: raise this number"


def test_severity_is_as_decided() -> None:
    assert {item.id for item in database.advisories() if item.severity == "refuse"} == REFUSED, (
        "add the id to REFUSED of this file, or choose another severity"
    )


def test_a_refusal_is_decidable_and_says_how_to_get_out() -> None:
    for name in REFUSED:
        assert advisory(name).decidable
        assert advisory(name).status in ("verified", "reported")
        assert advisory(name).change != Change() or name == "fp8-scaled-mm-cc"


def test_advisories_that_depend_on_the_environment_are_not_decidable() -> None:
    for item in database.advisories():
        assert item.decidable == any(not match.environment for match in item.match), item.id


@pytest.mark.parametrize("name", ADVISORIES)
def test_patterns_meet_their_own_lines_and_no_others(name: str) -> None:
    shows = advisory(name).shows
    for pattern in shows.patterns:
        assert any(pattern.search(line) for line in shows.examples), pattern.pattern
    for line in shows.examples:
        assert any(pattern.search(line) for pattern in shows.patterns), line
        met = {item.id for item in database.advisories() if any(p.search(line) for p in item.shows.patterns)}
        assert met <= {name, *shows.like}, line


def test_every_advisory_can_show_itself() -> None:
    for item in database.advisories():
        assert item.shows.patterns
        assert set(item.shows.probes) <= set(probe_catalogue_reader.known_probes())
        for signature in item.signature:
            named = signature["probe"].pattern.split("|")
            assert set(named) <= set(probe_catalogue_reader.known_probes()), item.id


@pytest.mark.parametrize("line", ["", "NCCL version 2.20.5+cuda12.4", "loss: 0.25, lr 1e-4, 8 ranks", "exit code: 0"])
def test_an_innocent_line_matches_no_advisory(line: str) -> None:
    assert not [item.id for item in database.advisories() if any(p.search(line) for p in item.shows.patterns)]


def apart(change: VersionRange, range_: VersionRange, name: str) -> bool:
    """Whether no version is in both ranges: of the known versions, and of those named by the ranges."""
    library = database.libraries().get(name)
    known = {version for row in library.versions.values() for version in row} if library else set()
    named = {spec.version.removesuffix(".*") for part in (*change.any_of, *range_.any_of) for spec in part}
    return not [version for version in known | named if version in change and version in range_]


@pytest.mark.parametrize("name", ADVISORIES)
def test_a_change_leads_out_of_what_is_matched(name: str) -> None:
    item = advisory(name)
    for pin in item.change.pins:
        assert pin in database.libraries() or pin in ("numpy", "transformers")
    for match in item.match:
        stated = {"torch": match.torch, "driver": match.driver, **match.libraries, **match.distributions}
        changed = {"torch": item.change.torch, "driver": item.change.driver, **item.change.pins}
        both = [(key, new, stated.get(key)) for key, new in changed.items()]
        pairs = [(key, new, old) for key, new, old in both if new and old]
        assert not pairs or any(apart(new, old, key) for key, new, old in pairs)


def test_the_fixed_cublas_for_hopper_exists_and_is_sourced() -> None:
    fit = advisory("cublas-hopper-fpe").change.pins["cublas"]
    known = database.known_versions("nvidia-cublas-cu12")
    assert min((version for version in known if version in fit), key=Version) == "12.4.5.8"
    assert "12.3.4.1" not in fit
    assert "11.11.3.6" not in fit


def test_where_sources_conflict_the_caution_names_both() -> None:
    """The sources are about builds for CUDA 11.8, and about the crash on Hopper."""
    hopper = advisory("cublas-hopper-fpe")
    assert "HunyuanVideo" in str(hopper.caution) and "NVIDIA" in str(hopper.caution)
    assert "Tencent-Hunyuan/HunyuanVideo#11" in hopper.cite


def test_no_remedy_names_a_pip_that_may_belong_to_another_environment() -> None:
    """Commands are made for the environment that is repaired: its own pip, uv or conda."""
    remedies = {row.id: row.remedy for row in database.advisories()}
    remedies |= {row.id: row.remedy or "" for row in log_signatures.signatures().values() if row.remedy}
    assert [name for name, text in remedies.items() if re.search(r"\bpip3? (un)?install\b", text)] == []


def test_the_end_of_cuda_12_builds_is_cited_as_decided() -> None:
    volta = advisory("volta-dropped")
    assert "torch 2.14 has the last" in volta.remedy
    assert {"pytorch/test-infra#8739", "pytorch/pytorch#160269"} <= set(volta.cite)
    assert "proposal" not in str(volta.caution)


# Signatures


@pytest.mark.parametrize(
    ("result", "met"),
    [
        ({"probe": "gemm.crash", "signal": "SIGFPE"}, True),
        ({"probe": "gemm.crash", "signal": "SIGFPE", "failure": "signal"}, True),
        ({"probe": "gemm.crash", "signal": "SIGSEGV"}, False),
        ({"probe": "gemm.exact", "signal": "SIGFPE"}, False),
        ({}, False),
    ],
)
def test_an_advisory_is_met_where_its_whole_signature_is(result: dict[str, str], met: bool) -> None:
    assert advisory("cublas-hopper-fpe").matches(result) is met
    assert [item.id for item in database.advisories() if item.matches(result)] == ["cublas-hopper-fpe"] * met


@pytest.mark.parametrize("name", ADVISORIES)
def test_a_signature_names_no_version_that_is_not_matched(name: str) -> None:
    item = advisory(name)
    patterns = [keys["nccl"].pattern for keys in item.signature if "nccl" in keys]
    for version in (version for pattern in patterns for version in pattern.split("|")):
        assert any(version in match.libraries["nccl"] for match in item.match), version


REFUSAL = "expected scalar type Float but found Half"


@pytest.mark.parametrize(
    ("result", "met"),
    [
        (
            {"probe": "attention.cudnn", "failure": "nonfinite", "traits": {"workaround": "upcast"}},
            "half-attention-nan",
        ),
        ({"probe": "attention.math", "failure": "nonfinite", "traits": {"workaround": "upcast"}}, "half-attention-nan"),
        ({"probe": "attention.math", "failure": "nonfinite", "traits": {"workaround": "none"}}, None),
        ({"probe": "attention.math", "failure": "bound", "traits": {"workaround": "upcast"}}, None),
        ({"probe": "norm.torch", "failure": "nonfinite", "traits": {"workaround": "upcast"}}, None),
        ({"probe": "norm.apex", "failure": "exception", "traits": {"refusal": REFUSAL}}, "apex-t5-mixed-dtype"),
        ({"probe": "norm.apex", "failure": "bound", "traits": {"refusal": REFUSAL}}, None),
        ({"probe": "norm.torch", "failure": "exception", "traits": {"refusal": REFUSAL}}, None),
        ({"probe": "norm.apex", "failure": "bound", "traits": {}}, None),
    ],
)
def test_advisories_match_results_in_half_precision(result: dict[str, Any], met: str | None) -> None:
    assert [item.id for item in database.advisories() if item.matches(result)] == ([met] if met else [])


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_result_is_named(name: str) -> None:
    assert [item.id for item in database.advisories() if item.matches(RECORDED[name])] == [name]


def test_an_advisory_without_signature_is_never_met() -> None:
    bare = dataclasses.replace(advisory("cublas-hopper-fpe"), signature=(), shows=Shows())
    assert not bare.matches({"probe": "gemm.crash", "signal": "SIGFPE"})


@pytest.mark.parametrize(
    ("traits", "met"),
    [
        ({"signal": "SIGFPE"}, True),
        ({"traits": {"cublas": "12.3.4"}}, True),
        ({"traits": {"cublas": "12.3.4", "more": 1}, "signal": None}, True),
        ({"traits": {"cublas": "112.3.4"}}, False),
        ({"traits": {"other": "12.3.4"}}, False),
        ({"cublas": "12.3.4", "traits": {"cublas": "11"}}, True),
        ({"cublas": "11", "traits": {"cublas": "12.3.4"}}, False),
        ({"traits": None}, False),
        ({"signal": ""}, False),
    ],
)
def test_a_signature_reaches_traits_and_has_alternatives(traits: dict[str, Any], met: bool) -> None:
    patterns: tuple[dict[str, LazyPattern], ...]
    patterns = ({"signal": LazyPattern("SIG[A-Z]+")}, {"cublas": LazyPattern(r"12\.3\.[0-9]+")}, {})
    assert dataclasses.replace(advisory("cublas-hopper-fpe"), signature=patterns).matches(traits) is met


def test_the_shipped_patterns_are_regular_expressions() -> None:
    known = [pattern for item in database.advisories() for match in item.signature for pattern in match.values()]
    known += [pattern for item in database.advisories() for pattern in item.shows.patterns]
    known += [
        item.pattern for item in (*extension_compilers.complaints(), *extension_compilers.out_of_memory_messages())
    ]
    assert len(known) > 100
    for pattern in known:
        pattern.compile()


# Which advisories apply


@pytest.mark.parametrize(
    ("name", "holds", "where"),
    [
        ("cublas-hopper-fpe", True, situation("h20", "2.3.1")),
        ("cublas-hopper-fpe", True, situation("h100", "2.3.1")),
        ("cublas-hopper-fpe", True, situation("h20-3e", "2.4.1")),
        ("cublas-hopper-fpe", True, situation("h20", "2.3.1", libraries={"cublas": "12.3.4.1"})),
        ("cublas-hopper-fpe", True, situation("h20", "2.3.1", libraries={"cublas": "12.4.2.65"})),
        ("cublas-hopper-fpe", True, situation("h20", "2.1.0+cu118", libraries={"cublas": "11.11.3.6"})),
        ("cublas-hopper-fpe", True, situation("h20", "2.5.0+cu121", libraries={"cublas": "12.1.3.1"})),
        ("cublas-hopper-fpe", False, situation("h20", "2.3.1", libraries={"cublas": "12.4.5.8"})),
        ("cublas-hopper-fpe", False, situation("h20", "2.3.1", libraries={"cublas": "12.5.2.13"})),
        ("cublas-hopper-fpe", False, situation("h20", "2.5.0")),
        ("cublas-hopper-fpe", False, situation("h20", "2.11.0")),
        ("cublas-hopper-fpe", False, situation("h20", "2.0.1")),
        ("cublas-hopper-fpe", False, situation("a100", "2.3.1")),
        ("cublas-hopper-fpe", False, situation(None, "2.3.1")),
        ("cublas-hopper-fpe", False, situation("h20")),
        ("cublas-k0-fpe", True, situation("h20", "2.3.1", libraries={"cublas": "12.5.3.2"})),
        ("cublas-k0-fpe", False, situation("h20", "2.7.0")),
        ("cublas-tmem-silent", True, situation("b200", "2.8.0")),
        ("cublas-tmem-silent", True, situation("b200", "2.11.0")),
        ("cublas-tmem-silent", True, situation("b300", "2.8.0", libraries={"cublas": "12.9.1.4"})),
        ("cublas-tmem-silent", True, situation("b200", "2.15.0", libraries={"cublas": "13.3.0.5"})),
        ("cublas-tmem-silent", True, situation("b200", "2.15.0", libraries={"cublas": "13.4.0.1"})),
        ("cublas-tmem-silent", False, situation("b200", "2.8.0", libraries={"cublas": "12.8.5.5"})),
        ("cublas-tmem-silent", False, situation("b200", "2.8.0", libraries={"cublas": "12.9.2.10"})),
        ("cublas-tmem-silent", False, situation("b200", "2.11.0", libraries={"cublas": "13.2.2.2"})),
        ("cublas-tmem-silent", False, situation("b200", "2.13.0")),
        ("cublas-tmem-silent", False, situation("b200", "2.15.0")),
        ("cublas-tmem-silent", False, situation("rtx5090", "2.8.0")),
        ("cublas-tmem-silent", False, situation("h200", "2.8.0")),
        ("no-kernel-image-blackwell", True, situation("b200", "2.7.1")),
        ("no-kernel-image-blackwell", True, situation("rtx5090", "2.7.1")),
        ("no-kernel-image-blackwell", True, situation("rtx5090", "2.6.0+cu124")),
        ("no-kernel-image-blackwell", False, situation("rtx5090", "2.7.1+cu128")),
        ("no-kernel-image-blackwell", False, situation("b200", "2.8.0")),
        ("no-kernel-image-blackwell", False, situation("h200", "2.7.1")),
        ("volta-dropped", True, situation("v100", "2.11.0")),
        ("volta-dropped", True, situation("v100", "2.10.0", libraries={"cudnn": "9.11.0.98"})),
        ("volta-dropped", False, situation("v100", "2.10.0")),
        ("volta-dropped", False, situation("v100", "2.11.0+cu126", libraries={"cudnn": "9.10.2.21"})),
        ("volta-dropped", False, situation("v100", "2.14.0+cu126", libraries={"cudnn": "9.10.2.21"})),
        ("volta-dropped", True, situation("v100", "2.15.0+cu130", libraries={"cudnn": "9.10.2.21"})),
        ("volta-dropped", False, situation("v100", "2.15.0+cpu")),
        ("volta-dropped", False, situation("t4", "2.11.0")),
        ("nccl-gh200-ll128", True, situation("gh200", "2.8.0", gpu_count=2)),
        ("nccl-gh200-ll128", False, situation("gh200", "2.8.0")),
        ("nccl-gh200-ll128", False, situation("gh200", "2.7.1", gpu_count=2)),
        ("nccl-gh200-ll128", False, situation("h200", "2.8.0", gpu_count=2)),
        ("apex-rmsnorm-no-grad-leak", True, situation("h200", "2.11.0", extensions=frozenset({"apex"}))),
        ("apex-rmsnorm-no-grad-leak", False, situation("h200", "2.3.1", extensions=frozenset({"apex"}))),
        ("apex-rmsnorm-no-grad-leak", False, situation("h200", "2.11.0")),
        ("driver-too-old-cu13", True, situation("h20", "2.11.0", driver="570.133.20")),
        ("driver-too-old-cu13", True, situation("h20", "2.11.0+cu130", cuda="13.0", driver="575.51.03")),
        ("driver-too-old-cu13", False, situation("h20", "2.11.0", driver="580.65.06")),
        ("driver-too-old-cu13", False, situation("h20", "2.11.0+cu128", cuda="12.8", driver="570.26")),
        ("driver-too-old-cu13", False, situation("h20", "2.10.0", driver="570.26")),
        ("driver-too-old-cu13", False, situation("h20", "2.11.0")),
        (
            "driver-too-old-cu13",
            False,
            situation("h20", "2.11.0", driver="570.26", environment=frozenset({"cuda-compat"})),
        ),
        ("fp8-scaled-mm-cc", True, situation("a100", "2.8.0", features=frozenset({"fp8"}))),
        ("fp8-scaled-mm-cc", False, situation("a100", "2.8.0")),
        ("fp8-scaled-mm-cc", False, situation("rtx4090", "2.8.0", features=frozenset({"fp8"}))),
        ("nccl-2.18.1", True, situation("a100", "2.1.0", gpu_count=2)),
        ("nccl-2.18.1", False, situation("a100", "2.1.0", gpu_count=1)),
        ("nccl-2.18.1", False, situation("a100", "2.1.0", gpu_count=8, libraries={"nccl": "2.18.3"})),
        ("numpy2-old-torch", True, situation("h20", "2.2.2", distributions={"numpy": "2.0.1"})),
        ("numpy2-old-torch", True, situation(None, "2.2.2+cpu", distributions={"NumPy": "2.0.1"})),
        ("numpy2-old-torch", False, situation("h20", "2.2.2", distributions={"numpy": "1.26.4"})),
        ("numpy2-old-torch", False, situation("h20", "2.3.0", distributions={"numpy": "2.0.1"})),
        ("numpy2-old-torch", False, situation("h20", "2.2.2")),
        (
            "apex-t5-mixed-dtype",
            True,
            situation(extensions=frozenset({"apex"}), distributions={"transformers": "5.7.0"}),
        ),
        (
            "apex-t5-mixed-dtype",
            False,
            situation(extensions=frozenset({"apex"}), distributions={"transformers": "5.8.0"}),
        ),
        ("apex-t5-mixed-dtype", False, situation(distributions={"transformers": "4.40.0"})),
        (
            "apex-t5-mixed-dtype",
            True,
            situation(extensions=frozenset({"apex"}), distributions={"transformers": "4.17.0"}),
        ),
        (
            "apex-t5-mixed-dtype",
            False,
            situation(extensions=frozenset({"apex"}), distributions={"transformers": "4.16.2"}),
        ),
        ("rmsnorm-half-torch-2.4", True, situation("a100", "2.4.0")),
        ("rmsnorm-half-torch-2.4", True, situation(None, "2.5.1")),
        ("rmsnorm-half-torch-2.4", False, situation("a100", "2.3.1")),
        ("rmsnorm-half-torch-2.4", False, situation("a100", "2.6.0")),
        ("triton-ptxas-unknown-arch", True, situation("rtx5090", distributions={"triton": "3.2.0"})),
        ("triton-ptxas-unknown-arch", False, situation("rtx5090", distributions={"triton": "3.4.0"})),
        ("cublas-r535-multicontext-hang", True, situation("a100", "2.7.0", driver="535.54.03")),
        ("cublas-r535-multicontext-hang", False, situation("a100", "2.7.0", driver="535.104.05")),
        ("cublaslt-shadow-runpath", True, situation("a100", "2.10.0", environment=frozenset({"ld-library-path"}))),
        ("cublaslt-shadow-runpath", False, situation("a100", "2.10.0")),
        ("cudnn-sdpa-b300-noplan", True, situation("b300", "2.11.0+cu128")),
        ("cudnn-sdpa-b300-noplan", False, situation("b300", "2.11.0")),
        *(
            ("cublas-13-5-rtx50", holds, situation(gpu, libraries={"cublas": "13.5.1.27"}))
            for gpu, holds in (("rtx5070-laptop", True), ("rtx5090", True), ("rtxpro6000", False), ("rtx4090", False))
        ),
        *(
            ("cudnn-sdpa-bwd-9.26", holds, situation(gpu, libraries={"cudnn": "9.26.0.51"}))
            for gpu, holds in (("h200", True), ("h20", True), ("h100", True), ("b200", False), ("a100", False))
        ),
        *(
            ("nccl-2.20.5-graph-hang", holds, situation(gpu, libraries={"nccl": "2.20.5"}, gpu_count=count))
            for gpu, count, holds in (("h100", 2, True), ("a100", 2, True), ("a100", 1, False), ("h20", 2, False))
        ),
        *(
            ("nccl-4090-p2p", holds, situation(gpu, driver="550.54.15", gpu_count=2))
            for gpu, holds in (("rtx4090", True), ("rtx4080-super", True), ("rtx3090", False), ("l40s", False))
        ),
        ("nccl-4090-p2p", False, situation("rtx4080", driver="570.26", gpu_count=2)),
        *(
            ("nccl-h800-nvls-bf16", holds, situation(gpu, gpu_count=2))
            for gpu, holds in (("h800", True), ("h20", True), ("h200", True), ("b200", False), ("a100", False))
        ),
        *(
            ("error-802-fabricmanager", holds, situation(gpu, environment=frozenset({"fabric-manager-down"})))
            for gpu, holds in (("v100", True), ("b300", True), ("l40s", False))
        ),
        *(
            ("error-804-forward-compat", holds, situation(gpu, environment=frozenset({"cuda-compat"})))
            for gpu, holds in (("rtx2060", True), ("rtx5080-laptop", True), ("rtxa6000", False), ("h20", False))
        ),
        (
            "nccl-2.28.3-2.29.2",
            True,
            situation("h20", libraries={"nccl": "2.28.3"}, gpu_count=2, environment=frozenset({"source-build"})),
        ),
        ("conv3d-bf16", True, situation("a100", "2.9.0")),
        ("conv3d-bf16", False, situation(None, "2.9.0+cpu")),
        ("tf32-default", True, situation("a100", "2.13.0")),
        ("tf32-default", False, situation("a100", "2.13.0+cpu")),
        ("h20-cluster-launch", False, situation("h20", "2.11.0")),
        ("cublas-not-initialized", False, situation("h20", "2.3.1")),
    ],
)
def test_where_an_advisory_holds(name: str, holds: bool, where: Situation) -> None:
    assert (name in {item.id for item in database.matching(where)}) is holds


def test_both_conditions_are_of_one_gpu() -> None:
    both = (database.gpus()["a100"], database.gpus()["h20"])
    assert "cublas-hopper-fpe" in hits(None, "2.3.1", gpus=both)
    assert "cublas-nvfp4-scale" not in hits(None, gpus=both, libraries={"cublas": "13.4.0.1"})


def test_the_series_and_the_capability_are_of_one_gpu() -> None:
    match = Match(series=("NVIDIA GeForce",), compute_capability=VersionRange((SpecifierSet("==9.0"),)))
    geforce, hopper = database.gpus()["rtx5090"], database.gpus()["h20"]
    assert not match.holds(Situation(gpus=(geforce, hopper)))
    assert Match(series=("NVIDIA GeForce",)).holds(Situation(gpus=(geforce, hopper)))


def test_the_severe_come_first() -> None:
    found = [item.severity for item in database.matching(situation("h20", "2.3.1", gpu_count=4))]
    assert found == sorted(found, key=["refuse", "warn", "note"].index)
    assert {"refuse", "warn", "note"} == set(found)


def test_nothing_known_matches_nothing() -> None:
    assert database.matching(Situation()) == []
    assert database.matching(Situation(torch="nonsense", cuda="?", driver="?", libraries={"cublas": "?"})) == []


# A site's own facts

OWN = """\
as_of: 2026-12
sources: {ops: "our operations log"}
gpus:
  - {id: x1, names: ["ACME X1"], family: x1, compute_capability: "9.0", memory_gb: [8], features: [tf32, bf16],
     first_cuda: "12.0", datacentre: true, source: [ops], status: reported}
advisories:
  - id: site-slow-switch
    title: "Our switch drops NCCL's packets"
    severity: warn
    match: {gpus: [x1], gpu_count: ">4"}
    decidable: true
    shows: {patterns: ['switch-7']}
    remedy: "use the other rail"
    cite: ["https://wiki.example/switch-7"]
    source: [ops]
    status: reported
"""


def test_a_site_adds_gpus_and_advisories() -> None:
    site(OWN)
    assert database.advisories()[-1].id == "site-slow-switch"
    assert database.advisories()[-1].as_of == "2026-12"
    card = database.gpu_by_name("ACME X1 MIG 1g.1gb")
    assert card
    assert "site-slow-switch" in {item.id for item in database.matching(Situation(gpus=(card,), gpu_count=8))}
    assert "site-slow-switch" not in {item.id for item in database.matching(Situation(gpus=(card,), gpu_count=4))}


def test_all_faults_of_a_site_file_are_reported_at_once() -> None:
    site(
        OWN.replace("[x1], gpu_count", "[x2], gpu_cuont")
        .replace("severity: warn", "severity: fatal")
        .replace("memory_gb: [8]", 'memory_gb: ["8"]')
        .replace("'switch-7'", "'(a+)+b'")
        .replace("source: [ops]\n", "source: [nobody]\n")
        + "extra: 1\n"
    )
    with pytest.raises(FactsError) as raised:
        database.advisories()
    faults = [str(fault) for fault in raised.value.faults]
    for line, word in (
        (4, "integer"),
        (9, "refuse"),
        (10, "unknown key"),
        (12, "repeats a group"),
        (17, "unknown key"),
    ):
        assert [text for text in faults if f"own.yaml:{line}: " in text and word in text], (line, word, faults)


@pytest.mark.parametrize(
    ("change", "line", "word"),
    [
        (("[x1], gpu", "[h2o], gpu"), 10, "did you mean h20?"),
        (("gpus: [x1], gpu", "series: [GeFroce], gpu"), 10, "no GPU's name begins with 'GeFroce'"),
        ((": [ops]\n    status", ": [nobody]\n    status"), 15, "'nobody'"),
        (("wiki.example", " example"), 14, "owner/repo#N"),
        (("as_of: 2026-12\n", ""), 3, "missing"),
        (("id: site-slow-switch", "id: cublas-hopper-fpe"), 7, "known already"),
        (("ACME X1", "NVIDIA H20"), 4, "known already"),
        (('">4"', '"more"'), 10, "more"),
        (('{gpus: [x1], gpu_count: ">4"}', "{}"), 10, "no condition"),
        (("'switch-7'", "'['"), 12, "regular expression"),
        (("patterns: ['switch-7']", "like: [cublas-hopper-fp]"), 12, "did you mean cublas-hopper-fpe?"),
        (("advisories:\n", "advisories: 5\nothers:\n"), 6, "list of mappings"),
        (("sources: {", "sources: 5\nothers: {"), 2, "mapping of keys"),
        (("severity: warn", "severity: *no"), 9, "alias"),
        (('title: "Our', 'title: 5 # "Our'), 8, "must be text"),
    ],
)
def test_a_malformed_site_file_names_the_line(change: tuple[str, str], line: int, word: str) -> None:
    assert change[0] in OWN
    site(OWN.replace(*change))
    with pytest.raises(FactsError) as raised:
        database.advisories()
    assert raised.value.code == 3
    faults = [str(fault) for fault in raised.value.faults]
    assert [text for text in faults if f"own.yaml:{line}: " in text and word in text], faults


@pytest.mark.parametrize("patterns", [[], ["gemm", "(?i)conv"], ["(?P<x>a)", "(?P<x>b)"]])
def test_alternatives_of_a_site_that_do_not_form_a_pattern_together_are_refused(patterns: list[str]) -> None:
    with pytest.raises(ValidationError, match="regular expression"):
        TypeAdapter(AnyPattern).validate_python(patterns, context=True)


def test_faults_of_several_files_are_reported_together() -> None:
    site("gpus: 5\n", "a.yaml")
    site("[]", "b.yaml")
    site("advisories: 5\n", "c.yaml")
    with pytest.raises(FactsError) as raised:
        database.gpus()
    faults = "\n".join(map(str, raised.value.faults))
    assert all(name in faults for name in ("a.yaml", "b.yaml", "c.yaml"))


@pytest.mark.parametrize("name", ["own.yaml", "own.yml", "a b.yaml"])
def test_each_yaml_file_of_a_site_is_read(name: str) -> None:
    file = site(OWN, name)
    before = fact_file_reader.facts_digest()
    assert fact_file_reader.site_files() == (file,)
    assert "x1" in database.gpus() and database.advisories()[-1].id == "site-slow-switch"
    file.write_text(OWN.replace("8", "9"), encoding="utf-8")
    assert fact_file_reader.facts_digest() != before


@pytest.mark.parametrize("name", [".own.yaml", ".#own.yaml", "own.yaml~", "own.yaml.bak", "README.md"])
def test_other_files_of_a_site_are_skipped(name: str) -> None:
    """While a fact file is edited, the editor's backup copies and lock files are in the same folder."""
    digest = fact_file_reader.facts_digest()
    file = site("no facts: [")
    file.rename(file.with_name(name))
    assert fact_file_reader.site_files() == () and fact_file_reader.facts_digest() == digest
    assert "x1" not in database.gpus()


def test_a_locked_file_of_an_editor_does_not_stop_a_command() -> None:
    file = site(OWN)
    file.with_name(".#own.yaml").symlink_to("user@host.1234")  # as Emacs makes it
    assert fact_file_reader.site_files() == (file,)


@pytest.mark.parametrize(
    ("target", "word"), [("missing", "No such file"), ("facts.d", "symbolic links"), (None, "Not a")]
)
def test_a_folder_of_facts_that_cannot_be_listed_is_an_error(target: str | None, word: str) -> None:
    """Without the site's advisories, a version that these advisories refuse would be chosen."""
    folder = site(OWN).parent
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(target) if target else folder.write_text(OWN)
    for read in (database.advisories, database.gpus, fact_file_reader.facts_digest):
        with pytest.raises(FactsError, match=rf"facts\.d cannot be listed: .*{word}"):
            read()


def test_an_unreadable_fact_file_is_an_error() -> None:
    site(OWN).with_name("gone.yaml").symlink_to("missing")
    with pytest.raises(FactsError) as raised:
        database.advisories()
    assert [fault.message for fault in raised.value.faults if "gone.yaml cannot be read" in fault.message]


def test_errors_of_applications_are_those_of_the_selftest() -> None:
    """The self-test cannot read the facts, so it has its own copy."""
    pytest.importorskip("torch")
    from envbuild.selftest.nvidia.gpu_telemetry_verdict import APPLICATION_XIDS

    assert {number for number, fact in database.xids().items() if fact.application} == APPLICATION_XIDS


@pytest.mark.parametrize(
    ("known", "standing"),
    [
        ({}, "open"),
        ({"gpus": ("h20",)}, "fits"),
        ({"gpus": ("a100",)}, "contradicted"),
        ({"gpus": ("a100", "h20")}, "fits"),
        ({"libraries": {"cublas": "12.1.3.1"}}, "fits"),
        ({"gpus": ("h20",), "libraries": {"cublas": "12.1.3.1"}}, "holds"),
        ({"gpus": ("h20",), "libraries": {"cublas": "12.4.5.8"}}, "contradicted"),
    ],
)
def test_the_standing_of_an_advisory_in_a_partly_known_situation(known: dict[str, Any], standing: str) -> None:
    cards = tuple(database.gpus()[name] for name in known.get("gpus", ()))
    situation = Situation(gpus=cards, libraries=known.get("libraries", {}), gpu_count=None)
    assert advisory("cublas-hopper-fpe").standing(situation) == standing
    assert advisory("cublas-hopper-fpe").holds(situation) == (standing == "holds")


def test_facts_from_a_log_alone_are_never_contradicted() -> None:
    assert advisory("half-attention-nan").standing(Situation()) == "open"
