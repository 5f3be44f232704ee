"""Shared by the commands: options, the `--json` switch, results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from envbuild.util.errors import near, printable
from envbuild.util.runner_names import RUNNERS

if TYPE_CHECKING:  # importing the steps would import the engine's client, which `show` does not need
    from envbuild.cli.probe_result_display import Live
    from envbuild.facts.gpu_models import Gpu
    from envbuild.pipeline.progress_events import Event, Listener, Step
    from envbuild.testrun.run_result import ProbeResult

    _Choice = click.Choice[str]
else:  # this type does not exist in older releases of click
    _Choice = click.Choice

VERBOSITY = "envbuild.verbosity"  # in a click context's `meta`: how often -v was given
F = TypeVar("F", bound=Callable[..., Any])
_MOST = 64  # nodes of one job
_EXAMPLES = {"slurm": "partition=gpu", "kubernetes": "namespace=proofs"}


def profile_argument(argument: str, **attributes: Any) -> Callable[[F], F]:
    """A profile's name or path, or several; shells complete the names."""
    if attributes.get("nargs") == -1:
        attributes["metavar"] = "NAME..." if attributes.get("required") else "[NAME...]"
    return click.argument(argument, shell_complete=_profiles, **attributes)


def _profiles(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from envbuild.profile import profile_name_lookup  # not for --help

    paths = [CompletionItem(begun, type="file")] if "/" in begun or "." in begun else []
    return paths or [CompletionItem(name) for name in profile_name_lookup.profile_names() if name.startswith(begun)]


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def pin_option(function: F) -> F:
    return click.option(
        "--pin", "pins", multiple=True, metavar="NAME=VERSION", callback=_pins,
        help="Use this version as if the profile pinned it (cublas, nccl, torch, a package, ...); may be repeated.",
    )(function)  # fmt: skip


def requirements_option(function: F) -> F:
    return click.option(
        "--requirements", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Also lock what a project's requirements.txt or pyproject.toml names, under the profile's pins. The "
        "result is the profile NAME-FOLDER, after the project's folder.",
    )(function)  # fmt: skip


def accept_old_option(function: F) -> F:
    return click.option(
        "--accept-old", "accept_old", multiple=True, metavar="NAME",
        help="Lock this package even if its version is far behind the newest release; may be repeated.",
    )(function)  # fmt: skip


def torch_index_option(function: F) -> F:
    return click.option(
        "--torch-index", metavar="pytorch|ADDRESS", callback=_torch_index, expose_value=False,
        help="Also look for builds of torch such as +cpu in PyTorch's own index, or in a mirror of it.",
    )(function)  # fmt: skip


def _torch_index(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    from envbuild.fetch import index_config  # not for --help

    if value is not None:
        if value != index_config.PYTORCH and "://" not in value:
            raise click.BadParameter(f"{value!r} is neither {index_config.PYTORCH} nor a URL")
        os.environ[index_config.TORCH_INDEX] = value


def builder_option(function: F) -> F:
    return click.option(
        "--builder", metavar="BUILDER",
        help="The buildx builder (docker buildx ls) that compiles extensions, and builds images on a base image. "
        "Default: the engine's own.",
    )(function)  # fmt: skip


def gpus_option(function: F) -> F:
    return click.option(
        "--gpus", default=None, metavar="LIST", callback=_gpus,
        help="Use only these GPUs of the engine's machine: indices as in 1,2,3 or UUIDs (nvidia-smi -L). Default: all.",
    )(function)  # fmt: skip


def judged_gpus_option(function: F) -> F:
    """`gpus`: the models to judge an environment for; empty for this machine's."""
    return click.option(
        "--gpu", "gpus", multiple=True, metavar="MODEL", callback=_known_gpus,
        help="Judge for this GPU model, such as h20, instead of this machine's; may be repeated.",
    )(function)  # fmt: skip


class _Named(_Choice):
    """Checks an argument's value, and suggests a similar known name if the value is unknown."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if meant := near(str(value), self.choices):
                raise click.BadParameter(f"{error.message.rstrip('.')} ({meant})", ctx, param) from None
            raise


class _ClusterOption(click.Option):
    """An option that CommandWithClusterOptions lists in a separate group."""


class CommandWithClusterOptions(click.Command):
    """A command whose help lists the options of `on_options` as a separate group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "Cluster options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups["Cluster options" if isinstance(parameter, _ClusterOption) else "Options"].append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def on_options(function: F) -> F:
    """Add the options that choose a runner. The parameters are `on` (a runner's name or None), `given`, `resume`,
    `gpu`, `nodes` and `dry_run`."""
    cluster_option = partial(click.option, cls=_ClusterOption)
    for option in (
        cluster_option(
            "--dry-run", is_flag=True,
            help="Only show the script or the objects that would be submitted; with --json also the self-test.",
        ),
        cluster_option("--resume", metavar="JOB", help="Wait for a submitted job, given by its id or name."),
        cluster_option(
            "--nodes", default="1", metavar="N", callback=_nodes,
            help=f"Also run the probe dist.nodes in a separate job, with ranks on N nodes (1 to {_MOST}); needs "
            "--on slurm.",
        ),
        cluster_option(
            "--gpu", metavar="MODEL", callback=gpu_model, help="Run on this GPU model of the profile, such as h20."
        ),
        cluster_option(
            "--kubernetes", multiple=True, metavar="KEY=VALUE", callback=_given, expose_value=False,
            help="Override a site setting: context, namespace, registry, nodes.LABEL, queue, ...; may be repeated.",
        ),
        cluster_option(
            "--slurm", multiple=True, metavar="KEY=VALUE", callback=_given, expose_value=False,
            help="Override a site setting: partition, account, constraint, time, container, ...; may be repeated.",
        ),
        cluster_option("--on", type=_Named(RUNNERS), help="Where to run the self-test (default: site settings)."),
    ):  # fmt: skip
        function = option(function)
    return function


def _known_gpus(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[Gpu, ...]:
    if not names:
        return ()
    from envbuild.facts import database  # not for --help

    known = database.gpus()
    for name in (ids := gpu_model(context, parameter, names)):
        if name not in known:
            meant = near(name, known)
            raise click.BadParameter(f"{name!r} is not a known GPU{f' ({meant})' if meant else ''}")
    return tuple(known[name] for name in dict.fromkeys(ids))


def gpu_model(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return the ids of the GPU models that an option names; a name that the facts do not contain is returned
    unchanged."""
    if isinstance(value, tuple):
        return tuple(gpu_model(context, parameter, one) for one in value)
    if value is None:
        return None
    from envbuild.facts import gpu_names  # not for --help

    found = gpu_names.candidates(value)
    if len(found) > 1:
        raise click.BadParameter(f"{value!r} is the name of several GPUs: {', '.join(gpu.id for gpu in found)}")
    return found[0].id if found else value


def _nodes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    if value not in map(str, range(1, _MOST + 1)):
        raise click.BadParameter(f"{value!r} is not a number of nodes; write a number from 1 to {_MOST}")
    return int(value)


def _given(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> None:
    found = _pairs(values, "KEY=VALUE", _EXAMPLES[str(parameter.name)])
    if found and parameter.name:
        context.params.setdefault("given", {})[parameter.name] = found


# An index, or a UUID as nvidia-smi -L prints it; the last form is that of MIG slices with older drivers.
_GPU = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9a-f-]{36}|MIG-GPU-[0-9a-f-]{36}/[0-9]{1,3}/[0-9]{1,3}", re.IGNORECASE)


def _gpus(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(",")) if value is not None else ()
    for part in found:
        if not _GPU.fullmatch(part):
            raise click.BadParameter(f"{part!r} is not a GPU; write indices or UUIDs, such as 0,1 or GPU-<uuid>")
    if len(set(found)) < len(found):
        raise click.BadParameter("a GPU is listed twice")
    return found


def _pins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    return _pairs(values, "NAME=VERSION", "cublas=12.4.5.8")


def _pairs(values: tuple[str, ...], form: str, example: str) -> dict[str, str]:
    """Parse KEY=VALUE options. Raises BadParameter with all values of a different form."""
    found = [value.partition("=") for value in values]
    if wrong := [repr("".join(parts)) for parts in found if not (parts[0] and parts[2])]:
        raise click.BadParameter(f"{', '.join(wrong)}: write {form}, as in {example}")
    return {key: value for key, _, value in found}


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def emit(document: object) -> None:
    """Print a document of `--json`: a dataclass or a mapping."""
    from envbuild.facts.json_document_types import plain  # not for --help

    click.echo(json.dumps(plain(document), indent=2))


def listener() -> Listener:
    """Return the console; in a process that `make A B C` started, the pipe to that command."""
    from envbuild.pipeline import progress_events  # not for --help

    return progress_events.listener_of_parent() or Console()


class Console:
    """Shows events as lines on stderr: steps, and the probes of a self-test. In a terminal, the running step also shows
    its current activity.

    `results`: the probes' results are the command's output. Each is printed as a line on stdout as soon as its probe
    has ended; stderr gets only a live table, which disappears at the end, so that a log of both streams contains each
    probe once. `write`: receives each line instead of stderr; then there is no live display."""

    def __init__(
        self, results: bool = False, verbose: bool = False, write: Callable[[str], None] | None = None
    ) -> None:
        self._results, self._verbose = results, verbose
        self._write = write or partial(click.echo, err=True)
        self._shown = 0
        self._planned: tuple[str, ...] = ()
        self._ended: list[ProbeResult] = []
        self._live: Any = None
        self._probes: Live | None = None
        self._kept = not (results and sys.stdout.isatty())
        self._name = ""
        if write is None and sys.stderr.isatty():
            from rich.console import Console as Rich

            self._rich = Rich(stderr=True, highlight=False)
            self._live = self._rich.status("")
            self._write = self._print_above

    def __call__(self, event: Event) -> None:
        from envbuild.pipeline import progress_events as kinds  # not for --help

        match event:
            case kinds.StepBegan():
                self._begin(event.step)
            case kinds.Activity():
                self._show_activity(event.text)
            case kinds.Note():
                self.say(event.text)
            case kinds.OutputLine():
                self._write(printable(event.text))
            case kinds.ProbesPlanned():
                self._planned = event.names
                if live := self._probe_table():
                    live.plan(event.names)
            case kinds.ProbeEnded():
                self._show_probe(event.result)
            case kinds.StepEnded():
                self._end(event.step)
            case kinds.StepAborted():
                self._abort()

    def say(self, text: str) -> None:
        self._write(f"  {'':<13} {printable(text)}")

    def results(self, judged: Sequence[ProbeResult]) -> None:
        """Print every result of the run on stdout, except those that were printed when their probe ended."""
        for result in judged[self._shown :]:
            self._print_result(result)

    def _print_above(self, line: str) -> None:
        """Print a line above the live part of the terminal. The terminal wraps a long line."""
        from rich.text import Text

        self._rich.print(Text(line), soft_wrap=True)

    def _begin(self, step: str) -> None:
        self._name = step
        if self._live:
            self._show_live(step)
            self._live.start()

    def _show_activity(self, text: str) -> None:
        if self._live:
            self._show_live(f"{self._name}: {text[:500]}")

    def _show_live(self, text: str) -> None:
        """Show the current activity in one line after the spinner."""
        from rich.text import Text

        shown = Text(" ".join(printable(text).split()))
        shown.truncate(max(1, self._rich.width - len("* ")), overflow="ellipsis")
        self._live.update(shown)

    def _probe_table(self) -> Live | None:
        """Show a table of probes in a terminal, instead of the line with the current activity."""
        if self._live and not self._probes:
            from envbuild.cli import probe_result_display  # not for --help

            self._live.stop()
            self._probes = probe_result_display.Live(self._rich, self._kept)
        return self._probes

    def _show_probe(self, result: ProbeResult) -> None:
        from envbuild.cli import probe_result_display  # not for --help

        self._ended.append(result)
        if table := self._probe_table():
            table.add(result)
        elif self._results:
            self._print_result(result)
        else:
            self.say(probe_result_display.result_line(result))

    def _print_result(self, result: ProbeResult) -> None:
        from envbuild.cli.probe_result_display import result_lines

        self._shown += 1
        for text in result_lines(result, self._verbose):
            click.echo(printable(text))

    def _end(self, step: Step) -> None:
        self._give_back()
        self._planned, self._ended = (), []
        done = "up to date" if step.cached else f"{step.seconds:6.2f} s"
        self._write(f"  {step.name:<13} {done:>10}  {printable(step.note)}")

    def _abort(self) -> None:
        """Stop a step that failed. Before the error is printed, keep the finished part of its output, and name what was
        running."""
        self._give_back()
        if self._results:
            self.results(self._ended)
        running = self._planned[len(self._ended) :][:1]
        self._planned, self._ended = (), []
        for name in running:
            self.say(f"interrupted during {name}")

    def _give_back(self) -> None:
        """Stop the live display; then print the output of failed scripts, which does not fit into the table."""
        if self._live:
            self._live.stop()
        if self._probes:
            self._probes.stop()
            self._probes = None
        for result in () if self._results else self._ended:
            from envbuild.cli.probe_result_display import printed

            for text in printed(result) if result.status == "failed" else ():
                self.say(text)
