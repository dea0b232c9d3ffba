"""The README and the pages of docs/ say what the code says."""

import json
import re
from email import message_from_string
from pathlib import Path

import pytest
from flashinfer_wsfix import __version__
from flashinfer_wsfix.__main__ import main

import hosts
import releases
import tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
ALL = "\n".join(PAGES.values())


@pytest.mark.parametrize(
    ("table", "page"),
    [(tables.defects, "evidence.md"), (tables.pins, "hosts.md"), (tables.variables, "README.md")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tables_are_made_from_the_rows_of_the_code(table, page):
    """`python tests/tables.py` prints what has to stand on the page."""
    assert table() in PAGES[page]


@pytest.mark.parametrize("host", ["vLLM", "SGLang"])
def test_hosts_pin_what_their_own_metadata_says(host):
    """Of the releases whose sources the tests read anyway."""
    of_host = {"vLLM": (hosts.vllm, hosts.VLLM_RELEASES), "SGLang": (hosts.sglang, hosts.SGLANG_RELEASES)}
    fetch, fetched = of_host[host]
    for release in fetched:
        (metadata,) = Path(fetch(release)).glob("*.dist-info/METADATA")
        required = message_from_string(metadata.read_text()).get_all("Requires-Dist")
        (pin,) = [line.partition("==")[2] for line in required if re.match(r"flashinfer[-_]python\b.*==", line)]
        assert tables.PINS[host][release] == pin


def test_the_hosts_that_the_first_screen_names_are_those_that_pin_an_affected_release():
    """First and last of each."""
    first_screen = README.partition("| | in a clone")[0]
    for host in ("vLLM", "SGLang", "TensorRT-LLM"):
        affected = [release for release, pin in tables.PINS[host].items() if pin in releases.AFFECTED]
        names = [release.removesuffix(".0") if host == "vLLM" else release for release in (affected[0], affected[-1])]
        assert f"{host} {' to '.join(names)}" in " ".join(first_screen.split())


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


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`flashinfer-wsfix (\w+)", ALL))))
def test_every_command_exists(command, capsys):
    """A command that the README names has a help text."""
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_everything_that_a_page_points_to_exists(page):
    """Files and folders of the repository, other pages, and their headings."""
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for path, heading in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", PAGES[page]):
        assert (folder / path).exists(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", PAGES[Path(path).name or page], flags=re.M)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], heading
    for path in re.findall(r"(?:python |pytest )((?:tests|benchmarks)/[\w./]+)", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_the_container_page_is_what_was_tried():
    """Its pod puts on PYTHONPATH what `path` prints for that folder, and the folder."""
    page = PAGES["containers.md"]
    (folder,) = set(re.findall(r"--target (\S+)", page)) - {"DIR"}
    assert f"{folder}/flashinfer_wsfix/bootstrap:{folder}" in page
    assert (ROOT / "flashinfer_wsfix/bootstrap/sitecustomize.py").exists()


def test_the_changelog_has_this_version():
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
