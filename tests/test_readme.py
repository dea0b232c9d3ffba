"""The README says what the code says."""

import json
import re
from pathlib import Path

import pytest
from flashinfer_wsfix import __version__
from flashinfer_wsfix.__main__ import main

import releases
import tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [tables.defects, tables.variables])
def test_tables_are_made_from_the_rows_of_the_code(table):
    """`python tests/tables.py` prints what has to stand in the README."""
    assert table() in README


def test_the_affected_releases_are_those_that_detection_finds():
    """The table of releases names the first and last release with eight sites and with ten."""
    for group in (releases.EIGHT_SITES, releases.TEN_SITES):
        row = next(line for line in README.splitlines() if line.startswith(f"| **{group[0]}"))
        assert group[-1] in row
        assert f"all {8 if group is releases.EIGHT_SITES else 10}" in row


def test_the_ground_truth_agrees():
    """Where the facts of all releases lie beside the repository, the affected ones are ours."""
    facts = ROOT.parent / "shared" / "flashinfer_releases.json"
    if not facts.exists():
        pytest.skip("the facts do not lie beside the repository")
    moving = [release for release, row in json.loads(facts.read_text()).items() if row["state"] == "move"]
    assert tuple(moving) == releases.AFFECTED


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`flashinfer-wsfix (\w+)", README))))
def test_every_command_exists(command, capsys):
    """A command that the README names has a help text."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0, capsys.readouterr().err


def test_every_file_that_the_readme_names_exists():
    for path in re.findall(r"(?:python |\]\()((?:tests|benchmarks)/[\w./]+|demo\.svg)", README):
        assert (ROOT / path).exists(), path


def test_the_changelog_has_this_version():
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
