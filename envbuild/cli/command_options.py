"""Options and arguments that several commands share, and the checks of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from envbuild.util.errors import near
from envbuild.util.runner_names import RUNNERS

if TYPE_CHECKING:  # importing the facts takes time, which --help does not need
    from envbuild.facts.gpu_fact_types import Gpu

    _Choice = click.Choice[str]
else:  # this type does not exist in older releases of click
    _Choice = click.Choice

F = TypeVar("F", bound=Callable[..., Any])
_MOST = 64  # maximum number of nodes in one job
_EXAMPLES = {"slurm": "partition=gpu", "kubernetes": "namespace=proofs"}


def profile_argument(argument: str, **attributes: Any) -> Callable[[F], F]:
    """Add an argument that takes the name or path of a profile, or of several profiles. Shells complete the names."""
    if attributes.get("nargs") == -1:
        attributes["metavar"] = "NAME..." if attributes.get("required") else "[NAME...]"
    return click.argument(argument, shell_complete=_profiles, **attributes)


def _profiles(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from envbuild.profile import profile_and_lock_name_lookup  # not for --help

    paths = [CompletionItem(begun, type="file")] if "/" in begun or "." in begun else []
    return paths or [
        CompletionItem(name) for name in profile_and_lock_name_lookup.profile_names() if name.startswith(begun)
    ]


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(function)


def pin_option(function: F) -> F:
    return click.option(
        "--pin", "pins", multiple=True, metavar="NAME=VERSION", callback=_pins,
        help="Use this version as if the profile pinned it (cublas, nccl, torch, a package, ...); may be repeated.",
    )(function)  # fmt: skip


def _one_file(context: click.Context, parameter: click.Parameter, files: tuple[Path, ...]) -> Path | None:
    """Return the only file; click itself would use the last one of several."""
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise click.BadParameter(f"give one file, not {names}: a requirements.txt can include others, as in -r dev.txt")
    return files[0] if files else None


def requirements_option(function: F) -> F:
    return click.option(
        "--requirements", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", multiple=True,
        callback=_one_file,
        help="Also lock the packages in FILE: requirements.txt, pyproject.toml, uv.lock, pylock.toml, "
        "environment.yml, setup.py or a shell script (.sh). The profile's pins still apply. The result is a profile "
        "NAME-FOLDER, named after the project's folder.",
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
    if value is None:
        return
    from envbuild.fetch import index_config  # imports the client of indexes

    if value != index_config.PYTORCH and "://" not in value:
        raise click.BadParameter(f"{value!r} is neither {index_config.PYTORCH} nor a URL")
    os.environ[index_config.TORCH_INDEX] = value


def builder_option(function: F) -> F:
    return click.option(
        "--builder", metavar="BUILDER",
        help="The buildx builder (docker buildx ls) that compiles extensions. Default: the engine's own.",
    )(function)  # fmt: skip


def gpus_option(function: F) -> F:
    return click.option(
        "--gpus", default=None, metavar="LIST", callback=_gpus,
        help="Use only these GPUs of the engine's machine: indices as in 1,2,3 or UUIDs (nvidia-smi -L). Default: all.",
    )(function)  # fmt: skip


def judged_gpus_option(function: F) -> F:
    """Add --gpu as the parameter `gpus`: the GPU models to judge an environment for. Empty: those of this machine."""
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
    """Add the options that choose a runner. The command receives them as `on` (a runner's name or None), `given` (the
    settings of --slurm and --kubernetes; only if there are any), `resume`, `gpu`, `nodes` and `dry_run`."""
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
            help="Override a site setting: context, namespace, registry, nodes.LABEL (its value on the nodes to use), "
            "queue (minutes to wait for a node), ...; may be repeated.",
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
    """Return the id of the GPU model that an option names, or a tuple of ids for several names. A name that the facts
    do not contain is returned unchanged."""
    if isinstance(value, tuple):
        return tuple(gpu_model(context, parameter, one) for one in value)
    if value is None:
        return None
    from envbuild.facts import gpu_name_lookup  # not for --help

    found = gpu_name_lookup.candidates(value)
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
_GPU = r"[0-9]{1,4}|(GPU|MIG)-[0-9a-f-]{36}|MIG-GPU-[0-9a-f-]{36}/[0-9]{1,3}/[0-9]{1,3}"


def _gpus(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(",")) if value is not None else ()
    for part in found:
        if not re.fullmatch(_GPU, part, re.IGNORECASE):
            raise click.BadParameter(f"{part!r} is not a GPU; write indices or UUIDs, such as 0,1 or GPU-<uuid>")
    if len(set(found)) < len(found):
        raise click.BadParameter("a GPU is listed twice")
    return found


def _pins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    return _pairs(values, "NAME=VERSION", "cublas=12.4.5.8")


def _pairs(values: tuple[str, ...], form: str, example: str) -> dict[str, str]:
    """Parse options of the form KEY=VALUE. Raises BadParameter, which lists all values of a different form."""
    found = [value.partition("=") for value in values]
    if wrong := [repr("".join(parts)) for parts in found if not (parts[0] and parts[2])]:
        raise click.BadParameter(f"{', '.join(wrong)}: write {form}, as in {example}")
    return {key: value for key, _, value in found}
