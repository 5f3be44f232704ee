import datetime
from pathlib import Path

import click

from envbuild.attest import image_verifier, policy
from envbuild.attest.image_verifier import Envelopes, Verdict
from envbuild.attest.policy import Policy
from envbuild.cli.command_options import gpu_model, json_option
from envbuild.cli.console import Console, emit
from envbuild.facts import probe_catalogue_reader
from envbuild.registry.oci_types import Reference
from envbuild.util.errors import UsageError, printable
from envbuild.util.untrusted_input_errors import Refusal

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("verify", short_help="Check an image in a registry by its signed evidence.")
@click.argument("ref", required=False)
@click.option(
    "--key",
    type=_FILE,
    metavar="PUB",
    help="The public key that must have signed the evidence; default: the keys of --policy, "
    "else the setting public_key.",
)
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="MODEL",
    callback=gpu_model,
    help='The GPU model that the image will run on, such as "NVIDIA H20" or h20; may be repeated.',
)
@click.option("--driver", metavar="VERSION", help="The version of the NVIDIA driver that the image will run with.")
@click.option("--max-age", metavar="AGE", help="The largest age of the proof: 90d, 12h.")
@click.option(
    "--level",
    type=click.Choice(probe_catalogue_reader.LEVELS),
    help="The lowest level of the self-test that is accepted.",
)
@click.option("--profile", metavar="NAME", help="The profile that the image must be built from.")
@click.option("--lock", metavar="ID", help="The id of the image's lock, at least its first 12 digits.")
@click.option(
    "--from",
    "copies",
    multiple=True,
    metavar="REGISTRY/NAME",
    help="Also accept a copy of an image that was first pushed to this repository; may be repeated.",
)
@click.option("--base", metavar="REGISTRY/NAME", help="For a child image: the proved image that it is built on.")
@click.option(
    "--policy",
    "policy_file",
    type=_FILE,
    metavar="FILE",
    help="Read these requirements from a file; options take precedence.",
)
@click.option(
    "--evidence", "files", multiple=True, type=_FILE, metavar="FILE", help="Check the signed statement in this file."
)
@click.option(
    "--python",
    metavar="PATH",
    help="Check this interpreter or environment of this machine instead, by the evidence that push --python published "
    "at REF, or by --evidence.",
)
@click.option(
    "--rebuild",
    is_flag=True,
    help="Also make the image again from its lock, and compare the two. Needs an engine only for compiled extensions.",
)
@json_option
def command(
    ref: str | None,
    key: Path | None,
    gpus: tuple[str, ...],
    driver: str | None,
    max_age: str | None,
    level: str | None,
    profile: str | None,
    lock: str | None,
    copies: tuple[str, ...],
    base: str | None,
    policy_file: Path | None,
    files: tuple[Path, ...],
    python: str | None,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Check an image's evidence before it is used: signature, digest, repository, profile, lock, probes, GPU, driver,
    age, known faults.

    For images in this machine's engine, use status. Contacts only the registry, and needs no Docker Engine. Without
    --key, the keys of --policy are trusted, else the key that the setting public_key names. Without any key, the signer
    cannot be checked: exit 5. That no key is given, or that a key file is missing or invalid, is reported before the
    registry is contacted. If the image is verified, its digest is printed on stdout; otherwise exit 5 lists every
    reason. Without REF, only the statements of --evidence are checked. With --python, the files of an environment are
    compared with these statements, and with those that push --python published at REF; the digest of the files is
    printed.
    Example: envbuild verify registry.example/h20:verified --key team.pub
    Example: envbuild verify registry.example/h20 --python .venv --key team.pub
    """
    if python and (base or copies or rebuild):
        raise UsageError("--python checks an environment: leave out --base, --from and --rebuild")
    if python and not files and ref is None:
        raise UsageError(
            "name the evidence: REF, or the signed statement",
            hint="envbuild verify REGISTRY/NAME --python PATH --key PUB; or: envbuild verify --python PATH "
            "--evidence FILE --key PUB",
        )
    if ref is None and not files:
        raise UsageError("name an image, or files with --evidence", hint="envbuild verify REF --key PUB")
    if rebuild and ref is None:
        raise UsageError("--rebuild needs an image to compare with", hint="envbuild verify REF --key PUB --rebuild")
    given = {"gpus": list(gpus), "driver": driver, "max_age": max_age, "level": level, "base": base,
             "profile": profile, "lock": lock, "from": list(copies)}  # fmt: skip
    active_policy = policy.read(policy_file, given, key)
    reference = Reference.parse(ref) if ref else None
    now = datetime.datetime.now(datetime.UTC)
    try:
        envelopes = [image_verifier.read_file(file) for file in files]
    except Refusal as refusal:
        Verdict(ref, reasons=[refusal.reason]).require()
        raise
    if python:
        done = _environment(python, reference, envelopes, active_policy, now)
    elif reference:
        done = image_verifier.verify_image(reference, active_policy, envelopes, now)
    else:
        done = image_verifier.verify_statement(envelopes, active_policy, now)
    if rebuild and done.build:  # also if there are other reasons, so that all are reported
        from envbuild.pipeline.rebuild_comparison import rebuild_objections

        done.reasons += rebuild_objections(done, Console())
    done.require()
    if as_json:
        emit(done.document())
    else:
        click.echo(done.environment or done.digest or done.image_id)
        click.echo(printable(done.summary), err=True)
        if done.unconfined:
            click.echo(printable(f"tested less confined than in Docker: {'; '.join(done.unconfined)}"), err=True)


def _environment(
    python: str, reference: Reference | None, envelopes: Envelopes, active_policy: Policy, now: datetime.datetime
) -> Verdict:
    from envbuild.audit import environment_file_hasher
    from envbuild.runners import host_runner

    interpreter = host_runner.find_interpreter(python)
    done = image_verifier.verify_environment(
        environment_file_hasher.hash_environment(interpreter), envelopes, active_policy, now, reference
    )
    done.ref = str(interpreter)
    return done
