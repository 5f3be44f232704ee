"""Renders the page of a GPU's results, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envbuild.selftest.harness.probe_outcome_and_figures import checks
from gpu_plan.plan import Step
from gpu_plan.selftests import Run
from gpu_plan.steplog import Result

_CELL = 160  # characters


def page(title: str, machine: str, steps: Sequence[Step], results: Mapping[str, Result], sources: str) -> Iterator[str]:
    """Return the lines of the page. `title`: the GPU's name; `steps`: all steps; `results`: those of the started
    steps."""
    torch = {str(frame["torch"]) for result in results.values() for run in result.runs.values()
             for frame in run.frames if frame["kind"] == "start"}  # fmt: skip
    yield from (f"# GPU check: {title}", "")
    yield f"Machine: {machine}; torch {', '.join(sorted(torch)) or 'unknown'}. Made by `make gpu-check`."
    yield "These are results, not evidence for a profile: no image of envbuild's ran."
    yield from ("", "| step | block | verdict | s | what it does |", "|---|---|---|---|---|")
    for step in steps:
        result = results.get(step.name)
        verdict = result.verdict if result else "not run"
        if result and result.sources != sources:
            verdict += f" (with other sources: {result.sources})"
        seconds = f"{result.seconds:.1f}" if result else "-"
        yield f"| {step.name} | {step.block} | {verdict} | {seconds} | {step.about} |"
    yield ""
    for step in steps:
        if result := results.get(step.name):
            yield from _section(result)
    runs = {f"{name}": run for result in results.values() for name, run in result.runs.items() if _is_level(run)}
    yield from table(list(runs.values()))


def _is_level(run: Run) -> bool:
    """Whether the run is of a whole level. Only such runs are in the table of probes."""
    return run.name.startswith(("quick-", "standard-", "full", "hardware"))


def _section(result: Result) -> Iterator[str]:
    if not result.saw and not result.reason:
        return
    yield from (f"## {result.step}: {result.verdict}", "")
    if result.reason:
        yield f"- {result.verdict}: {' '.join(result.reason.split())}"
    yield from (f"- {line}" for line in result.saw)
    yield ""


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Return a table with the seconds of each probe in each run, and its largest error beyond rounding."""
    if not runs:
        return
    yield from ("## Probes", "")
    heads = " | ".join(f"{run.name}: s" for run in runs)
    yield f"| probe | {heads} | status | checks of all these runs |"
    yield "|---" * (len(runs) + 3) + "|"
    for probe in dict.fromkeys(probe for run in runs for probe in run.outcomes):
        frames = [run.outcomes.get(probe) for run in runs]
        present = [frame for frame in frames if frame]
        seconds = " | ".join(f"{frame['seconds']:.2f}" if frame else "-" for frame in frames)
        status = ", ".join(dict.fromkeys(frame["status"] for frame in present))
        reasons = [str(frame["reason"]) for frame in present if frame.get("reason")]
        detail = checks([figure for frame in present for figure in frame["figures"]]) or "-"
        detail = (reasons[0].splitlines() or ["-"])[0][:_CELL].replace("|", "/") if reasons else detail
        yield f"| {probe} | {seconds} | {status} | {detail} |"
