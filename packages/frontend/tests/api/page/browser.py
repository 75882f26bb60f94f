"""Headless Chromium over the DevTools protocol: pages that tests drive by the keyboard and by JavaScript."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_SECONDS = 10.0


class Browser:
    """Connection to a Chromium process, by its debugging pipe: JSON messages that end with a zero byte."""

    def __init__(self, commands: asyncio.StreamWriter, replies: asyncio.StreamReader) -> None:
        self._commands = commands
        self._replies = replies
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def read(self) -> None:
        """Read replies and events until the browser ends."""
        while True:
            try:
                message = json.loads((await self._replies.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if waiting := self._pending.pop(message.get("id", 0), None):
                waiting.set_result(message)
            elif page := self._pages.get(message.get("sessionId", "")):
                page.on_event(message["method"], message["params"])

    async def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._pending[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._commands.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(_SECONDS):
            reply = await self._pending[number]
        assert "error" not in reply, (method, reply["error"])
        result: dict[str, Any] = reply["result"]
        return result

    async def open(self, url: str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> "Page":
        """Return a page of a fresh profile, once it is loaded."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await page.load(url)
        return page


class Page:
    """A page, its errors and warnings, and the addresses that it has requested."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._context = context
        self._session = session
        self.faults: list[str] = []
        self.urls: list[str] = []

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.faults.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.faults.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.faults.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def load(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def close(self) -> None:
        """Close the page with its profile, which ends its connections."""
        await self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    async def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(_SECONDS):
            while not await self.run(f"Boolean({condition})"):  # noqa: ASYNC110 - the page is another process
                await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def focus(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, selector: str, text: str) -> None:
        await self.focus(selector)
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key where the focus is."""
        extra = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **extra)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """Run a browser, which reads commands from descriptor 3 and writes to descriptor 4."""
    loop = asyncio.get_running_loop()
    command_read, command_write = os.pipe()
    reply_read, reply_write = os.pipe()
    flags = " ".join([*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"])
    script = f'exec "$0" {flags} about:blank 3<&{command_read} 4>&{reply_write} 2>/dev/null'
    process = await asyncio.create_subprocess_exec(
        "/bin/bash", "-c", script, CHROMIUM, pass_fds=(command_read, reply_write), start_new_session=True
    )
    os.close(command_read)
    os.close(reply_write)
    replies = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), os.fdopen(reply_read, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(command_write, "wb")
    )
    browser = Browser(asyncio.StreamWriter(transport, protocol, None, loop), replies)
    reading = asyncio.create_task(browser.read())
    try:
        yield browser
        await browser.call("Browser.close")
    finally:
        transport.close()
        if process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
