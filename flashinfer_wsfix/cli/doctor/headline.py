"""The overall judgement, in one sentence."""

import sys

from .findings import Case
from .judgements import APPLIES, GATED, UNKNOWN

# Each defect for somebody who meets it first, in four words.
SHORT = {
    "D1": "workspace moves under graphs",
    "D2": "workspace not born zeroed",
    "D3": "cuDNN's SM12x replay fault",
    "D4": "vLLM's SM100 workspace moves",
}


def overall(case: Case) -> str:
    """Say first whether new processes are guarded, then against what."""
    judged, activation = case.judged, case.activation
    names = [name for name, row in judged.items() if row.state == APPLIES]
    exposed = [name for name in names if not judged[name].guarded]
    affected = f"this machine is affected ({', '.join(f'{name} {SHORT[name]}' for name in names)})"
    if exposed:
        return f"NOT guarded{'' if exposed == names else ' against ' + ', '.join(exposed)}: {affected}."
    if names:
        how = " by this PYTHONPATH, where it is inherited" if activation.inherited else ""
        how = how if activation.everywhere else " by the plugin, where it is loaded"
        limits = f", against D3 in the {GATED} auto-tuning alone" if "D3" in names else ""
        if activation.untried:
            return f"Set up to be guarded{how}{limits}; not tried, since FlashInfer's import fails here: {affected}."
        return f"Guarded{how}{limits}: {affected}."
    unsure = [name for name in ("D3", "D4") if judged[name].state == UNKNOWN]
    if unsure:
        return f"No defect is known to apply here; whether {' or '.join(unsure)} does could not be told."
    if case.verdict is None:
        return f"FlashInfer is not installed for {sys.executable}: if your server has it, ask with the server's Python."
    return "This machine is not affected: flashinfer-wsfix can be removed here, and a crash here has another cause."
