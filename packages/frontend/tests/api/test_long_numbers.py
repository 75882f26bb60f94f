"""Numbers beyond doubles and 64 bits in a client's JSON: untouched in prompts, stored items, echoes and answers."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from packages.frontend.tests.api.openai.tool_chat import EngineOf, HttpOf, prompt_of, saying, tool_engine
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import serving
from tercet.protocol.messages.values import ModelLimits

NUMBERS = ["1e400", "12345678901234567890123", "0.1000000000000000055511151231257827", "-9223372036854775809"]
SCHEMA = f'{{"type":"object","properties":{{"n":{{"enum":[{",".join(NUMBERS)},1],"default":{NUMBERS[0]}}}}}}}'
HISTORY = f'{{"n":[{",".join(NUMBERS)}]}}'


def exact(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def body(path: str) -> str:
    match path:
        case "/v1/chat/completions":
            tool = f'{{"type":"function","function":{{"name":"f","parameters":{SCHEMA}}}}}'
            call = f'{{"id":"c1","type":"function","function":{{"name":"f","arguments":{json.dumps(HISTORY)}}}}}'
            said = f'{{"role":"assistant","tool_calls":[{call}]}},{{"role":"tool","tool_call_id":"c1","content":"x"}}'
            field = "messages"
        case "/v1/responses":
            tool = f'{{"type":"function","name":"f","parameters":{SCHEMA}}}'
            said = f'{{"type":"function_call","call_id":"c1","name":"f","arguments":{json.dumps(HISTORY)}}},'
            said += '{"type":"function_call_output","call_id":"c1","output":"x"}'
            field = "input"
        case _:
            tool = f'{{"name":"f","input_schema":{SCHEMA}}}'
            use = f'{{"type":"tool_use","id":"c1","name":"f","input":{HISTORY}}}'
            result = '{"type":"tool_result","tool_use_id":"c1","content":"x"}'
            said = f'{{"role":"assistant","content":[{use}]}},{{"role":"user","content":[{result}]}}'
            field = "messages"
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    return f'{{"model":"tiny","{limit}":64,"tools":[{tool}],"{field}":[{{"role":"user","content":"hi"}},{said}]}}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_numbers_reach_prompt_and_answer(
    path: str, engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits, http_of: HttpOf, tmp_path: Path
) -> None:
    call = f'<tool_call>\n{{"name": "f", "arguments": {HISTORY}}}\n</tool_call>'
    engine = tool_engine(engine_of, files, limits, saying(call))
    headers = {"content-type": "application/json"}
    async with serving(engine, store=StoreConfig(response_store=str(tmp_path / "store.sqlite"))) as served:
        client = http_of(served)
        answer = await client.post(path, content=body(path), headers=headers)
        assert answer.status_code == 200, answer.text
        prompt = prompt_of(served)
        later = answer
        if path == "/v1/responses":
            later = await client.get(f"{path}/{answer.json()['id']}")
            kept = exact(later.text)["tools"][0]["parameters"]["properties"]["n"]["enum"]
            assert kept == [*map(Decimal, NUMBERS), 1]
    assert prompt.count("12345678901234567890123") == 2
    assert all(prompt.count(number) >= 2 for number in NUMBERS)
    for text in (answer.text, later.text):
        found = exact(text)
        match path:
            case "/v1/chat/completions":
                arguments = exact(found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
            case "/v1/responses":
                arguments = exact(found["output"][-1]["arguments"])
            case _:
                arguments = found["content"][-1]["input"]
        assert arguments == exact(HISTORY)
