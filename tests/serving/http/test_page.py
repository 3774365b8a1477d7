"""The page in headless Chromium: by keyboard, at desktop and phone width, light and dark, with hostile answers."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from paged import ChatTokenizer
from tests.chromium import CHROMIUM, tab
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import serving

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PASTE = f"""
const data = new DataTransfer(), bytes = Uint8Array.from(atob("{PIXEL}"), letter => letter.charCodeAt());
data.items.add(new File([bytes], "a.png", {{ type: "image/png" }}));
by("text").dispatchEvent(new ClipboardEvent("paste", {{ clipboardData: data }})); by("text").focus(); 0"""
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
  return Math.min(...[...document.querySelectorAll("h1, p, dd, dt, label, summary, .dim")].map(one => {
    const front = luminance(getComputedStyle(one).color);
    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  }));
})()"""


@pytest.mark.thorough  # starts a browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_page(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGE_PICTURES=FOLDER keeps the pictures of the documentation."""
    decode = ChatTokenizer.decode
    hostile, thoughts = [HOSTILE], [""]

    def say(self: ChatTokenizer, ids: list[int]) -> str:
        text = decode(self, ids).replace("brass", f"{thoughts[0]}brass")
        return text.replace("lantern", f"lantern{hostile[0]}")

    monkeypatch.setattr(ChatTokenizer, "decode", say)
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
            assert (await page.evaluate("by('talk').lastChild.textContent")).endswith(" a second")
            thoughts[0] = "<think>Hm.</think>"
            hostile[0] = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
            await page.evaluate(
                "by('settings').elements.tools.value = '[{\"name\": \"look\"}]'; by('clear').click(); 0"
            )
            await page.evaluate("by('text').focus()")
            await page.press("ArrowUp")
            await page.press("Enter")
            await page.until("document.querySelectorAll('#talk .content').length === 1 && !by('send').disabled")
            folded = "[...document.querySelectorAll('#talk details:not([open]) p')].map(one => one.textContent).join()"
            assert await page.evaluate(folded) == 'Hm.,{"a": 1}'
            await page.type(PROMPT)
            await page.press("Enter")
            await page.until("document.querySelectorAll('#talk .content').length === 2 && !by('send').disabled")
            assert await page.evaluate("talk.map(message => message.role).join()") == "user,assistant,tool,assistant"
            await page.screenshot(pictures / "serving-tools.png")
            await page.evaluate("by('clear').click(); by('settings').reset(); 0")
            await page.evaluate(PASTE)
            await page.until("document.querySelector('#images img')?.naturalWidth === 1")
            await page.press("Enter")
            await page.until("by('state').textContent.includes('takes no images') && !by('send').disabled")
            thoughts[0] = hostile[0] = ""
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
            assert [problem for problem in page.problems if "status of 400" not in problem] == []

    with serving(chat_folder, tool_parser="hermes", reasoning_parser="think") as served:
        asyncio.run(use(served.url))
        check_idle(served)
        # The one that was stopped, and as many of the three others as had not ended when the browser was closed.
        assert 1 <= served.engine.metrics.finished["abort"] <= 4
