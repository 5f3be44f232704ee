from __future__ import annotations

import click

from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.util.errors import printable


@click.command("explain", short_help="Find the cause of a crash in its log.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--markdown", is_flag=True, help="Print Markdown, to paste into a bug report.")
@json_option
def command(files: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """Find the cause of a crash in a log. Print the cause, the log lines that show it, the confidence, the fix, and the
    command that proves the fix.

    Reads any mix of a traceback, the output of torchrun, NCCL, the kernel (Xid), a debugger and collect_env; - is
    standard input. Several files, or all files in a folder, are read as the logs of one run; gzip files are
    decompressed. Needs neither Docker nor a GPU. The exit code is 0 whether the cause is known or not, and 3 for empty
    input.

    Example: envbuild explain train.log
    """
    from envbuild.explain import cause_ranking, diagnosis_text, explanation_document, log_files_and_folders_reader
    from envbuild.profile import profile_and_lock_name_lookup

    log, notes = log_files_and_folders_reader.read_logs(files)
    found = cause_ranking.explain(log)
    profiles = profile_and_lock_name_lookup.profile_names()
    if as_json:
        emit(explanation_document.document(found, profiles, notes, files))
        return
    for line in (*notes, *(() if log.empty else diagnosis_text.render(log, found, profiles, markdown, files))):
        click.echo(printable(line))
