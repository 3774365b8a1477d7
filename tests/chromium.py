"""Headless Chromium over its DevTools protocol: as much of it as the page's tests need."""

import asyncio
import base64
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.deadline import HANG_S

aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp to drive a browser")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One tab. `problems`: errors of scripts, of the console and of the content security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.problems: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            told = json.loads((await self._socket.receive(timeout=HANG_S)).data)
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(told["params"])[:500])
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    async def evaluate(self, script: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for a script to be true."""
        end = monotonic() + HANG_S
        while monotonic() < end:
            if value := await self.evaluate(script):
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"never: {script}")

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38}[key]
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **fields)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def resize(self, width: int, height: int, *, scheme: str = "light") -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"]))


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while (found := re.search(rb"ws://([^/]+)/", await process.stderr.readline())) is None:
            pass
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()
