"""Settings for unequal GPUs come from the facts and are set only where they are needed; a profile's own value takes
precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envbuild.facts import database, fact_file_reader, mixed_gpu_settings
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, envbuild, plan_of, write_profile

FLEET: dict[str, Any] = {**PROFILE, "torch": "2.7.1", "packages": [], "apt": [], "env": {}}


def of(*cards: str) -> dict[str, str]:
    return {
        item.variable: item.value
        for item in mixed_gpu_settings.mixed_gpu_settings([database.gpus()[card] for card in cards])
    }


@pytest.mark.parametrize(
    ("cards", "wanted"),
    [
        ([], {}),
        (["h20"], {}),
        (["a100", "a30"], {"ENVBUILD_DTYPE": "bfloat16"}),
        (["h100", "h20", "b200"], {"ENVBUILD_DTYPE": "bfloat16"}),
        (["a100", "h20"], {"ENVBUILD_DTYPE": "bfloat16", "NCCL_NVLS_ENABLE": "0"}),
        (["v100", "a100"], {"ENVBUILD_DTYPE": "float16", "NVIDIA_TF32_OVERRIDE": "0"}),
        (["v100", "t4"], {"ENVBUILD_DTYPE": "float16"}),
        (["t4", "h100"], {"ENVBUILD_DTYPE": "float16", "NVIDIA_TF32_OVERRIDE": "0", "NCCL_NVLS_ENABLE": "0"}),
    ],
)
def test_settings_are_made_where_some_gpus_lack_what_others_have(cards: list[str], wanted: dict[str, str]) -> None:
    assert of(*cards) == wanted


def test_the_common_type_says_which_gpu_lacks_the_better_one() -> None:
    dtype = next(mixed_gpu_settings.mixed_gpu_settings([database.gpus()[card] for card in ("a100", "v100", "t4")]))
    assert (dtype.variable, dtype.value) == (mixed_gpu_settings.DTYPE, "float16")
    assert dtype.reason.endswith("bfloat16 is missing on v100, t4")


def test_the_last_type_serves_every_gpu() -> None:
    """The last row requires no GPU feature, so a common type is always found."""
    assert fact_file_reader.rows("fleet", "dtypes", mixed_gpu_settings._Dtype)[-1].feature is None
    for gpu in database.gpus().values():
        assert next(mixed_gpu_settings.mixed_gpu_settings([gpu, database.gpus()["v100"]])).value == "float16"


def test_the_image_has_them_and_a_profiles_own_value_wins(project: Path) -> None:
    plan = plan_of(project, {**FLEET, "gpus": ["a100", "h20"]})
    assert plan.environment["ENVBUILD_DTYPE"] == "bfloat16"
    assert plan.environment["NCCL_NVLS_ENABLE"] == "0"
    assert plan.environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0"
    own = plan_of(project, {**FLEET, "gpus": ["a100", "h20"], "env": {"NCCL_NVLS_ENABLE": "2"}})
    assert own.environment["NCCL_NVLS_ENABLE"] == "2"


def test_show_prints_variables_with_their_reasons(project: Path) -> None:
    write_profile(project, {**FLEET, "gpus": ["a100", "h20"], "env": {"ENVBUILD_DTYPE": "float16"}})
    settings = envbuild("show", "sample", "--json").document["environment"]
    assert [(item["variable"], item["value"]) for item in settings] == [("NCCL_NVLS_ENABLE", "0")]
    assert "NVLink SHARP" in settings[0]["reason"]
    assert "  NCCL_NVLS_ENABLE=0: only some" in envbuild("show", "sample").stdout
    write_profile(project, {**FLEET, "gpus": ["h20"]})
    assert envbuild("show", "sample", "--json").document["environment"] == []


def test_an_nccl_that_tunes_each_rank_for_its_own_gpu_is_refused(project: Path) -> None:
    old = {**FLEET, "torch": "2.4.1", "gpu_count": 2}
    with pytest.raises(ProfileError) as caught:
        plan_of(project, {**old, "gpus": ["a100", "h100"], "pins": {"cublas": "12.4.5.8"}})
    assert "nccl-unequal-cards" in caught.value.faults[0].message
    plan_of(project, {**old, "gpus": ["a100", "a30"]})  # of one compute capability
    plan_of(project, {**old, "gpus": ["a100", "h100"], "gpu_count": 1, "pins": {"cublas": "12.4.5.8"}})
    plan_of(project, {**old, "gpus": ["a100", "h100"], "pins": {"cublas": "12.4.5.8", "nccl": "2.21.5"}})
    plan_of(project, {**old, "torch": "2.5.1", "gpus": ["a100", "h100"]})
