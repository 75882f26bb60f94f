"""Documentation of the routes of Anthropic's messages."""

from tercet.frontend.api.anthropic.schema import CountTokens, CreateMessage
from tercet.frontend.api.docs.examples import QUESTION, RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation

ANTHROPIC: dict[MethodAndPath, Operation] = {
    ("POST", "/v1/messages"): Operation(
        tag="Anthropic",
        summary="Create a message. Anthropic's format.",
        answer="A message, or its events.",
        body=CreateMessage,
        example={"model": "embedded", "messages": QUESTION, "max_tokens": 64},
        streams=True,
        response={
            "id": f"msg_{RID}",
            "type": "message",
            "role": "assistant",
            "model": "embedded",
            "content": [{"type": "text", "text": "It plans steps.", "citations": None}],
            "container": None,
            "diagnostics": None,
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                "input_tokens": 6,
                "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 8,
                "inference_geo": None,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
                "server_tool_use": None,
                "service_tier": "standard",
            },
        },
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Anthropic",
        summary="Count the tokens of a chat.",
        answer="The number.",
        body=CountTokens,
        example={"model": "embedded", "messages": QUESTION},
        response={"input_tokens": 14},
    ),
}
