"""The operator's part: what a person runs. Nothing that a server runs imports it."""

import sys


def complain(sentence: str, code: int) -> int:
    """Write a sentence to standard error and return ``code``, for the caller to return."""
    sys.stderr.write(f"flashinfer-wsfix: {sentence}.\n")
    return code
