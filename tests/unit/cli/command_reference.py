"""docs/commands.md: every command with its options, from the commands themselves.

python -m unit.cli.command_reference        in tests/; writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from envbuild.cli.entry import COMMANDS, cli

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
_WIDTH = 100
_HEAD = """# Commands

Made by `python -m unit.cli.command_reference` in `tests/`; a test compares it with the commands.

## What all commands have in common

Results go to stdout, progress to stderr. `--json` gives one JSON document, also if the command fails
(`{"error": {"code", "kind", "message", "hint", "faults"}}`). If an option names a file, its folder is created, and that
is reported; `-` means stdout, for text only.

| exit code | meaning |
|---|---|
| 0 | done, also if a reader such as `head` closed stdout before its end |
| 1 | not done: stderr was closed by its reader |
| 2 | usage: the command line is wrong |
| 3 | a file cannot be read or is not valid: profile, lock, settings, log, a wrong hash; `audit` without torch |
| 4 | not proved here, or by no node of the cluster; `make` then builds only with `--allow-unproved`, and exits with 0 |
| 5 | a check failed: self-test, verify, or a tag moved by hand |
| 6 | engine, disk or build; not built; a program that is missing; a job that a scheduler refuses or does not finish |
| 7 | index, mirror, registry or a cluster's API server |
| 8 | out of date, or no lock: `--check`, `--locked`, `status` |
| 130 | interrupted |

`make`, `build`, `test`, `status`, `show` and `export` take several profiles; one that fails does not stop the others.
The exit code of `make`, `build`, `test` and `export` is then the first that occurred in this order: 130, 5, 6, 7, 3, 8,
2, 4.

`-v`, after any command, shows each process, request, written file and step on stderr; `-vv` also shows what
they returned. `ENVBUILD_LOG=FILE` adds all of it to a file. Secrets are masked. For a bug report, add `--debug` (for
tracebacks), and send the output of `envbuild --version --json` and the file that `envbuild doctor -o FILE` writes.

Shell completion, also of profiles' names: `eval "$(_ENVBUILD_COMPLETE=bash_source envbuild)"` (or `zsh_source`,
`fish_source`) in the shell's start-up file.
"""


def page() -> str:
    context = click.Context(
        cli, info_name="envbuild", help_option_names=["-h", "--help"], max_content_width=_WIDTH, terminal_width=_WIDTH
    )
    sections = [_HEAD.rstrip()]
    for title, group in COMMANDS.items():
        sections.append(f"## {title}")
        for name in group:
            command = cli.get_command(context, name)
            assert command is not None
            sections += _help(command, context, name)
    return "\n\n".join(sections) + "\n"


def _help(command: click.Command, parent: click.Context, name: str) -> Iterator[str]:
    """Yield the help of a command and of all its subcommands, each with its heading."""
    context = click.Context(command, info_name=name, parent=parent, max_content_width=_WIDTH, terminal_width=_WIDTH)
    yield f"### {context.command_path}"
    yield f"```text\n{command.get_help(context).rstrip()}\n```"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _help(found, context, below)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
