"""The report in a browser: its tables sort and filter, and nothing complains."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import CHROMIUM, tab

# What the page looks like after a click on a column and words in its filter.
PROBE = """(() => {
const table = document.querySelector("table.data"), rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
const column = [...table.tHead.rows[0].cells].findIndex(head => head.textContent.startsWith("p50"));
const values = () => rows().map(row => parseFloat(row.cells[column].dataset.value));
const state = {};
const barred = [...document.querySelectorAll("table.data td.bar")];
state.bars = Object.fromEntries(barred.map(cell => [
  cell.style.getPropertyValue("--share"), getComputedStyle(cell).backgroundImage]));
state.scrolls = document.documentElement.scrollWidth > innerWidth;
table.tHead.rows[0].cells[column].click();
state.up = values();
table.tHead.rows[0].cells[column].click();
state.down = values();
const search = document.querySelector("input[type=search]");
search.value = "DECODE 2x128";
search.dispatchEvent(new Event("input"));
state.filtered = rows().map(row => row.cells[0].textContent);
return state;
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_page_in_a_browser(results: dict[str, Path], report: Path, tmp_path: Path) -> None:
    times = sorted(row["median_us"] for row in json.loads(results["attention"].read_text())["rows"])

    async def use() -> None:
        async with tab(tmp_path / "profile") as page:
            for width in (1400, 420):
                await page.resize(width, 900)
                await page.open((report / "report.html").as_uri())
                check(await page.evaluate(PROBE))
            assert page.problems == []
            await page.open("data:text/html,<!doctype html><script>nothing.at.all</script>")
            assert len(page.problems) == 1, "errors of a page are seen"

    def check(state: dict[str, Any]) -> None:
        shares = {float(share.removesuffix("%")): drawn for share, drawn in state["bars"].items()}
        assert len(shares) > 5
        assert all(0 <= share <= 100 and f" {share:g}%" in drawn for share, drawn in shares.items())
        assert not state["scrolls"], "only tables scroll sideways, in their own boxes"
        assert (state["up"], state["down"]) == (times, times[::-1])
        assert [name.removesuffix(" (warm)") for name in state["filtered"]] == ["decode.2x128.h4_2.b16.d16"]

    asyncio.run(use())
