"""Where the start-up files that version 0.1.0 wrote look for ``activate``."""

from .activation import activate

__all__ = ["activate"]
