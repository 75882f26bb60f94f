"""Actions of an administrator of a whole server."""

import time

import httpx
import psutil

from tests.server_process import Server

ADMIN_KEY = "open-sesame"


def scheduler(server: Server) -> psutil.Process:
    parts = psutil.Process(server.process.pid).children()
    (found,) = [part for part in parts if "tercet.scheduler" in part.cmdline()]
    return found


def ordered(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)


def wait_until_served(server: Server) -> None:
    """Wait longer than usual, because parts that died repeatedly return later."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("\n".join(server.lines))
