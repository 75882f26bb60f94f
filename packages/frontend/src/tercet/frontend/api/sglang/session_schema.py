"""Schemas of /open_session, /close_session and the `session_params` of /generate, with SGLang's names."""

from typing import Annotated

from pydantic import Field

from tercet.frontend.api.openai.sampling_schema import Name, Strict

SessionId = Annotated[str, Field(min_length=1, max_length=128)]


class OpenSession(Strict):
    """Request to open a session."""

    capacity_of_str_len: Annotated[int, Field(ge=1, le=2**31 - 1)]
    session_id: SessionId | None = None


class CloseSession(Strict):
    """Request to close a session."""

    session_id: SessionId


class SessionParams(Strict):
    """Session, and the turn of it that a prompt continues."""

    id: SessionId
    rid: Name | None = None
    """The turn to continue; without it a new branch begins."""
    offset: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    """Number of tokens of that turn to keep; a negative one drops tokens from the end, null and 0 keep all."""
    replace: bool | None = None
    """Delete the earlier continuations of that turn."""
    drop_previous_output: bool | None = None
    """Continue from the prompt of that turn, without its output."""
