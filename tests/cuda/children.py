"""Ask a question in a process of its own, on FlashInfer's stock code or guarded.

A question is a function without arguments. Its answer has to fit into JSON. The process is a fork, so that it starts
with torch and FlashInfer in it, but with a CUDA runtime that nothing was asked of.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 120  # after which a question is ended with the stacks of its threads


class Ended(Exception):
    """The question raised an error, or its process died."""


def stock(question: Callable[[], Any], **settings: object) -> Any:
    """Return the answer of FlashInfer's own code. `settings`: environment variables. Raises Ended."""
    return _ask(question, {"FLASHINFER_WSFIX": "0", **settings})


def guarded(question: Callable[[], Any], **settings: object) -> Any:
    """Return the answer of a process with the guard in. Raises Ended."""
    return _ask(question, {"FLASHINFER_WSFIX": "1", **settings})


def _ask(question: Callable[[], Any], settings: dict[str, object]) -> Any:
    sys.stdout.flush()
    sys.stderr.flush()
    answered, answers = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _tell(question, settings, answers)
        finally:
            os._exit(0)  # not through pytest, whose copy this is
    os.close(answers)
    with os.fdopen(answered) as pipe:
        told = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended or not told:
        raise Ended(f"the process ended with {ended}")
    result = json.loads(told)
    if "error" in result:
        raise Ended(result["error"])
    return result["answer"]


def _tell(question: Callable[[], Any], settings: dict[str, object], answers: int) -> None:
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # what pytest put there is of no use here
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ.update({name: str(value) for name, value in settings.items()})
    try:
        told = {"answer": _answer(question)}
    except BaseException as error:
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    os.write(answers, json.dumps(told).encode())


def _answer(question: Callable[[], Any]) -> Any:
    import flashinfer_wsfix

    guarded = flashinfer_wsfix.status().targets[0].state == "guarded"
    assert guarded == (os.environ["FLASHINFER_WSFIX"] == "1"), flashinfer_wsfix.status()
    return question()
