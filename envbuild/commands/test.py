from typing import Any

import click

from envbuild import pipeline
from envbuild.commands.console import Console, emit, json_option
from envbuild.errors import CheckFailed, NotProved
from envbuild.steps import Made


@click.command("test", short_help="Run the self-test in an image and report.")
@click.argument("name")
@click.option("--image", "reference", metavar="REF", help="Another image of the engine, by tag or digest.")
@json_option
def command(name: str, reference: str | None, as_json: bool) -> None:
    """Run the self-test in the image of a profile and report; moves no tag, writes no evidence.

    Example: envbuild test cpu --image myproject:latest
    """
    made = pipeline.test(name, reference, Console())
    if not as_json and made.run:
        for result in made.run.results:
            click.echo(line(result))
    try:
        pipeline.require_passed(made)
    except (CheckFailed, NotProved) as error:
        error.partial = document(made)
        raise
    if as_json:
        emit(document(made))


def document(made: Made) -> dict[str, Any]:
    """The self-test's summary and every probe's figures."""
    assert made.run is not None
    probes = [{key: value for key, value in result.items() if key != "detail"} for result in made.run.results]
    return {**made.run.summary(), "probes": probes}


def line(result: Any) -> str:
    """One probe for a reader: its worst figure, or why it failed or was skipped."""
    ratios = [f["ratio"] for f in result["figures"] if isinstance(f.get("ratio"), int | float)]
    text = result["reason"] or (
        f"{len(ratios)} figures, error at most {max(ratios):.3g} of its bound" if ratios else ""
    )
    return f"{result['status']:<8} {result['probe']:<20} {result['seconds']:6.2f} s  {text}"
