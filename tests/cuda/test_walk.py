"""Random walks: stock comes to harm in most of them, guarded in none. `--walks N`: that many, in place of a few."""

import pytest
import walk
from children import Ended, guarded, stock


def test_walks(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Harm is an access to freed memory or another tensor overwritten; guarded, a workspace that is dirty as well."""
    count, harmed = pytestconfig.getoption("--walks"), 0
    for seed in range(count):
        settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{bool(seed % 2)}", "FAKECUDA_REUSE": seed // 2 % 2}
        guarded(walk.question(seed, zeroed=True), **settings)
        try:
            stock(walk.question(seed, zeroed=False), **settings)
        except Ended as ended:
            assert "illegal memory access" in str(ended) or walk.OVERWRITTEN in str(ended)
            harmed += 1
    with capsys.disabled():
        print(f" stock came to harm in {harmed} of {count} walks, guarded in none ", end="")
    assert harmed > count / 2
