"""Documentation of every route: summary, example of a request, description and example of the response.

Tests keep this table equal to the routers, send each request and compare the response.
"""

from tercet.frontend.api.docs.anthropic_operations import ANTHROPIC
from tercet.frontend.api.docs.audio_operations import AUDIO
from tercet.frontend.api.docs.openai_operations import OPENAI
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.docs.responses_operations import RESPONSES
from tercet.frontend.api.docs.score_operations import SCORES
from tercet.frontend.api.docs.server_operations import SERVER
from tercet.frontend.api.docs.sglang_operations import SGLANG
from tercet.frontend.api.docs.stored_chat_operations import STORED_CHATS
from tercet.frontend.api.docs.training_operations import TRAINING

OPERATIONS: dict[MethodAndPath, Operation] = {
    **OPENAI,
    **STORED_CHATS,
    **RESPONSES,
    **SCORES,
    **AUDIO,
    **ANTHROPIC,
    **SGLANG,
    **TRAINING,
    **SERVER,
}
