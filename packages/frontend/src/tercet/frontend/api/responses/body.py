"""The response object, with the fields that repeat the request."""

from collections.abc import Mapping, Sequence
from typing import Any

from tercet.frontend.api.responses.schema import CreateResponse
from tercet.frontend.api.responses.tool_schema import OfflineSearch
from tercet.frontend.http.list_page import PageQuery, listed, unknown_after
from tercet.frontend.manager.req_state import Generation

_PREFIX = "resp_"


def id_of(rid: str) -> str:
    """Return the response id of a request id."""
    return _PREFIX + rid


def rid_of(response: str) -> str:
    """Return the request id of a response id."""
    return response.removeprefix(_PREFIX)


def new_body(
    response: str, request: CreateResponse, sampling: Mapping[str, Any], created: int, *, stored: bool
) -> dict[str, Any]:
    """Return the body of a new response without output; `stored` says whether the server has a store."""
    text = request.text.model_dump(exclude_none=True, by_alias=True) if request.text else {}
    reasoning = request.reasoning
    return {
        "id": response,
        "object": "response",
        "created_at": created,
        "status": "queued" if request.background else "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "conversation": {"id": request.conversation_id} if request.conversation_id is not None else None,
        "error": None,
        "frequency_penalty": sampling["frequency_penalty"],
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": sampling["presence_penalty"],
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": stored and request.store is not False,
        "temperature": sampling["temperature"],
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": _plain(request.tool_choice) or "auto",
        "tools": [_tool(tool.model_dump()) for tool in request.tools or () if not isinstance(tool, OfflineSearch)],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling["top_p"],
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }


def usage_of(generation: Generation, reasoning_tokens: int) -> dict[str, Any]:
    """Return the token counts in this API's format. Cache writes are free, so their count is zero."""
    return {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generation.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": generation.prompt_tokens + generation.output_tokens,
    }


def page(items: Sequence[dict[str, Any]], query: PageQuery) -> dict[str, Any]:
    """Return a page of items. Raises BadRequestError for an unknown `after`."""
    items = list(items) if query.order == "asc" else list(reversed(items))
    begin = 0
    if query.after is not None:
        begin = next((place for place, item in enumerate(items, 1) if item["id"] == query.after), 0)
        if not begin:
            raise unknown_after("Item", query.after)
    end = begin + query.limit
    return listed([(item["id"], item) for item in items[begin:end]], has_more=end < len(items))


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else value.model_dump()


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [_tool(each) for each in tool["tools"]]}
    if tool["type"] == "custom":
        return tool
    return {**tool, "parameters": tool["parameters"] or {}, "strict": bool(tool["strict"])}
