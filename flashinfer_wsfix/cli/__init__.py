"""The operator's part: what a person runs. Nothing that a server runs imports it."""

import os
import sys


def say(text: str) -> None:
    """Print, whether or not somebody still reads: ``flashinfer-wsfix doctor | head`` changes no exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(sentence: str, code: int) -> int:
    """Write a sentence to standard error and return ``code``, for the caller to return."""
    sys.stderr.write(f"flashinfer-wsfix: {sentence}.\n")
    return code
