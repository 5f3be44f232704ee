"""The steps of the plan. Steps that yield the most information per second come first."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_plan import launch, locked_files, selftests
from gpu_plan.limits import descendants, is_running
from gpu_plan.plan import Bench, Step, StepFailed, StepSkipped, judge, last_line, reason, sources
from gpu_plan.selftests import ROOT, Run, program
from gpu_plan.steplog import FAILED, PASSED, SKIPPED

BUDGET = {"quick": 10, "standard": 60}  # seconds
FINGERPRINT = "fingerprint.json"
CLOCKS = "clocks.csv"
_WARM = 3  # number of contexts that are timed after the cold one
_BURN_SECONDS = 60
_SHARDS = 4  # number of self-tests between which the seeds are divided
_ALONE = ("burn", "memory", "init.alloc", "gemm.exact:leaks")  # probes, and a seed, that use all available memory
_SEED_BURN_SECONDS = 3
_HARDWARE = ("large", "perf.gemm", "perf.memory", "burn", "memory")
_LEAK_MB = 6000  # limit for a seed that leaks host memory, on the CPU
_HELD = 0.9  # fraction of the GPU's memory
_MEMORY_SLACK = 128  # MiB by which nvidia-smi's used memory may vary while no process uses the GPU
_BURNING_SECONDS = 5.0  # seconds between burn's first allocation of memory and the signal
_GONE_SECONDS = 10.0  # seconds within which the GPU must no longer list an ended process
_ROUNDED = ("gemm.accuracy", "norm.torch", "conv", "attention.math", "attention.flash", "attention.efficient",
            "attention.cudnn")  # fmt: skip
_ROUNDING_LEAST = 2  # minimum number of input sets for a meaningful result
_ROUNDING_SECONDS = 70.0  # after this time no further set is started, whatever the time limit of the step
_NO_IDENTITY = re.compile(r"serial|uuid|guid|\bpdi\b|part number|board id|chassis|inforom|image version|fabric", re.I)
# nvidia-smi's bits of clocks_event_reasons.active (nvml.h, nvmlClocksEventReasons)
_REASONS = {0x1: "idle", 0x2: "set clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
            0x20: "software thermal slowdown",
            0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}  # fmt: skip
_SAMPLED = ("timestamp", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu",
            "clocks_event_reasons.active")  # fmt: skip
_SUMMARY = re.compile(r"ERROR SUMMARY: ([0-9]+) error")
_OUT_OF_BOUNDS = re.compile(r"Invalid __global__ write")


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi; None if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], stdout=subprocess.PIPE, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def without_identity(text: str) -> str:
    """The output of nvidia-smi -q without the lines that identify this GPU, and without the list of processes."""
    lines = [line.rstrip() for line in text.partition("    Processes")[0].splitlines()]
    return "\n".join(line for line in lines if line and not _NO_IDENTITY.search(line.partition(":")[0]))


def machine(bench: Bench) -> None:
    if bench.gpu:
        printed = nvidia_smi("-q")
        if printed is None:
            raise StepFailed("nvidia-smi -q fails")
        bench.record("measured", nvidia_smi=without_identity(printed))
    laps = []
    for index in range(1 + _WARM):
        if not index:
            bench.saw(f"cold: {evict_libraries()} libraries of torch dropped from the page cache before")
        laps.append(json.loads(bench.output(program("gpu_plan.contexts", bench.device))))
        bench.record("measured", cold=not index, seconds=laps[-1])
    for name in laps[0]:
        warm = statistics.median(lap[name] for lap in laps[1:])
        bench.saw(f"{name}: {laps[0][name]:.2f} s cold, {warm:.2f} s warm (median of {_WARM})")


def evict_libraries() -> int:
    """Drop torch's shared libraries from the page cache, as after a reboot. Returns how many."""
    count = 0
    for name in ("torch", "nvidia", "triton"):
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in (path for path in Path(folder).rglob("*.so*") if path.is_file()):
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
                count += 1
    return count


def level(name: str) -> Callable[[Bench], None]:
    """Return a step that runs one level of the self-test, as a run with the step's name."""

    def step(bench: Bench) -> None:
        known = [result for result in bench.log.results().values() if result.sources == sources()]
        before = [run for result in known for run in result.runs.values()]
        (run,) = bench.run(bench.order(name, level=name.partition("-")[0]))
        note_level(bench, run)
        judge([run])
        differing = selftests.differences([*before, run])
        if differing:
            raise StepFailed(f"results that must repeat differ: {', '.join(differing)}")

    return step


def note_level(bench: Bench, run: Run) -> None:
    budget = BUDGET.get(run.name.partition("-")[0])
    counts = ", ".join(f"{len(run.with_status(status))} {status}" for status in (PASSED, FAILED, SKIPPED))
    bench.saw(f"{run.name}: {run.seconds:.1f} s{f' (budget {budget} s)' if budget else ''}; {counts}")
    slowest = sorted(run.outcomes.values(), key=lambda frame: float(frame["seconds"]), reverse=True)[:3]
    bench.saw("longest: " + ", ".join(f"{frame['probe']} {frame['seconds']:.1f} s" for frame in slowest))


def quick_cold(bench: Bench) -> None:
    bench.saw(f"{evict_libraries()} libraries of torch dropped from the page cache before")
    level("quick-cold")(bench)


def fp8(bench: Bench) -> None:
    if not bench.gpu:
        raise StepSkipped("needs a GPU")
    seen = [json.loads(line) for line in bench.output(program("gpu_plan.fp8_chains")).splitlines()]
    for measured in seen:
        bench.record("measured", **measured)
        bench.saw(chains(measured))
    if all("refused" in measured for measured in seen):
        raise StepSkipped("this GPU has no fp8 products")
    unexpected = sum(measured.get("unexpected", 0) for measured in seen)
    if unexpected:
        raise StepFailed(f"{unexpected} results are neither 0 nor the small product")


def chains(measured: dict[str, Any]) -> str:
    """Format a measurement of fp8_chains as a line."""
    head = f"to {measured['out']}, {'with' if measured['fast'] else 'without'} fast accumulation"
    if "refused" in measured:
        return f"{head}: {measured['refused']}"
    head = f"{'x'.join(map(str, measured['shape']))} {head}"
    bits = ", ".join(
        f"{'none' if kept is None else kept} in {which} instruction" for which, kept in measured["bits"].items()
    )
    if not measured["lost"]:
        return f"{head}: every product is kept; fraction bits kept: {bits}"
    if measured["interval"]:
        least, most = measured["interval"]
        chain = f"promoted after {least if least == most else f'{least} to {most}'} products"
    else:
        chain = f"not promoted within {measured['shape'][1] // 2} products"
    return f"{head}: {chain}; lost at {measured['lost'][:6]}; fraction bits kept: {bits}"


def fingerprint(bench: Bench) -> None:
    (run,) = bench.run(bench.order("fingerprint", probes=["fingerprint"]))
    judge([run])
    document = next((frame for frame in run.frames if frame["kind"] == "fingerprint"), None)
    if document is None:
        raise StepFailed("the probe passed, but its fingerprint is missing")
    found = {key: value for key, value in document.items() if key != "kind"}
    text = json.dumps(found, allow_nan=False, indent=1, sort_keys=True) + "\n"
    (bench.folder / FINGERPRINT).write_text(text, encoding="utf-8")
    bench.saw(f"{len(found['ops'])} operations, in {FINGERPRINT}")


def full(bench: Bench) -> None:
    (run,) = bench.run(bench.order("full", level="full", burn_seconds=_SEED_BURN_SECONDS))
    note_level(bench, run)
    judge([run])


def hardware(bench: Bench) -> None:
    with sampling(bench.folder / CLOCKS) if bench.gpu else contextlib.nullcontext():
        (run,) = bench.run(bench.order("hardware", level="full", probes=_HARDWARE, burn_seconds=_BURN_SECONDS))
    note_level(bench, run)
    if bench.gpu:
        for line in sampled((bench.folder / CLOCKS).read_text(encoding="utf-8")):
            bench.saw(line)
    judge([run])


@contextlib.contextmanager
def sampling(file: Path) -> Iterator[None]:
    """Have nvidia-smi write the GPU's clocks, power and temperature to a file twice a second."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SAMPLED)}", "--format=csv,noheader,nounits", "-lms", "500"]
    with file.open("wb") as out, subprocess.Popen(query, stdout=out) as process:
        try:
            yield
        finally:
            process.terminate()


def sampled(text: str) -> Iterator[str]:
    """Return the samples in a file of nvidia-smi. Raises StepFailed if the file has no samples."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(_SAMPLED)]
    if not rows:
        raise StepFailed(f"nvidia-smi wrote no samples of the clocks: {text[:200].strip()}")
    for column, unit in ((1, "MHz"), (2, "MHz"), (3, "W"), (4, "degrees C"), (5, "%")):
        values = sorted(float(row[column]) for row in rows if re.fullmatch(r"[0-9.]+", row[column]))
        if values:
            middle = values[len(values) // 2]
            yield f"{_SAMPLED[column]}: {values[0]:g} to {values[-1]:g} {unit}, median {middle:g} of {len(values)}"
    seen = 0
    for row in rows:
        seen |= int(row[6], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", row[6]) else 0
    yield "clocks were held by: " + (", ".join(name for bit, name in _REASONS.items() if seen & bit) or "nothing")


def rounding_errors(bench: Bench) -> None:
    worst: dict[str, float] = {}
    seed = 0
    longest, end = 0.0, time.monotonic() + _ROUNDING_SECONDS
    while seed < _ROUNDING_LEAST or (bench.seconds_left > 1.5 * longest and time.monotonic() < end):
        order = bench.order(f"inputs-{seed}", "gpu_plan.shifted_inputs", probes=_ROUNDED,
                            environment={selftests.INPUTS_VARIABLE: str(seed)})  # fmt: skip
        (run,) = bench.run(order)
        judge([run])
        for probe in run.with_status(PASSED):
            figures = run.outcomes[probe]["figures"]
            if not figures:
                raise StepFailed(f"no comparison of {probe} was measured")
            for figure in figures:
                name = f"{probe} {figure['dtype']}"
                worst[name] = max(worst.get(name, 0.0), float(figure["beyond_rounding"]))
        seed, longest = seed + 1, max(longest, run.seconds)
    bench.record("measured", seeds=seed, beyond_rounding=worst)
    for name, share in worst.items():
        bench.saw(f"{name}: largest error beyond rounding {share:.1%} of tolerance ({seed} sets of inputs)")


def seeds(bench: Bench) -> None:
    given = json.loads(bench.output(program("gpu_plan.seeds", str(bench.scratch / "seeds"))))
    wrong, right = given["wrong"], given["right"]
    alone = [seed for seed in (*wrong, *right) if {seed, seed.partition(":")[0]} & set(_ALONE)]
    rest = [seed for seed in (*wrong, *right) if seed not in alone]
    outcomes: dict[str, selftests.Frame] = {}
    for title, shards in (("side-by-side", [rest[index::_SHARDS] for index in range(_SHARDS)]), ("alone", [alone])):
        orders = [
            bench.order(f"{title}-{index}", "gpu_plan.seeds", probes=shard, threads=2, memory_mb=_LEAK_MB,
                        burn_seconds=_SEED_BURN_SECONDS,
                        timeouts={seed: 10 for seed in shard if seed.endswith(":hangs")},
                        environment=given["variables"])
            for index, shard in enumerate(shards)
        ]  # fmt: skip
        for run in bench.run(*orders):
            if run.problem:
                raise StepFailed(f"{run.name}: {run.problem}")
            outcomes.update(run.outcomes)
    missed, other, alarms = verdicts(wrong, right, outcomes)
    bench.saw(f"{len(wrong) - len(missed) - len(other)} of {len(wrong)} seeded faults caught as the fault they are, "
              f"{len(right) - len(alarms)} of {len(right)} right kernels passed")  # fmt: skip
    for title, found in (("not caught", missed), ("caught as another failure", other), ("alarm", alarms)):
        for line in found:
            bench.saw(f"{title}: {line}")
    if missed or other or alarms:
        raise StepFailed(
            f"{len(missed)} seeded faults not caught, {len(other)} caught as another, {len(alarms)} alarms"
        )


def verdicts(
    wrong: dict[str, str], right: list[str], outcomes: dict[str, selftests.Frame]
) -> tuple[list[str], list[str], list[str]]:
    """Return one line for each fault that was not detected or was detected as a different kind of failure, and for each
    right kernel that failed or was skipped."""

    def line(seed: str) -> str:
        frame = outcomes[seed]
        return f"{seed}: {frame['status']} {frame['failure'] or ''}: {str(frame['reason']).splitlines()[0][:120]}"

    missed = [line(seed) for seed in wrong if outcomes[seed]["status"] != FAILED]
    other = [line(seed) for seed, kind in wrong.items() if outcomes[seed]["failure"] not in (None, kind)]
    return missed, other, [line(seed) for seed in right if outcomes[seed]["status"] != PASSED]


def tf32_override(bench: Bench) -> None:
    if not bench.gpu:
        raise StepSkipped("needs a GPU")
    order = bench.order("override", probes=["tf32.mode"], environment={"NVIDIA_TF32_OVERRIDE": "1"})
    (run,) = bench.run(order)
    if run.problem:
        raise StepFailed(run.problem)
    if run.with_status(SKIPPED):
        raise StepSkipped(reason(run, "tf32.mode"))
    if not run.with_status(FAILED):
        raise StepFailed("tf32.mode passed though NVIDIA_TF32_OVERRIDE=1 forces TF32")
    bench.saw(f"tf32.mode failed, as it must: {reason(run, 'tf32.mode')}")


def memory_held(bench: Bench) -> None:
    command = program("gpu_plan.hold_memory", bench.device, str(_HELD))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=selftests.environment(), stdin=pipe, stdout=pipe) as holder:
        assert holder.stdin and holder.stdout
        held = holder.stdout.readline().strip()
        if not held:
            raise StepFailed(f"the process that holds the memory ended with exit status {holder.wait()}")
        bench.saw(f"{int(held) / 2**30:.1f} GiB held by another process")
        # A trial on the CPU shows that the step works: one probe is enough.
        (run,) = bench.run(bench.order("held", probes=None if bench.gpu else ["gemm.exact"]))
        holder.stdin.close()
    note_level(bench, run)
    judge([run])


def two_at_once(bench: Bench) -> None:
    runs = bench.run(bench.order("first"), bench.order("second"))
    for run in runs:
        note_level(bench, run)
    judge(runs)


def sigterm(bench: Bench) -> None:
    before = memory_in_use() if bench.gpu else 0
    order = bench.order("sigterm", probes=["burn"], level="full", burn_seconds=_BURN_SECONDS)
    with selftests.start(order, bench.scratch / "sigterm.stderr") as process:
        assert process.stdout is not None
        while process.poll() is None and not under_way(bench, process.pid, before):
            time.sleep(0.1)
        time.sleep(_BURNING_SECONDS if bench.gpu else 0)
        children = descendants(process.pid)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        status = process.wait()
    bench.saw(f"exit status {status} {time.monotonic() - begin:.2f} s after SIGTERM, with {len(children)} processes")
    if not children:
        raise StepFailed("burn had ended before the signal")
    if status != 128 + signal.SIGTERM:
        raise StepFailed(f"exit status {status} after SIGTERM, should be {128 + signal.SIGTERM}")
    until = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < until:
        left = [pid for pid in children if is_running(pid)]
        after = memory_in_use() if bench.gpu else 0
        if not left and after <= before + _MEMORY_SLACK:
            bench.saw(f"no process left; MiB of the GPU in use: {before} before, {after} after")
            return
        time.sleep(0.2)
    raise StepFailed(
        f"{_GONE_SECONDS:g} s later {len(left)} processes are left; MiB in use: {before} before, {after} now"
    )


def under_way(bench: Bench, pid: int, before: int) -> bool:
    """Whether the self-test has started its probe; on a GPU, whether the probe has allocated more than 1 GiB of GPU
    memory."""
    return memory_in_use() > before + 1024 if bench.gpu else bool(descendants(pid))


def memory_in_use() -> int:
    """Return the used memory of the first GPU in MiB, from nvidia-smi. Raises StepFailed if nvidia-smi does not report
    it."""
    printed = nvidia_smi("--query-gpu=memory.used", "--format=csv,noheader,nounits") or ""
    first = printed.partition("\n")[0].strip()
    if not first.isdigit():
        raise StepFailed(f"nvidia-smi does not say how much memory is in use: {first!r}")
    return int(first)


def sanitizer(bench: Bench) -> None:
    if not shutil.which("compute-sanitizer"):
        raise StepSkipped("compute-sanitizer is not on PATH")
    log = bench.scratch / "control.txt"
    (control,) = bench.run(bench.order("control", "gpu_plan.out_of_bounds", before=under_sanitizer(log),
                                       environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))  # fmt: skip
    text = sanitized(log)
    if not _OUT_OF_BOUNDS.search(text) or not errors_in(text):
        raise StepFailed(f"the kernel that writes out of bounds was not reported: {text[-400:]} {control.problem}")
    bench.saw("control: a Triton kernel that writes out of bounds is reported")
    log = bench.scratch / "quick.txt"
    (run,) = bench.run(bench.order("sanitized", before=under_sanitizer(log),
                                   environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))  # fmt: skip
    text = sanitized(log)
    errors = errors_in(text)
    note_level(bench, run)
    bench.saw("no error in the quick probes" if errors == 0 else f"errors in the quick probes: {errors}")
    if errors is None:
        raise StepFailed("compute-sanitizer wrote no summary")
    if errors:
        raise StepFailed(f"compute-sanitizer reports {errors} errors: {text[:1500]}")
    judge([run])


def under_sanitizer(log: Path) -> list[str]:
    """Run with torch's memory cache disabled, so that each tensor has its own allocation: the sanitizer does not check
    bounds within a cached block."""
    return ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
            "--print-limit", "20", "--log-file", str(log)]  # fmt: skip


def sanitized(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def errors_in(text: str) -> int | None:
    """The number of errors in compute-sanitizer's summaries; None without a summary."""
    found = _SUMMARY.findall(text)
    return sum(map(int, found)) if found else None


def libraries(bench: Bench) -> None:
    expected = locked_files.read()
    bench.saw(f"compared with the lock of {expected['profile']}, {expected['lock'][:19]}")
    if expected["missing"]:
        bench.saw(f"not known of these wheels: {', '.join(expected['missing'])}")
    same = 0
    for found in locked_files.compare(expected):
        bench.record("measured", wheel=found.wheel, installed=found.installed, same=found.same,
                     different=found.different, missing=found.missing)  # fmt: skip
        bench.saw(str(found))
        same += found.same
    if not same:
        raise StepFailed("no library of this machine is one of the lock's")


def commands(bench: Bench) -> None:
    if not (bench.wheels / "requirements.txt").exists():
        raise StepSkipped(f"no wheels in {bench.wheels.name}: make gpu-wheels fills it, and the call carries it")
    python = install(bench.wheels, bench.scratch / "venv")
    profile = profile_of(bench.gpu)
    others = other_fingerprints(bench.folder)
    check, own = bench.scratch / "check.py", bench.folder / FINGERPRINT
    envbuild = [str(python), "-m", "envbuild"]
    wanted: list[tuple[list[str], tuple[int, ...]]] = [
        ([*envbuild, "doctor"], (0, 5)),  # 5: a check failed, for example Docker is missing
        ([*envbuild, "export", "check", profile, "-o", str(check)], (0,)),
        ([sys.executable, str(check)], (0, 5)),  # 5: these are not the locked versions
    ]
    if launch.VARIABLE in os.environ:
        bench.saw(
            f"`envbuild test --python` is left out: its interpreter does not call the function of {launch.VARIABLE}"
        )
    else:
        wanted.append(([*envbuild, "test", profile, "--python", sys.executable, "--level", "quick", "--json"], (0, 5)))
    if others and own.exists():
        wanted.append(([*envbuild, "diff", str(own), str(others[0])], (0,)))
    else:
        bench.saw("no fingerprint to compare with")
    faults = []
    for command, statuses in wanted:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False,
                              stdin=subprocess.DEVNULL)  # fmt: skip
        name = " ".join(Path(part).name if part.startswith("/") else part for part in command)
        bench.record("measured", command=name, status=done.returncode, stdout=done.stdout[-20000:],
                     stderr=done.stderr[-20000:])  # fmt: skip
        bench.saw(f"`{name}`: exit status {done.returncode}, last line: {last_line(done)[:160]}")
        if done.returncode not in statuses or "Traceback (most recent call last)" in done.stderr:
            faults.append(f"{name} ended with exit status {done.returncode}")
        if "--json" in command and not re.search(r'"passed": [1-9]', done.stdout):
            faults.append(f"{name}: no probe passed")
    if faults:
        raise StepFailed("; ".join(faults))


def other_fingerprints(folder: Path, committed: Path = ROOT / "benchmarks" / "results" / "gpu") -> list[Path]:
    """Return the fingerprints of other GPUs: those in folders next to this GPU's folder, and committed ones."""
    found = [file for results in (folder.parent, committed) for file in sorted(results.glob(f"*/{FINGERPRINT}"))]
    return [file for file in found if file.parent.name != folder.name]


def install(wheels: Path, folder: Path) -> Path:
    """Install envbuild and its locked dependencies from the wheels into a virtual environment; returns its Python.

    Torch is not installed in it: the commands examine the interpreter that has torch. Variables such as PYTHONPATH are
    removed, so that it does not import packages of this checkout.
    """
    base = [sys.executable, "-m"]
    pip = [*base, "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-index", "--no-compile",
           "--find-links", str(wheels)]  # fmt: skip
    for command in (
        [*base, "venv", "--without-pip", str(folder)],
        [*pip, "--require-hashes", "-r", str(wheels / "requirements.txt")],
        [*pip, "--no-deps", "envbuild"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise StepFailed(f"{command[2]} ended with exit status {done.returncode}: {last_line(done)}")
    return folder / "bin" / "python"


def profile_of(gpu: str | None) -> str:
    """The shipped profile whose name is a word of the GPU's name ("NVIDIA H200": h200); cpu if there is no such
    profile."""
    words = (gpu or "").lower().replace("-", " ").split()
    return next((word for word in words if (ROOT / "profiles" / f"{word}.yaml").exists()), "cpu")


def apex(bench: Bench) -> None:
    if not (bench.apex / "setup.py").exists():
        raise StepSkipped(f"no source of apex in {bench.apex.name}")
    source = bench.scratch / "apex"
    shutil.copytree(bench.apex, source, ignore=shutil.ignore_patterns(".git"))
    capability = (nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") or "").partition("\n")[0].strip()
    variables = {"MAX_JOBS": str(os.cpu_count()), "TORCH_CUDA_ARCH_LIST": capability or "9.0"}
    begin = time.monotonic()
    bench.output(program("gpu_plan.apex_build", str(source)), variables)
    bench.saw(f"compiled for {variables['TORCH_CUDA_ARCH_LIST']} in {time.monotonic() - begin:.0f} s "
              f"with {variables['MAX_JOBS']} jobs")  # fmt: skip
    (run,) = bench.run(bench.order("apex", level="standard", probes=["norm.apex", "optim.apex"],
                                   environment={"PYTHONPATH": str(source)}))  # fmt: skip
    note_level(bench, run)
    judge([run])
    if run.with_status(SKIPPED):
        raise StepFailed("; ".join(f"{probe} was skipped: {reason(run, probe)}" for probe in run.with_status(SKIPPED)))


STEPS = (
    Step("machine", 1, 60, "nvidia-smi -q; seconds of a CUDA context, cold and warm", machine),
    Step("quick-cold", 1, 60, "level quick, torch's libraries not in the page cache", quick_cold),
    Step("quick-warm", 1, 60, "level quick again", level("quick-warm")),
    Step("fp8-chains", 1, 30, "how many fp8 products are added up before a float32 sum takes them", fp8),
    Step("standard-1", 1, 120, "level standard", level("standard-1")),
    Step("standard-2", 1, 120, "level standard again: what must repeat", level("standard-2")),
    Step("fingerprint", 1, 30, "numbers for `envbuild diff`", fingerprint),
    Step("libraries", 1, 60, f"which libraries are those of the lock of {locked_files.PROFILE}", libraries),
    Step(
        "hardware",
        2,
        130,
        f"burn {_BURN_SECONDS} s, memory and speed at level full, clocks sampled",
        hardware,
    ),
    Step("rounding", 2, 80, "largest errors beyond the one correct rounding, over several inputs", rounding_errors),
    Step("seeds", 2, 150, "seeded faults on the device", seeds),
    Step("tf32-override", 2, 30, "NVIDIA_TF32_OVERRIDE=1: tf32.mode must fail", tf32_override),
    Step("full", 2, 250, "level full with a short burn", full),
    Step("memory-held", 3, 70, f"level quick, {_HELD:.0%} of the memory held by another process", memory_held),
    Step("two-at-once", 3, 90, "level quick twice at once", two_at_once),
    Step("sigterm", 3, 60, "SIGTERM during burn: exit status, and what is left", sigterm),
    Step("sanitizer", 3, 130, "compute-sanitizer over level quick, with a kernel out of bounds as control", sanitizer),
    Step("commands", 3, 100, "doctor, test --python, export check and compare, with carried wheels", commands),
    Step("apex", 3, 330, "apex's norms and optimiser, compiled here from carried source", apex),
)
