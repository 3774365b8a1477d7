"""The report in a browser: its tables sort and filter, and nothing complains."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import HANG_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-dev-shm-usage --disable-sync --enable-logging=stderr "
    "--virtual-time-budget=5000"
).split()
# What the page looks like after a click on a column and words in its filter, in the title of the page.
PROBE = """<script>
const table = document.querySelector("table.data"), rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
const column = [...table.tHead.rows[0].cells].findIndex(head => head.textContent.startsWith("p50"));
const values = () => rows().map(row => parseFloat(row.cells[column].dataset.value));
const found = {};
const barred = [...document.querySelectorAll("table.data td.bar")];
found.bars = Object.fromEntries(barred.map(cell => [
  cell.style.getPropertyValue("--share"), getComputedStyle(cell).backgroundImage]));
found.scrolls = document.documentElement.scrollWidth > innerWidth;
table.tHead.rows[0].cells[column].click();
found.up = values();
table.tHead.rows[0].cells[column].click();
found.down = values();
const search = document.querySelector("input[type=search]");
search.value = "DECODE 2x128";
search.dispatchEvent(new Event("input"));
found.filtered = rows().map(row => row.cells[0].textContent);
document.title = JSON.stringify(found);
</script>"""

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium or google-chrome")


def _opened(page: Path, profile: Path, width: int) -> tuple[str, list[str]]:
    """The page's title once its scripts ran, and what it said on the console."""
    assert CHROMIUM
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom"]
    run = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=HANG_S, check=True)
    (title,) = re.findall(r"<title>(.*?)</title>", run.stdout.partition("</head>")[0])
    return title, [line for line in run.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("width", [1400, 420])
def test_page_in_a_browser(width: int, results: dict[str, Path], report: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    whole = (report / "report.html").read_text(encoding="utf-8")
    page.write_text(whole.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    title, said = _opened(page, tmp_path / "profile", width)
    assert said == []
    found: dict[str, Any] = json.loads(title.replace("&quot;", '"'))
    shares = {float(share.removesuffix("%")): drawn for share, drawn in found["bars"].items()}
    assert len(shares) > 5
    assert all(0 <= share <= 100 and f" {share:g}%" in drawn for share, drawn in shares.items())
    assert not found["scrolls"], "only tables scroll sideways, in their own boxes"
    times = sorted(row["median_us"] for row in json.loads(results["attention"].read_text())["rows"])
    assert (found["up"], found["down"]) == (times, times[::-1])
    assert [name.removesuffix(" (warm)") for name in found["filtered"]] == ["decode.2x128.h4_2.b16.d16"]


def test_errors_of_a_page_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><head><title>it</title></head><script>nothing.at.all</script>")
    title, said = _opened(page, tmp_path / "profile", 400)
    assert title == "it"
    assert len(said) == 1
