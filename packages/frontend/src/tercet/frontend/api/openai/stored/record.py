"""The parts of a chat request that are stored with its completion."""

from typing import Any

from starlette.requests import Request

from tercet.frontend.api.openai.chat_messages import message_of
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.chat.planner import ChatPlan
from tercet.frontend.http.request_id import request_id_of


def request_record(body: ChatRequest, plan: ChatPlan, request: Request) -> dict[str, Any]:
    """Return the fields that a stored completion repeats, with the sampling parameters that were used."""
    sampling = plan.request.options.sampling
    plain = body.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        include={"tools", "tool_choice", "functions", "function_call", "response_format"},
    )
    return {
        "request_id": request_id_of(request.scope),
        "tools": plain.get("tools"),
        "tool_choice": plain.get("tool_choice"),
        **{name: plain[name] for name in ("functions", "function_call") if name in plain},
        "response_format": plain.get("response_format"),
        "seed": body.seed,
        "temperature": sampling.get("temperature", 1.0),
        "top_p": sampling.get("top_p", 1.0),
        "presence_penalty": sampling.get("presence_penalty", 0.0),
        "frequency_penalty": sampling.get("frequency_penalty", 0.0),
        "input_user": body.user,
        "service_tier": "default",
    }


def stored_messages(body: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages of a request in the form of the stored ones: parts of content stand beside the text."""
    return [_stored(message_of(message)) for message in body.messages]


def _stored(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        content = "".join(part["text"] for part in parts if part["type"] == "text")
    return {"refusal": None, "name": None, **message, "content": content, "content_parts": parts}
