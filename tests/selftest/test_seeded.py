"""Kernels made wrong as GPUs and libraries are wrong: the probe whose job it is must say so, and where."""

import pytest

from . import seeding
from .named import NAMED
from .reading import Frame

pytest.importorskip("torch")

MEMORY = "alone, with the memory free, it works: memory"
LIBRARY = "so it does alone with the memory free: the library"
WRONG = [
    ("init.alloc:greedy", "oom", MEMORY),
    ("init.alloc:no_handle", "exception", LIBRARY),
    ("init.alloc:crowded", "oom", "1 of 8 processes failed at the first product"),
    ("init.alloc:dies", "exception", "the process died of SIGSEGV; so it does alone"),
    ("init.alloc:wrong", "mismatch", "1 process: the product is wrong by 1"),
    ("gemm.exact:linear", "mismatch", "Linear forward fp16: element [12, 34]"),
    ("gemm.exact:bmm", "mismatch", "bmm bf16: element [2, 66, 52]"),
    ("gemm.exact:nan", "mismatch", "bmm fp32: element [1, 2, 3] is nan"),
    ("gemm.exact:wrong_gradient", "mismatch", "Linear grad weight fp32: element [7, 9]"),
    ("gemm.exact:host", "mismatch", "the host's own integers are wrong"),
    ("gemm.exact:hangs", "hang", "no end after 2 s"),
    ("gemm.exact:leaks", "oom", "can't allocate memory"),
    ("gemm.crash:divides", "signal", "died of SIGFPE"),
    ("gemm.crash:segfaults", "signal", "died of SIGSEGV"),
    ("gemm.crash:matmul", "mismatch", "element [63, 95]"),
    ("gemm.crash:linear", "mismatch", "element [1, 18431]"),
    ("gemm.crash:own_shape", "exception", "not implemented for 'Half'"),
    ("gemm.accuracy:half_accumulation", "bound", "mm uniform fp16: element"),
    ("gemm.accuracy:tf32", "bound", "mm uniform fp32: element"),
    ("gemm.accuracy:inf", "nonfinite", "mm uniform fp16: element [5, 6] is inf"),
    ("gemm.accumulator:half_accumulation", "mismatch", "2048 + 255 x 1, 16 apart: element [0, 0] is 2048"),
    ("gemm.accumulator:ones", "mismatch", "2048 + 4095 x 1: element [0, 0] is 2048, should be 6144"),
    ("gemm.accumulator:element", "mismatch", "2048 + 4095 x 1: element [127, 0] is 6148"),
    ("tf32.mode:tf32", "mismatch", "TF32 is used, and not allowed: mm"),
    ("tf32.mode:conv", "mismatch", "TF32 is used, and not allowed: conv2d"),
    ("tf32.mode:lost", "mismatch", "1 + 2^-12 comes out as"),
    ("tf32.mode:nan", "nonfinite", "1 + 2^-12 comes out as [nan, 1.0002"),
    ("gemm.fp8:unscaled", "bound", "integer fp8: element"),
    ("gemm.fp8:edge", "bound", "integer fp8: element [47, 79]"),
    ("gemm.fp8:nan", "nonfinite", "integer fp8: element [0, 0] is nan"),
    ("attention.flash:attention_nan", "nonfinite", "random bf16 4x1x365x128: element [0, 364, 127] is nan"),
    ("attention.flash:stale", "bound", "causal"),
    ("attention.math:overflow", "nonfinite", "q=k=40 fp16"),
    ("attention.math:unmasked", "bound", "causal"),
    ("attention.math:half", "bound", "fp16"),
    ("attention.math:wrong_row", "bound", "element [0, 20,"),
    ("attention.flash:wrong_dtype", "mismatch", "fp16 4x1x128x64: output is (4, 1, 128, 64) torch.float32"),
    ("attention.flash:last_key", "bound", "output of needle bf16"),
    ("attention.flash:other_tile", "bound", "output of needle bf16"),
    ("attention.flash:rescaled", "bound", "output of needle fp16 1x1x365x128 on 1x365 keys: element"),
    ("attention.flash:hidden_tile", "nonfinite", "on 1x257 keys window padded: element"),
    ("attention.flash:strides", "bound", "causal heads inside: element"),
    ("attention.math:narrow", "bound", "output of needle fp32 2x2x257x80 on 2x65 keys"),
    ("attention.math:grouped", "bound", "output of needle fp32 2x4x127x64 on 2x127 keys"),
    ("attention.math:bottom", "bound", "output of needle fp32 2x2x63x160 on 2x191 keys causal"),
    ("attention.math:mask_row", "bound", "on 1x257 keys window"),
    ("attention.math:mask_head", "bound", "on 2x193 keys bias"),
    ("attention.math:grad_k_row", "bound", "grad k of random fp16 3x1x128x64: element [0, 20,"),
    ("attention.flash:grad_v_nan", "nonfinite", "grad v of random fp16 3x1x205x64: element [0, 7, 9] is nan"),
    ("attention.flash:stale_gradient", "bound", "grad q of random fp16 3x1x128x64 causal: element"),
    ("attention.math:one_of_group", "bound", "grad k of needle fp32 2x4x127x64 on 2x127 keys"),
    ("attention.flash:grad_q_narrow", "bound", "grad q of needle fp16 2x3x65x72 on 1x257 keys"),
    ("attention.cudnn:masked", "nonfinite", "grad q of scores -120 fp16 3x1x192x64 masked: element [0, 0, 0] is nan"),
    ("attention.cudnn:one_query", "nonfinite", "grad k of scores -120 fp16 3x1x128x64 one query: element"),
    ("attention.cudnn:exploding", "bound", "grad k of random fp16 3x1x128x64: element"),
    ("attention.cudnn:no_plan", "exception", "No valid execution plans built"),
    ("norm.torch:rounded", "bound", "y of layer_norm fp16 x fp32"),
    ("norm.torch:squares", "bound", "y of layer_norm fp16 x fp32"),
    ("norm.torch:norm_nan", "nonfinite", "y of layer_norm bf16 x fp32 8x1023: element [7, 1022] is nan"),
    ("norm.torch:wrong_dtype", "mismatch", "group_norm fp16 x fp32 2x32x32: the result is (2, 32, 32) torch.float32"),
    ("norm.torch:stale_norm", "bound", "y of layer_norm"),
    ("norm.torch:norm_gradient", "bound", "grad weight of layer_norm fp32 x fp32 8x256"),
    ("norm.torch:norm_refuses", "exception", "layer_norm fp32 x fp32 is refused: expected scalar type Float"),
    ("conv:element", "bound", "bf16 conv3d 1x32x5x18x20 filters 48x32x3x3x3 integer: element [47, 1799]"),
    ("conv:half_convolution", "bound", "fp16 conv2d 2x64x33x31 filters 48x64x3x3 uniform: element"),
    ("conv:nan", "nonfinite", "fp16 conv2d 1x32x35x37 filters 64x32x3x3 integer: element [63, 341] is nan"),
    ("conv:edge", "bound", "fp32 conv2d 2x64x33x31 filters 48x64x3x3 integer: element"),
    ("conv:tf32", "bound", "fp32 conv1d 2x45x211 filters 51x45x7 uniform: element"),
    ("conv:lost_image", "bound", "fp32 conv2d 3x64x17x15 filters 72x64x3x3 weight gradient: element"),
    ("conv:lost_row", "bound", "fp32 conv2d 2x16x13x15 filters 24x16x3x3 input gradient: element [0, 0, 12,"),
    ("conv:packed", "bound", "fp32 conv2d 3x24x9x11 filters 32x24x3x3 channels last output: element"),
    ("conv:other_group", "bound", "fp32 conv2d 2x24x11x9 filters 36x6x3x3 output: element"),
    ("conv:unturned", "bound", "fp32 conv2d 2x18x7x9 filters 18x14x4x4 transposed output: element"),
    ("conv:without_library", "exception", "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"),
    ("conv:sublibrary", "exception", "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"),
    ("compile.triton:miscompiled", "mismatch", "torch.compile forward: element [96]"),
    ("compile.triton:not_compiled", "mismatch", "torch.compile has compiled nothing"),
    ("compile.triton:ptxas", "exception", "RuntimeError: ptxas fatal   : Value 'sm_121a' is not defined"),
    ("compile.triton:bf16", "exception", "Feature '.bf16' requires .target sm_80"),
    ("burn:now_and_then", "mismatch", "cpu: later fp32 products differ in"),
    ("burn:nan", "mismatch", "cpu: the exact product has 1 wrong rows of 768, the first is 0"),
    ("burn:last_bit", "mismatch", "cpu: first fp64 product: element [9, 7] is"),
    ("burn:forgets", "mismatch", "cpu: later fp64 products differ in 1 words: element [5, 7] is"),
    ("memory:stuck_bit", "mismatch", "zeros: word 77 is 0x0000000000100000, should be 0x0000000000000000: drain"),
    (
        "memory:lonely_bit",
        "mismatch",
        "walking bit 7: word 77 is 0x0000000000000000, should be 0x0000000000100000: drain",
    ),
    ("memory:aliases", "mismatch", "addresses: word 0 is 0x"),
    ("train.step:noisy", "mismatch", "two runs in deterministic mode differ"),
    ("train.step:nan_late", "nonfinite", "the loss is not finite"),
    ("train.step:flat", "bound", "the loss does not fall"),
    ("env.libs:foreign", "mismatch", "libtorch_extra.so is not the file that torch-extra==1.0 recorded"),
]
RIGHT = [
    "init.alloc:right",
    "gemm.accuracy:half_by_default",
    "conv:fourier",
    "compile.triton:right",
    "burn:right",
    "memory:right",
    "attention.math:right",
    "attention.cudnn:right",
    "train.step:right",
    "norm.torch:right",
]
TRAITS = [
    ("attention.math:overflow", "needs_upcast", ["fp16"]),
    ("attention.math:overflow", "accumulates_in_half", {"fp16": [], "bf16": []}),
    ("attention.math:half", "accumulates_in_half", {"fp16": ["output"], "bf16": []}),
    ("attention.math:half", "needs_upcast", ["fp16"]),
    ("attention.math:right", "accumulates_in_half", {"fp16": [], "bf16": []}),
    ("attention.flash:attention_nan", "needs_upcast", ["bf16"]),
    ("norm.torch:norm_refuses", "refusal", "expected scalar type Float but found Half"),
    ("norm.torch:right", "needs_upcast", []),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    try:
        return seeding.kernels(tmp_path_factory.mktemp("seeds"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("seed", "failure", "words"), WRONG)
def test_a_wrong_kernel_is_caught_and_located(seeds: dict[str, Frame], seed: str, failure: str, words: str) -> None:
    frame = seeds[seed]
    assert (frame["status"], frame["failure"]) == ("failed", failure), frame
    assert words in frame["reason"], frame["reason"]
    assert frame["at"]


@pytest.mark.parametrize("seed", [seed for seed, _, _ in WRONG])
def test_a_wrong_kernel_is_named_with_its_advisory(seeds: dict[str, Frame], seed: str) -> None:
    from envbuild.plan import facts  # not above: WRONG is also read on machines with a GPU and without our dependencies

    result = {**seeds[seed], "probe": seed.partition(":")[0]}
    assert [advisory.id for advisory in facts.advisories() if advisory.matches(result)] == NAMED.get(seed, [])


@pytest.mark.parametrize("seed", RIGHT)
def test_a_right_kernel_written_another_way_passes(seeds: dict[str, Frame], seed: str) -> None:
    assert seeds[seed]["status"] == "passed", seeds[seed]["reason"]


@pytest.mark.parametrize(("seed", "trait", "value"), TRAITS)
def test_the_traits_say_more(seeds: dict[str, Frame], seed: str, trait: str, value: object) -> None:
    assert seeds[seed]["traits"][trait] == value


@pytest.mark.parametrize(("seed", "half"), [("half_by_default", True), ("tf32", False)])
def test_what_torchs_own_flags_give_is_told_and_not_judged(seeds: dict[str, Frame], seed: str, half: bool) -> None:
    traits = seeds[f"gemm.accuracy:{seed}"]["traits"]
    assert traits["flags"]["allow_fp16_reduced_precision_reduction"] is True
    told = traits["default flags"]["fp16"]
    assert (told["within"], told["ratio"] > 1) == (not half, half)
    assert traits["default flags"]["bf16"]["within"]


def test_no_seed_is_left_untested(seeds: dict[str, Frame]) -> None:
    assert {seed for seed, _, _ in WRONG} | set(RIGHT) == set(seeds)
