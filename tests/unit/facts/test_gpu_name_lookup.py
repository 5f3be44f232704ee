"""GPU names from drivers, lspci and users are mapped to models."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.facts import database, gpu_name_lookup

NAMES = {
    # nvidia-smi and torch
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20-3e",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA H100 PCIe": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A16": "a16",
    "NVIDIA A100-SXM4-80GB": "a100",
    "A100-SXM4-40GB": "a100",  # drivers before 470
    "GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
    "NVIDIA GeForce RTX 2080 with Max-Q Design": "rtx2080",
    "NVIDIA GeForce RTX 3080": "rtx3080",
    "NVIDIA GeForce RTX 3080 Ti": "rtx3080ti",
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU": "rtx3080ti-laptop",
    "NVIDIA GeForce RTX 3050 6GB Laptop GPU": "rtx3050-laptop",
    "NVIDIA GeForce RTX 3050 A Laptop GPU": "rtx3050a-laptop",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070ti-super",
    "NVIDIA GeForce RTX 4090 D": "rtx4090d",
    "NVIDIA GeForce RTX 5060": "rtx5060",
    "NVIDIA GeForce RTX 5060 Ti": "rtx5060ti",
    "NVIDIA GeForce RTX 5070": "rtx5070",
    "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti",
    "NVIDIA GeForce RTX 5080": "rtx5080",
    "NVIDIA GeForce RTX 5080 Laptop GPU": "rtx5080-laptop",
    "NVIDIA RTX A6000": "rtxa6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
    "NVIDIA RTX PRO 4500 Blackwell": "rtxpro4500",
    "Quadro RTX 6000": "quadro-rtx6000",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla V100S-PCIE-32GB": "v100",
    "Tesla P100-PCIE-16GB": "p100",
    "NVIDIA GB200": "gb200",
    "Orin": "jetson-orin",
    "Orin (nvgpu)": "jetson-orin",
    "NVIDIA A100-SXM...": "a100",  # its table, cut off
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4d2d3c4b-0c1e-4f7a-9a9e-1f2e3d4c5b6a)": "h100",  # nvidia-smi -L
    "NVIDIA Thor": "jetson-thor",
    # slices of a GPU
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "h100",
    "h20 mig 1g.12gb": "h20",
    # labels of Kubernetes nodes
    "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb": "a100",
    "NVIDIA-L40S-SHARED": "l40s",
    "Tesla-V100-SXM2-32GB": "v100",
    # lspci
    "NVIDIA Corporation GH100 [H100 PCIe] (rev a1)": "h100",
    "NVIDIA Corporation GH100 [H20 HBM3e] (rev a1)": "h20-3e",
    "GV100GL [Tesla V100 SXM2 32GB]": "v100",
    "GB203M / GN22 [GeForce RTX 5080 Max-Q / Mobile]": "rtx5080-laptop",
    "GA104M [GeForce RTX 3080 Mobile / Max-Q 8GB/16GB]": "rtx3080-laptop",
    "TU104M [GeForce RTX 2080 SUPER Mobile / Max-Q]": "rtx2080-super",
    "AD102GL [RTX 6000 Ada Generation]": "rtx6000-ada",
    "GA102 [GeForce RTX 3090 Ti]": "rtx3090ti",
    "GA102 [GeForce RTX 3080 Lite Hash Rate]": "rtx3080",
    "GA104 [GeForce RTX 3060 Ti GDDR6X]": "rtx3060ti",
    "TU102 [GeForce RTX 2080 Ti Rev. A] (rev a1)": "rtx2080ti",
    "TU106M [GeForce RTX 2070 Mobile / Max-Q Refresh]": "rtx2070",
    "GP104M [GeForce GTX 1080 Mobile]": "gtx1080",
    "AD107GL [RTX 2000 / 2000E Ada Generation]": "rtx2000-ada",
    "GH100 [H100L 94GB]": "h100",
    "GH100 [H20 NVL16]": "h20-nvl16",
    # people
    "H20": "h20",
    "nvidia h20": "h20",
    "H20 96GB": "h20",
    "h20 3e": "h20-3e",
    "H20 141GB": "h20-3e",
    "rtx 4090": "rtx4090",
    "RTX4090": "rtx4090",
    "4090": "rtx4090",
    "NVIDIA® GeForce RTX™ 4090": "rtx4090",
    "NVIDIA(R) GeForce RTX(TM) 4090": "rtx4090",
    "RTX 3090 Ti": "rtx3090ti",
    "GTX 1660 Super": "gtx1660-super",
    "RTX-4090": "rtx4090",
    "rtx 3070ti": "rtx3070ti",
    "RTX 5080 Laptop": "rtx5080-laptop",
    "rtx 5080 mobile": "rtx5080-laptop",
    "A6000": "rtxa6000",
    "RTX A6000 48 GB": "rtxa6000",
    "RTX 6000 Ada": "rtx6000-ada",
    "RTX PRO 6000": "rtxpro6000",
    "rtx pro 4000 sff": "rtxpro4000-sff",
    "RTX PRO 4500": "rtxpro4500",
    "RTX PRO 4500 Server": "rtxpro4500-server",
    "Quadro RTX 6000 24GB": "quadro-rtx6000",
    "Titan RTX": "titan-rtx",
    "H100 PCIe": "h100",
    "H100-SXM5-80GB": "h100",
    "h100nvl": "h100",
    "A100 80G": "a100",
    "V100S": "v100",
    "HGX B200": "b200",
    "B300": "b300",
    "GB200 NVL72": "gb200",
    "DGX Spark": "gb10",
    "Jetson AGX Orin 64GB": "jetson-orin",
    "NVIDIA Jetson Orin Nano Super Developer Kit": "jetson-orin",
    "GTX 1080 Ti": "gtx1080ti",
}
UNKNOWN = [
    "", " ", "nvidia", "NVIDIA GeForce", "gpu", "rtx", "Laptop GPU", "titan", "cpu", "sample", "NVIDIA H2", "H2", "H10",
    "NVIDIA L", "L40SS", "A100X", "NVIDIA A10-24Q", "GRID T4-16Q", "RTX 4090 Ti", "RTX 40", "RTX 4090 E", "H20 3",
    "RTX 3090 RTX 4090", "5080 5090", "RTX 6000 Ada Laptop", "h20.yaml", "[", "x" * 5000, "/", "H20 / H21",
    "...", "NVIDIA GeForce ...", "RTX 9...",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_model_that_a_name_means(name: str) -> None:
    assert [gpu.id for gpu in gpu_name_lookup.candidates(name)] == [NAMES[name]]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_is_never_taken_in_part(name: str) -> None:
    assert gpu_name_lookup.candidates(name) == ()


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("RTX 6000", ["quadro-rtx6000", "rtx6000-ada"]),
        ("rtx 4000", ["quadro-rtx4000", "rtx4000-ada"]),
        ("NVIDIA RTX 5000", ["quadro-rtx5000", "rtx5000-ada"]),
        ("TU102GL [Quadro RTX 6000/8000]", ["quadro-rtx6000", "quadro-rtx8000"]),
        ("GA107GL [A2 / A16]", ["a2", "a16"]),
        ("GeForce RTX 208...", ["rtx2080", "rtx2080-super", "rtx2080ti"]),
    ],
)
def test_all_models_of_an_ambiguous_name(name: str, models: list[str]) -> None:
    assert [gpu.id for gpu in gpu_name_lookup.candidates(name)] == models


NAMED = [(name, gpu.id) for gpu in database.gpus().values() for name in (gpu.id, *gpu.all_names, *gpu.aliases)]
AHEAD = ("", "NVIDIA ", "nvidia_", "NVIDIA Corporation ", "GPU 0: ")
SETTINGS = settings(deadline=None, database=None, derandomize=True, max_examples=200)
BEHIND = ("", " ", " (rev a1)", " (UUID: GPU-4d2d3c4b)", " MIG 1g.10gb", "-SHARED")


def test_every_name_in_the_facts_means_its_model_in_any_case() -> None:
    for name, model in NAMED:
        for written in (name, name.upper(), name.lower(), name.removeprefix("NVIDIA ").replace(" ", "-")):
            assert [found.id for found in gpu_name_lookup.candidates(written)] == [model], written


@pytest.mark.slow
@SETTINGS
@given(st.sampled_from(NAMED), st.randoms(), st.sampled_from(AHEAD), st.sampled_from(BEHIND), st.sampled_from(" -_"))
def test_a_gpu_name_gives_its_model_in_every_spelling(
    named: tuple[str, str], random: Random, ahead: str, behind: str, gap: str
) -> None:
    name, model = named
    written = "".join(random.choice((letter.lower(), letter.upper())) for letter in name.replace(" ", gap))
    assert [found.id for found in gpu_name_lookup.candidates(ahead + written + behind)] == [model]
    assert [found.id for found in gpu_name_lookup.candidates(f"GA102GL [{written}] (rev a1)")] == [model]


@SETTINGS
@given(st.sampled_from(NAMED), st.integers(1, 60))
def test_a_name_that_is_cut_off_may_mean_its_model(named: tuple[str, str], length: int) -> None:
    name, model = named
    found = [gpu.id for gpu in gpu_name_lookup.candidates(f"{name[:length]}...")]
    assert model in found or not found


@SETTINGS
@given(st.text(alphabet="0123456789abhrtx nvidia[]()/.-", max_size=130))
def test_any_text_means_the_same_models_in_capitals(text: str) -> None:
    assert gpu_name_lookup.candidates(text) == gpu_name_lookup.candidates(text.upper())


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("NVIDIA H21", "h20"),
        ("A100X", "a100"),
        ("RTX 5095", "rtx5090"),
        ("NVIDIA A10-24Q", "a10"),
        ("onedif-svd", "onediff-svd"),
    ],
)
def test_names_near_an_unknown_one(name: str, first: str) -> None:
    assert str(gpu_name_lookup.suggestion(name, ["onediff-svd", "h20"])).startswith(f"did you mean {first}")


def test_a_name_like_no_other_has_no_near_ones() -> None:
    assert gpu_name_lookup.suggestion("myproject", ["onediff-svd"]) is None


def test_a_name_of_maker_words_alone_fits_nothing() -> None:
    assert not re.fullmatch(gpu_name_lookup._with_options("nvidia geforce"), "")
