"""The measurements of benchmarks/gpu_plan, on emulated tensor cores and wrong kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu_plan import fp8_chains, selftests  # noqa: E402

from selftest import tensor_cores, torch_fork_server  # noqa: E402

SHAPE = (64, 1024, 4)


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no fp8")
@pytest.mark.parametrize(
    ("core", "promoted", "interval", "bits"),
    [
        (tensor_cores.FP8_CORES["Hopper"], 128, [114, 129], 13),
        (tensor_cores.FP8_CORES["Hopper"], 64, [50, 65], 13),
        (tensor_cores.FP8_CORES["Ada"], 256, [242, 257], 13),
        (tensor_cores.FP8_CORES["Hopper"], None, None, 13),
        (tensor_cores.HALF_ACCUMULATOR, 128, [114, 129], 10),
    ],
)
def test_the_interval_of_promotion_is_read_off_the_products(
    core: tensor_cores.Core, promoted: int | None, interval: list[int] | None, bits: int
) -> None:
    """Places tried are 16 apart, from 1 on."""
    found = fp8_chains.measure(lambda a, b: tensor_cores.multiply(a, b, core, promoted), SHAPE)
    assert (found["interval"], found["bits"], found["unexpected"]) == (interval, {"same": bits, "another": bits}, 0)
    assert found["lost"][0] == [1, (promoted or 1024) - 15]


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="this torch has no fp8")
def test_sums_of_many_bits_lose_nothing_and_wrong_ones_are_named() -> None:
    right = fp8_chains.measure(lambda a, b: a.float() @ b.float(), SHAPE)
    assert right["lost"] == [] and right["interval"] is None
    assert fp8_chains.measure(lambda a, b: 3 * (a.float() @ b.float()), SHAPE)["unexpected"] == 64


@pytest.mark.slow
def test_other_inputs_are_other_inputs() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
        "from gpu_plan import shifted_inputs; from envbuild.selftest.numerics import hashed_inputs; "
        "print(hashed_inputs.uniform((4,), 1).tolist())"
    )
    runs = [
        torch_fork_server.run(
            "selftest.torch_fork_server:execute", [code], selftests.environment({selftests.INPUTS_VARIABLE: seed})
        )
        for seed in "01"
    ]
    assert [run.returncode for run in runs] == [0, 0], runs
    printed = [run.stdout for run in runs]
    from envbuild.selftest.numerics import hashed_inputs

    assert printed[0] != printed[1] and printed[0].strip() == str(hashed_inputs.uniform((4,), 1).tolist())


def test_a_pretended_gpu_comes_before_the_module(tmp_path: Path) -> None:
    (tmp_path / "played.py").write_text("def begin(): print('played')\n")
    (tmp_path / "module.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    variables = {"PYTHONPATH": str(tmp_path), "GPU_CHECK_FIRST": "played:begin"}
    command = selftests.program("module", "one")
    done = subprocess.run(command, env=selftests.environment(variables), stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "played\n__main__ ['one']\n"


@pytest.mark.slow
def test_steps_run_from_start_to_end_on_the_cpu(tmp_path: Path) -> None:
    """The steps run the real self-test: while another process holds memory, and with an interruption. The second time,
    no step that passed runs again."""
    program = Path(selftests.ROOT, "benchmarks", "gpu_check.py")
    options = [
        "--cpu",
        "--patience",
        "10",
        "--out",
        str(tmp_path),
        "--steps",
        "memory-held",
        "sigterm",
        "tf32-override",
    ]
    printed = []
    for _ in range(2):
        done = subprocess.run([sys.executable, str(program), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stderr)
    assert "held: gemm.exact passed" in printed[0] and "exit status 143" in printed[0]
    assert printed[1].count("already passed") == 2 and "gemm.exact" not in printed[1]
    assert sorted(file.name for file in (tmp_path / "cpu").iterdir()) == ["block-2.jsonl", "block-3.jsonl", "page.md"]
    page = (tmp_path / "cpu" / "page.md").read_text()
    assert "| sigterm | 3 | passed |" in page and "- skipped: needs a GPU" in page
