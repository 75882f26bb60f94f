"""Fields of a finished choice that say what ended it, under the names of vLLM and SGLang."""

from collections.abc import Collection
from typing import Any

from tercet.protocol.messages.values import FinishReason


def stop_fields(finish: FinishReason | None, stop_token_ids: Collection[int] | None) -> dict[str, Any]:
    """Return vLLM's `stop_reason` and SGLang's `matched_stop`; nothing for an unfinished choice.

    Both are the stop string or the token id. An end token that the client did not name is no `stop_reason`.
    """
    if finish is None:
        return {}
    named = isinstance(finish.matched, str) or finish.matched in (stop_token_ids or ())
    return {"stop_reason": finish.matched if named else None, "matched_stop": finish.matched}
