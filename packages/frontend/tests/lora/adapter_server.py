"""Client helpers for the adapter routes."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import httpx2

from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.testing import FakeEngine, Served
from tercet.protocol.messages.messages import LoadLoRAAdapterReq, UnloadLoRAAdapterReq
from tercet.protocol.messages.values import LoRAAdapter

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
BOSS = {"authorization": "Bearer boss"}
USER = {"authorization": "Bearer user"}
KEYS = HttpConfig(api_key=("user",), admin_key=("boss",))
HAIKU = {"lora_name": "haiku", "lora_path": "/adapters/haiku"}
WITH_HAIKU = ServingConfig(lora=("haiku=/adapters/haiku",))
ASK: dict[str, Any] = {"model": "haiku", "prompt": "hello", "max_tokens": 3}


def sha(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


async def load(http: httpx2.AsyncClient, name: str = "haiku", path: str = "/adapters/haiku", **more: str) -> Any:
    body = {"lora_name": name, "lora_path": path, **more}
    return await http.post("/load_lora_adapter", json=body, headers=BOSS)


async def unload(http: httpx2.AsyncClient, name: str = "haiku") -> Any:
    return await http.post("/unload_lora_adapter", json={"lora_name": name}, headers=BOSS)


async def ask(http: httpx2.AsyncClient, model: str = "haiku") -> Any:
    return await http.post("/v1/completions", json={**ASK, "model": model}, headers=USER)


async def retry_until_status(served: Served, status: int, name: str = "haiku") -> Any:
    """Repeat a request until it has this status."""
    async with asyncio.timeout(10), httpx2.AsyncClient(base_url=served.url) as http:
        answer = await ask(http, name)
        while answer.status_code != status:
            await asyncio.sleep(0.01)
            answer = await ask(http, name)
        return answer


def loads(engine: FakeEngine) -> list[tuple[str, LoRAAdapter]]:
    return [(peer, each.adapter) for peer, each in engine.sent if isinstance(each, LoadLoRAAdapterReq)]


def unloads(engine: FakeEngine) -> list[tuple[str, LoRAAdapter]]:
    return [(peer, each.adapter) for peer, each in engine.sent if isinstance(each, UnloadLoRAAdapterReq)]
