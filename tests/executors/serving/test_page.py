"""The page in headless Chromium: by keyboard, at desktop and phone width, light and dark, with hostile answers."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from paged import ChatTokenizer
from tests.chromium import CHROMIUM, tab
from tests.executors.serving.conftest import serving
from tests.executors.serving.test_openai import PROMPT, check_idle

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
CONTRASTS = """
(() => {
  const luminance = text => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255)
      .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const canvas = document.createElement("i");
  canvas.style.color = "Canvas";
  document.body.append(canvas);
  const back = luminance(getComputedStyle(canvas).color);
  canvas.remove();
  return Math.min(...[...document.querySelectorAll("h1, p, dd, dt, label, .dim")].map(one => {
    const front = luminance(getComputedStyle(one).color);
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  }));
})()"""


@pytest.mark.thorough  # starts a browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_page(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGE_PICTURES=FOLDER keeps the pictures of the documentation."""
    decode = ChatTokenizer.decode
    hostile = [HOSTILE]
    monkeypatch.setattr(
        ChatTokenizer, "decode", lambda self, ids: decode(self, ids).replace("lantern", f"lantern{hostile[0]}")
    )
    pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))

    async def use(url: str) -> None:
        async with tab(tmp_path / "profile") as page:
            await page.resize(1280, 800)
            await page.open(url)
            await page.until("document.activeElement.id === 'text'")
            await page.type(PROMPT)
            await page.press("Enter")
            await page.until("document.querySelectorAll('#talk p.content').length === 1 && !by('send').disabled")
            assert await page.evaluate("by('talk').querySelector('.content').textContent") == f"brass lantern{HOSTILE}"
            assert await page.evaluate("document.title + document.querySelectorAll('img').length") == "paged0"
            hostile[0] = ""
            await page.evaluate(
                "by('settings').elements.temperature.value = 2; by('settings').elements.max_tokens.value = 900; 0"
            )
            await page.evaluate(
                "const own = fetch; fetch = (url, options) => { if (options) options.body ="
                " options.body.replace('{', '{\"ignore_eos\": true, '); return own(url, options); }; 0"
            )
            await page.evaluate("document.getElementById('text').focus()")
            await page.type(PROMPT)
            await page.press("Enter")
            await page.until("document.querySelectorAll('#blocks .own').length && !by('stop').disabled")
            await page.until("Number(by('engine').querySelector('dd').textContent) === 1")
            await page.press("Escape")
            await page.until("!by('send').disabled && by('state').textContent === 'stopped'")
            await page.until("Number(by('engine').querySelector('dd').textContent) === 0")
            await page.evaluate("by('clear').click(); by('settings').reset(); 0")
            body = {"prompt": [PROMPT * 6, PROMPT * 9], "n": 3, "max_tokens": 900, "ignore_eos": True, "stream": True}
            options = {"method": "POST", "headers": {"content-type": "application/json"}, "body": json.dumps(body)}
            await page.evaluate(f"own('/v1/completions', {json.dumps(options)}); 0")
            await page.until("Number(document.querySelector('.shared + dd').textContent) > 0")
            await page.evaluate(
                "by('settings').elements.temperature.value = 3; by('settings').elements.max_tokens.value = 900; 0"
            )
            await page.type(PROMPT)
            await page.press("Enter")
            await page.until("by('talk').textContent.length > 100")
            assert await page.evaluate("by('state').textContent") == "", "no longer stopped"
            for name, width, height, scheme in [
                ("desktop", 1280, 800, "light"),
                ("phone", 390, 844, "light"),
                ("dark", 1280, 800, "dark"),
            ]:
                await page.resize(width, height, scheme=scheme)
                await asyncio.sleep(0.7)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                assert await page.evaluate(CONTRASTS) >= 4.5
                await page.screenshot(pictures / f"serving-{name}.png")
            assert page.problems == []

    with serving(chat_folder) as served:
        asyncio.run(use(served.url))
        check_idle(served)
        # The one that was stopped, and as many of the three others as had not ended when the browser was closed.
        assert 1 <= served.engine.metrics.finished["abort"] <= 4
