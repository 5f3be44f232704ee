"""Derives a probe's outcome from how its process ended. All functions are pure, so tests can cover every ending."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

from envbuild.selftest.harness import script_tracebacks
from envbuild.selftest.harness.frame_and_message_streams import ANNOUNCE, DOCUMENTS, NOTE, RESULT
from envbuild.selftest.harness.probe_outcome_and_figures import DETAIL_LIMIT, FAILED, Outcome, is_cut, signal_name, tail
from envbuild.selftest.harness.probe_supervisor import ProbeEnding


def judge_ending(ending: ProbeEnding, timeout: float) -> Outcome:
    """Return the outcome of a probe.

    The result that the probe sent counts only if it is complete, the only one, and the process exited with status 0.
    """
    if ending.status is None:
        return _failed(ending, "wedged", "could not be killed: the driver or the kernel holds the process")
    if ending.timed_out:
        return _failed(ending, "hang", f"no end after {timeout:g} s")
    if os.WIFSIGNALED(ending.status):
        return _signalled(ending, os.WTERMSIG(ending.status))
    code = os.WEXITSTATUS(ending.status)
    if code:
        return _failed(ending, "exit", f"exited with status {code}")
    results = [payload for kind, payload in ending.messages if kind == RESULT]
    if ending.cut or len(results) != 1:
        what = "a truncated result" if ending.cut else f"{len(results)} results instead of one"
        return _failed(ending, "incomplete", f"exited with status 0, but sent {what}")
    return _reported_outcome(json.loads(results[0]), ending.seconds)


def judge_script(ending: ProbeEnding, timeout: float) -> Outcome:
    """Return the outcome of the profile's script.

    The script's output is stored in `output`, and not in `detail`. Stacks are reduced to the frames of the script and
    of the functions that it called.
    """
    found, printed = judge_ending(replace(ending, noise=""), timeout), script_tracebacks.renamed(ending.noise)
    return replace(
        found,
        reason=script_tracebacks.renamed(found.reason) if found.reason else found.reason,
        detail=script_tracebacks.script_stacks(found.detail) if found.detail else found.detail,
        output=tail(printed),
        output_cut=is_cut(printed),
    )


def documents(ending: ProbeEnding) -> list[dict[str, Any]]:
    """Return the documents that the process sent in addition to its result, ready to be written as frames.

    Of each kind, only the last document is returned.
    """
    last = {kind: payload for kind, payload in ending.messages if kind in DOCUMENTS}
    return [dict(json.loads(payload), kind=DOCUMENTS[kind]) for kind, payload in last.items()]


def _signalled(ending: ProbeEnding, number: int) -> Outcome:
    name = signal_name(number)
    if number == signal.SIGKILL:  # not sent by the harness: judge_ending has already handled exceeded time limits
        return _failed(ending, "oom", "killed: out of memory or a limit", name)
    return _failed(ending, "signal", f"died of {name}", name)


def _failed(ending: ProbeEnding, failure: str, reason: str, signal_: str | None = None) -> Outcome:
    steps = [payload for kind, payload in ending.messages if kind == ANNOUNCE]
    notes = b"\n".join(payload for kind, payload in ending.messages if kind == NOTE).decode("utf-8", "replace")
    texts = [text for text in (notes, ending.noise, script_tracebacks.without_modules(ending.dump)) if text.strip()]
    parts = [tail(text, DETAIL_LIMIT // len(texts) - 1) for text in texts]
    return Outcome(
        status=FAILED,
        reason=reason,
        failure=failure,
        signal=signal_,
        at=steps[-1].decode("utf-8", "replace") if steps else None,
        detail="\n".join(part for part in parts if part) or None,
        seconds=ending.seconds,
    )


def _reported_outcome(result: dict[str, Any], seconds: float) -> Outcome:
    fields = ("status", "reason", "failure", "signal", "at", "detail", "figures", "traits")
    return Outcome(seconds=seconds, **{name: result[name] for name in fields})
