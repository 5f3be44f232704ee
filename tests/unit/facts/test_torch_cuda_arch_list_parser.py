"""The GPUs that device code supports."""

from __future__ import annotations

import pytest

from envbuild.facts.torch_cuda_arch_list_parser import capabilities, serves


@pytest.mark.parametrize(
    ("listed", "card", "how"),
    [
        ("sm_90", "9.0", "compiled"),
        ("sm_80", "8.6", "compiled"),
        ("sm_86", "8.0", None),
        ("sm_50 sm_80 sm_86 sm_90", "8.9", "compiled"),
        ("sm_80 sm_90 compute_90", "8.6", "compiled"),
        ("sm_80 sm_90 compute_90", "10.0", "ptx"),
        ("sm_80 compute_90", "9.0", "ptx"),
        ("sm_80 compute_90", "7.5", None),
        ("sm_100", "10.3", "compiled"),
        ("sm_103", "10.0", None),
        ("sm_120", "12.1", "compiled"),
        ("gfx90a", "9.0", None),
        ("compute_90a", "9.0", "ptx"),
        ("sm_80", "9.0", None),
        ("sm_80 compute_80", "9.0", "ptx"),
        ("compute_90", "8.0", None),
        ("sm_90a", "9.0", "compiled"),
        ("sm_100a", "10.3", None),
        ("sm_100f", "10.3", "compiled"),
        ("sm_100f compute_100f", "12.0", None),
        ("compute_90a", "10.0", None),
        ("compute_100f", "10.3", "ptx"),
        ("nonsense", "9.0", None),
        ("", "9.0", None),
    ],
)
def test_serves(listed: str, card: str, how: str | None) -> None:
    assert serves(listed.split(), card) == how


def test_an_arch_list_of_torch() -> None:
    assert capabilities("8.0;9.0a+PTX 12.0") == ("8.0", "9.0", "12.0")
    assert capabilities("") == ()
    with pytest.raises(ValueError, match="'Hopper' is not a compute capability"):
        capabilities("Hopper")
