"""All that changes while a process runs, and the one lock around it. It is on the start-up path: it imports only os."""

import os
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .detection import Verdict

# Around patching, publishing and counting; never on the way of an ordinary call, and never held while an import or a
# log handler runs. A fork waits for it, so that no child inherits it taken.
lock = RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

routes: "list[str]" = []  # by which routes this process was activated, in order
verdicts: "dict[str, Verdict]" = {}  # by target, once it was looked at
versions: "dict[str, str]" = {}  # by target
errors: "dict[str, str]" = {}  # by target: what of ours failed in a call, in a sentence
gates: "tuple[str, ...]" = ()  # in force
first_bytes = 40 << 20  # the least that a lane's first generation has; 0: none before a plan overflows FlashInfer's own
counters = dict.fromkeys(
    ("growths", "capture_overflows", "gated_calls", "displaced_buffers", "displaced_nbytes", "unguarded_calls"), 0
)
said: "set[object]" = set()  # what is logged once only


def count(counter: str, by: int = 1) -> None:
    """Add to one of the counters."""
    with lock:
        counters[counter] += by
