"""The fingerprint of a user's model: right modules pass in every dtype, and a wrong module is named."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from envbuild.report import fingerprint_comparison
from envbuild.selftest.model import fingerprint, first, write
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.testrun import fingerprint_reader
from envbuild.util.errors import UsageError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Use one thread: on shared processors, the threads of small operations spend their time in spinning."""
    with one_thread():
        yield


class Block(nn.Module):
    """Attention and a network with a residual stream, as transformers have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.network(self.norm(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: nn.Sequential(*(Block(64) for _ in range(3))), (2, 50, 64)),
    "image": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 64, 3, stride=2),
            nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.Upsample(scale_factor=2), nn.Conv2d(64, 8, 1),
            nn.Softmax(dim=1),
        ),
        (2, 3, 32, 32),
    ),
    "video": (lambda: nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()), (1, 4, 5, 12, 12)),
    "recurrent": (lambda: nn.LSTM(32, 64, 2, batch_first=True), (2, 30, 32)),
    "long sums": (lambda: nn.Sequential(nn.Linear(8192, 64), nn.Tanh(), nn.Linear(64, 1)), (16, 8192)),
}  # fmt: skip


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    build, shape = MODELS[name]
    return build().to(dtype), hashed_inputs.signed(shape, 9).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_right_model_is_within_its_estimate(name: str, dtype: torch.dtype) -> None:
    model, x = made(name, dtype)
    document = fingerprint(model, x, reference=True)
    assert first(document["ops"]) is None
    assert {op["note"] for op in document["ops"]} == {None}
    ratios = [op["free"]["against"]["ratio"] for op in document["ops"]]
    assert 0 < max(ratios) < 0.5


def test_autocast_is_seen_where_modules_do_not_show_it() -> None:
    model, x = made("transformer", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        document = fingerprint(model, x, reference=True)
    assert first(document["ops"]) is None
    assert max(op["free"]["against"]["relative"] for op in document["ops"]) > 2.0**-12


def test_it_leaves_the_model_as_it_was() -> None:
    model, x = made("image", torch.float32)
    model[2].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    fingerprint(model, x, reference=True)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_modules_come_innermost_first_and_calls_are_counted() -> None:
    model, x = made("transformer", torch.float32)
    names = [op["id"] for op in fingerprint(model[0], x)["ops"]]
    inner = ["network.0", "network.1", "network.2", "network"]
    assert names == ["norm", "attention.out_proj", "attention:0", "norm#2", *inner, "(model)"] or names == [
        "norm", "attention:0", "norm#2", *inner, "(model)",
    ]  # fmt: skip


# wrong models


class Wrong(nn.Linear):
    """A Linear with a fault that does not occur in float64, so that the reference is right."""

    fault = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.dtype == torch.float64:
            return y
        if self.fault == "element":
            y[0, 3] += y.abs().max() / 8
        if self.fault == "nan":
            y[1, 2] = float("nan")
        if self.fault == "bfloat16":
            y = super().forward(x.bfloat16().to(x.dtype))
        if self.fault == "scaled":
            y = y * 1.25
        return y


def wrong(fault: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(128, 96), nn.GELU(), nn.Sequential(nn.Tanh(), Wrong(96, 64)), nn.Linear(64, 8))
    model[2][1].fault = fault
    return model.to(dtype), hashed_inputs.uniform((8, 128), 3).to(dtype)


@pytest.mark.parametrize(
    ("fault", "dtype"), [*itertools.product(["element", "nan", "scaled"], DTYPES), ("bfloat16", torch.float32)]
)
def test_the_first_wrong_module_is_named(fault: str, dtype: torch.dtype) -> None:
    model, x = wrong(fault, dtype)
    found = first(fingerprint(model, x, reference=True)["ops"])
    assert found is not None
    assert (found["op"], found["kind"]) == ("2.1", "nonfinite" if fault == "nan" else "bound")


def test_without_a_reference_what_is_not_finite_is_named() -> None:
    model, x = wrong("nan", torch.float16)
    document = fingerprint(model, x)
    found = first(document["ops"])
    assert found == {
        "op": "2.1", "pass": "free", "kind": "nonfinite", "reason": "1 values are not finite, its inputs are",
    }  # fmt: skip
    assert [op["free"]["fed"] for op in document["ops"][-2:]] == [1, 0]  # the model's own input was finite


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: str, sign: int, reference: bool) -> None:
    """The float64 reference has the same weight and the same result, but the module is still named."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].bias.fill_(9)
        model[1].weight[0, 0] = sign * float(value)
    document = fingerprint(model, torch.rand(4, 8), reference=reference)
    found = first(document["ops"])
    assert found is not None and (found["op"], found["kind"]) == ("1", "nonfinite")
    assert ("look at the weights" in found["reason"]) is reference
    comparison = compared(document, document, tmp_path)
    assert comparison.first is not None and (comparison.verdict, comparison.first.op, set(comparison.first.off)) == (
        "breakage",
        "1",
        {"a", "b"},
    )
    assert "not finite in both, from finite inputs, so both have the same cause; the first: 1" in comparison.notes


@pytest.mark.parametrize("reference", [True, False])
def test_a_module_is_not_blamed_for_inputs_that_are_not_finite(reference: bool) -> None:
    x = torch.rand(4, 8)
    x[1, 2] = float("nan")
    assert first(fingerprint(nn.Sequential(nn.Linear(8, 8)), x, reference=reference)["ops"]) is None


def test_a_fault_between_modules_is_the_outer_modules() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y * (1.0 if x.dtype == torch.float64 else 1.125)

    found = first(fingerprint(nn.Sequential(Outer(), nn.ReLU()), torch.rand(4, 16), reference=True)["ops"])
    assert found is not None and found["op"] == "0"


def test_a_module_that_has_no_float64_is_noted_and_not_judged() -> None:
    class Only(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                raise ValueError("float32 only\nmore")
            return x

    document = fingerprint(nn.Sequential(nn.Linear(4, 4), Only()), torch.rand(2, 4), reference=True)
    linear, only, whole = document["ops"]
    assert (linear["note"], only["note"]) == (None, "no reference: ValueError: float32 only")
    assert only["free"]["against"] is None and whole["free"]["against"] is None
    fingerprint_reader.Fingerprint.model_validate(document)


@pytest.mark.parametrize("reference", [True, False])
def test_any_arguments_and_outputs_will_do(reference: bool) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = torch.polar(torch.ones(4), torch.arange(4.0))  # complex, and not a buffer

        def forward(self, x: Any, *, mask: torch.Tensor, scale: float) -> Any:
            return {"turned": x["a"] * self.angles, "masked": (x["b"] + mask, [x["n"] > 2]), "none": None}

    given = {
        "x": {"a": torch.rand(3, 4), "b": torch.rand(4), "n": torch.arange(5)},
        "mask": torch.tensor([0.0, float("-inf"), 0.0, 0.0]),
        "scale": 2.0,
    }
    document = fingerprint(Odd(), given, reference=reference)
    assert [op["id"] for op in document["ops"]] == ["(model):turned", "(model):masked:0", "(model):masked:1:0"]
    assert [op["note"] for op in document["ops"]] == [None] * 3
    found = first(document["ops"])
    assert (found is None) if reference else (found is not None and found["op"] == "(model):masked:0")
    fingerprint_reader.Fingerprint.model_validate(json.loads(json.dumps(document, allow_nan=False)))


def test_an_exception_of_the_model_is_raised_and_hooks_are_removed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError):
        fingerprint(model, torch.rand(2, 4))
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training


# comparisons of two fingerprints


def compared(a: Any, b: Any, folder: Path) -> fingerprint_comparison.Comparison:
    for name, document in (("a", a), ("b", b)):
        write(document, folder / f"{name}.json")
    return fingerprint_comparison.compare_fingerprints(
        fingerprint_reader.read(folder / "a.json"), fingerprint_reader.read(folder / "b.json")
    )


@pytest.mark.parametrize("reference", [True, False])
def test_bfloat16_of_a_model_is_its_rounding(tmp_path: Path, reference: bool) -> None:
    documents = [
        fingerprint(*made("transformer", dtype), reference=reference) for dtype in (torch.float32, torch.bfloat16)
    ]
    found = compared(*documents, tmp_path)
    assert (found.verdict, found.growth) == ("rounding", None)
    assert "different dtypes: float32 in fingerprint a but bfloat16 in fingerprint b" in found.notes


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind"), [("element", "breakage"), ("scaled", "breakage"), ("bfloat16", "precision")]
)
def test_a_wrong_module_is_found_between_two(tmp_path: Path, reference: bool, fault: str, kind: str) -> None:
    right, broken = (fingerprint(*wrong(name, torch.float32), reference=reference) for name in ("none", fault))
    found = compared(right, broken, tmp_path)
    assert found.first is not None
    assert (found.verdict, found.first.op) == (kind, "2.1")
    assert compared(right, right, tmp_path).verdict == "identical"


def test_two_different_models_are_reported(tmp_path: Path) -> None:
    documents = [fingerprint(*made(name, torch.float32)) for name in ("transformer", "video")]
    with pytest.raises(UsageError, match=r"the fingerprints are of different models: [0-9]+ and 4 outputs of modules"):
        compared(*documents, tmp_path)
