"""Output items under construction, and their events."""

from collections.abc import Sequence
from typing import Any, ClassVar

Change = dict[str, Any]
"""An event without its `sequence_number`."""
LogprobList = Sequence[dict[str, Any]]


class Item:
    """An output item; `place` is its index in the output."""

    prefix: ClassVar[str]
    """Prefix of its id."""

    def __init__(self, item_id: str, place: int) -> None:
        self.id = item_id
        self.place = place
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self._texts)

    def to_dict(self, status: str) -> dict[str, Any]:
        """Return the item as an object."""
        return {"id": self.id, "status": status, **self._fields(started=status != "in_progress")}

    def start_events(self) -> list[Change]:
        """Return the first events of the item."""
        return [{"type": "response.output_item.added", "output_index": self.place, "item": self.to_dict("in_progress")}]

    def append(self, text: str, logprobs: LogprobList = ()) -> list[Change]:
        """Append text; return the events."""
        self._texts.append(text)
        return [self._delta(text, logprobs)]

    def end_events(self, status: str) -> list[Change]:
        """Return the last events of the item."""
        return [{"type": "response.output_item.done", "output_index": self.place, "item": self.to_dict(status)}]

    def change(self, kind: str, **fields: Any) -> Change:
        """Return an event about this item."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.place, **fields}

    def _fields(self, *, started: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, logprobs: LogprobList) -> Change:
        raise NotImplementedError


class TextItem(Item):
    """An item with one content part."""

    def start_events(self) -> list[Change]:
        """Return the first events, which include the empty part."""
        return [*super().start_events(), self.change("content_part.added", content_index=0, part=self._part())]

    def end_events(self, status: str) -> list[Change]:
        """Return the last events, which include the complete part."""
        part = self.change("content_part.done", content_index=0, part=self._part())
        return [self._done(), part, *super().end_events(status)]

    def _part(self) -> dict[str, Any]:
        raise NotImplementedError

    def _done(self) -> Change:
        raise NotImplementedError


class Message(TextItem):
    """A message to the user."""

    prefix = "msg"

    def __init__(self, item_id: str, place: int) -> None:
        super().__init__(item_id, place)
        self._logprobs: list[dict[str, Any]] = []

    def _fields(self, *, started: bool) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [self._part()] if started else []}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def score(self, logprobs: LogprobList) -> None:
        """Add log-probabilities of tokens without text. They appear in the last events only."""
        self._logprobs += logprobs

    def _delta(self, text: str, logprobs: LogprobList) -> Change:
        self._logprobs += logprobs
        return self.change("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def _done(self) -> Change:
        return self.change("output_text.done", content_index=0, text=self.text, logprobs=list(self._logprobs))


class Reasoning(TextItem):
    """Reasoning of the model. It is shown in full, so there is neither a summary nor encrypted content."""

    prefix = "rs"

    def _fields(self, *, started: bool) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [self._part()] if started else []}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002
        return self.change("reasoning_text.delta", content_index=0, delta=text)

    def _done(self) -> Change:
        return self.change("reasoning_text.done", content_index=0, text=self.text)


class Call(Item):
    """A function call."""

    prefix = "fc"

    def __init__(self, item_id: str, place: int, name: str, call_id: str, namespace: str | None = None) -> None:
        super().__init__(item_id, place)
        self._namespace = {"namespace": namespace} if namespace else {}
        self._name = name
        self._call_id = call_id

    def end_events(self, status: str) -> list[Change]:
        """Return the last events, which include the complete arguments."""
        return [self._done(), *super().end_events(status)]

    def _named(self) -> dict[str, str]:
        return {"call_id": self._call_id, **self._namespace, "name": self._name}

    def _fields(self, *, started: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"type": "function_call", **self._named(), "arguments": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002
        return self.change("function_call_arguments.delta", delta=text)

    def _done(self) -> Change:
        return self.change("function_call_arguments.done", name=self._name, arguments=self.text)


class CustomCall(Call):
    """A custom tool call."""

    prefix = "ctc"

    def _fields(self, *, started: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"type": "custom_tool_call", **self._named(), "input": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002
        return self.change("custom_tool_call_input.delta", delta=text)

    def _done(self) -> Change:
        return self.change("custom_tool_call_input.done", input=self.text)
