"""Tests of the simulated GPU itself: it refuses what a real one would, and the facts contain it."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.facts import database
from envbuild.selftest.harness import forked_work
from pretend.gpus import GPUS
from pretend.runtime import install

HALVES, EVERY = (torch.float16, torch.bfloat16), (torch.float16, torch.bfloat16, torch.float32)


def on(gpu: str, work: Callable[[], object]) -> object:
    """Return the result of `work` in a forked process that simulates this GPU; an exception there fails the test."""

    def simulate(tell: forked_work.Tell) -> None:
        install(GPUS[gpu])
        tell("returned", work())

    ending = forked_work.run_forked(simulate, 60)
    assert ending.failure is None, ending.failure
    return ending.reported["returned"]


def refusal(work: Callable[[], object]) -> str:
    """Return the message of the refusal; empty if nothing is refused."""
    try:
        work()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", GPUS)
def test_the_facts_know_the_gpu(name: str) -> None:
    gpu, known = GPUS[name], database.gpus()[name]
    assert gpu.name in known.names
    assert "{}.{}".format(*gpu.capability) == known.compute_capability
    assert gpu.gigabytes in known.memory_gb
    assert gpu.sms == (known.sms or gpu.sms)
    assert f"sm_{known.compute_capability.replace('.', '')}" in gpu.architectures or gpu.capability in ((8, 9),)


def test_tensors_of_two_devices_do_not_mix() -> None:
    def work() -> list[str]:
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        return [
            refusal(lambda: here + there),
            refusal(lambda: F.linear(there, here[None])),
            refusal(lambda: there.numpy()),
            refusal(lambda: there + torch.tensor(1.0)),  # no dimension: a number
            refusal(lambda: there.copy_(here)),
        ]

    mixed, linear, numpy, number, copy = on("h100", work)  # type: ignore[misc]
    assert "found at least two devices" in mixed and "found at least two devices" in linear
    assert "can't convert cuda:0" in numpy
    assert number == copy == ""


def test_numbers_come_back_as_they_went() -> None:
    def work() -> bool:
        x = torch.arange(24.0).reshape(2, 3, 4)
        there = x.to("cuda", torch.float16)
        there[0, 1] += 1
        x[0, 1] += 1
        back = there.transpose(0, 2).cpu()
        return torch.equal(back, x.half().transpose(0, 2)) and there.is_cuda and back.device.type == "cpu"

    assert on("h100", work)


def test_gradients_cross_from_the_host_to_the_gpu_and_back() -> None:
    def work() -> list[float]:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        (x.to("cuda").square().cpu() * torch.tensor([1.0, 10.0])).sum().backward()
        assert x.grad is not None
        return [float(value) for value in x.grad]

    assert on("h100", work) == [2.0, 40.0]


def test_conjugates_are_those_of_the_host() -> None:
    """As factors of a product, inside an operation of several steps, and of spectra that are transformed back."""

    def work() -> list[float]:
        a = torch.view_as_complex(torch.arange(120.0).remainder(7).view(3, 5, 4, 2)) + torch.eye(5, 4)
        signal, window = torch.arange(400.0).remainder(11), torch.hann_window(64)
        spectrum = torch.stft(signal, 64, 16, window=window, return_complex=True)
        there = a.to("cuda")
        pairs = [
            (there.mT.conj() @ there, a.mT.conj() @ a),
            (there.conj() @ there.mT, a.conj() @ a.mT),
            (torch.linalg.pinv(there), torch.linalg.pinv(a)),
            (
                torch.istft(spectrum.to("cuda"), 64, 16, window=window.to("cuda"), length=400),
                torch.istft(spectrum, 64, 16, window=window, length=400),
            ),
        ]
        return [float((found.cpu() - expected).abs().max()) for found, expected in pairs]

    assert on("h100", work) == [0.0] * 4


def test_memory_is_counted_given_back_and_ends() -> None:
    def work() -> list[object]:
        free, total = torch.cuda.mem_get_info()
        kept = torch.zeros(1 << 20, device="cuda")
        view, used = kept[5:], torch.cuda.memory_allocated()
        del kept
        held = torch.cuda.memory_allocated()
        del view
        large = torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")
        words = refusal(lambda: torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda"))
        del large
        return [used, held, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated() / total, words]

    used, held, left, peak, words = on("t4", work)  # type: ignore[misc]
    assert (used, held, left) == (4 << 20, 4 << 20, 0)
    assert 0.89 < peak < 0.91
    assert "CUDA out of memory" in words


def kernels(gpu: str, backend: str, depth: int = 64, masked: bool = False, training: bool = False) -> list[str]:
    """Return the dtypes for which a backend has a kernel on this GPU."""

    def work() -> list[str]:
        member = getattr(torch.nn.attention.SDPBackend, backend)
        found = []
        for dtype in EVERY:
            q = torch.ones((1, 1, 8, depth), device="cuda").to(dtype).requires_grad_(training)
            mask = torch.ones((8, 8), dtype=torch.bool, device="cuda") if masked else None
            with torch.nn.attention.sdpa_kernel([member]):
                words = refusal(lambda q=q, mask=mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
            assert words in ("", "No available kernel. Aborting execution.")
            found += [] if words else [str(dtype).removeprefix("torch.")]
        return found

    return on(gpu, work)  # type: ignore[return-value]


BOTH, SINGLE = ["float16", "bfloat16"], ["float32"]


@pytest.mark.parametrize(
    ("gpu", "backend", "case", "dtypes"),
    [
        ("v100", "FLASH_ATTENTION", {}, []),
        ("t4", "FLASH_ATTENTION", {}, []),
        ("a100", "FLASH_ATTENTION", {}, BOTH),
        ("a100", "FLASH_ATTENTION", {"masked": True}, []),
        ("a100", "FLASH_ATTENTION", {"depth": 256, "training": True}, BOTH),
        ("rtx4090", "FLASH_ATTENTION", {"depth": 200, "training": True}, []),
        ("rtx4090", "FLASH_ATTENTION", {"depth": 200}, BOTH),
        ("b200", "FLASH_ATTENTION", {"depth": 264}, []),
        ("v100", "EFFICIENT_ATTENTION", {}, ["float16", *SINGLE]),
        ("v100", "EFFICIENT_ATTENTION", {"depth": 66}, SINGLE),
        ("a100", "EFFICIENT_ATTENTION", {"depth": 66}, []),
        ("rtx5090", "EFFICIENT_ATTENTION", {"masked": True}, [*BOTH, *SINGLE]),
        ("t4", "CUDNN_ATTENTION", {}, []),
        ("h100", "CUDNN_ATTENTION", {"masked": True}, BOTH),
        ("h100", "CUDNN_ATTENTION", {"depth": 192}, []),
        ("t4", "MATH", {"masked": True}, [*BOTH, *SINGLE]),
    ],
)
def test_attention_has_a_kernel_where_torch_has_one(
    gpu: str, backend: str, case: dict[str, object], dtypes: list[str]
) -> None:
    assert kernels(gpu, backend, **case) == dtypes  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpu", "allowed", "cut"), [("a100", True, True), ("a100", False, False), ("t4", True, False)])
def test_tf32_is_used_where_the_flags_and_the_gpu_allow_it(gpu: str, allowed: bool, cut: bool) -> None:
    def work() -> list[float]:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        x = torch.full((1, 1), 1 + 2.0**-12, device="cuda")
        return [float(x @ x), float(F.conv1d(x[None], x[None]))]

    assert on(gpu, work) == [1.0 if cut else 1 + 2.0**-11] * 2


def test_a_product_that_is_too_large_for_a_cpu_passes_no_check() -> None:
    def work() -> bool:
        x = torch.empty((1 << 12, 1 << 12), device="cuda", dtype=torch.float16)
        return bool(torch.mm(x, x).isnan().all())

    assert on("h100", work)


def test_fp8_needs_its_capability() -> None:
    def work() -> str:
        x, one = torch.ones((16, 16), device="cuda").to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        return refusal(lambda: torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))

    assert "compute capability" in str(on("a100", work)) and on("rtx4090", work) == ""


def test_a_graph_computes_at_each_replay_from_what_its_tensors_hold_then() -> None:
    def work() -> list[object]:
        x, weight = torch.ones(4, device="cuda"), torch.full((4,), 2.0, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = (x.view(2, 2) * weight.view(2, 2)).sum(0)
        before = result.cpu().isnan().all().item()
        x.fill_(3)
        weight.mul_(10)
        unchanged = result.cpu().isnan().all().item()
        graph.replay()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            words = [refusal(lambda: x.cpu()), refusal(lambda: x.sum().item()), refusal(lambda: x.copy_(torch.ones(4)))]
            outside = refusal(lambda: x.add_(1))
        return [before, unchanged, result.tolist(), words, outside]

    before, unchanged, result, words, outside = on("h100", work)  # type: ignore[misc]
    assert before and unchanged and result == [120.0, 120.0]
    assert words == ["CUDA error: operation not permitted when stream is capturing"] * 3
    assert outside == "a capture that writes to tensors that were there before"


@pytest.mark.parametrize(
    ("gpu", "override", "rounded"), [("a100", "1", True), ("a100", "0", False), ("t4", "1", False)]
)
def test_nvidias_variable_overrides_torchs_flag_for_tf32(
    monkeypatch: pytest.MonkeyPatch, gpu: str, override: str, rounded: bool
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)

    def work() -> bool:
        torch.backends.cuda.matmul.allow_tf32 = override == "0"
        one = torch.ones((1, 1), device="cuda")
        return bool(torch.mm(one * (1 + 2.0**-12), one).item() == 1)

    assert on(gpu, work) == rounded
