"""The items of a response's output while they are written, and the events each brings."""

from collections.abc import Sequence
from typing import Any, ClassVar

Change = dict[str, Any]
"""One event, without its `sequence_number`."""
LogprobList = Sequence[dict[str, Any]]


class Item:
    """One item; `place` is its index in the output."""

    prefix: ClassVar[str]
    """What its id begins with."""

    def __init__(self, item_id: str, place: int) -> None:
        self.id = item_id
        self.place = place
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All so far."""
        return "".join(self._texts)

    def shape(self, status: str) -> dict[str, Any]:
        """The item as an object."""
        return {"id": self.id, "status": status, **self._fields(begun=status != "in_progress")}

    def opening(self) -> list[Change]:
        """The events it begins with."""
        return [{"type": "response.output_item.added", "output_index": self.place, "item": self.shape("in_progress")}]

    def more(self, text: str, logprobs: LogprobList = ()) -> list[Change]:
        """The events of more text."""
        self._texts.append(text)
        return [self._delta(text, logprobs)]

    def closing(self, status: str) -> list[Change]:
        """The events it ends with."""
        return [{"type": "response.output_item.done", "output_index": self.place, "item": self.shape(status)}]

    def change(self, kind: str, **fields: Any) -> Change:
        """An event about this item."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.place, **fields}

    def _fields(self, *, begun: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, logprobs: LogprobList) -> Change:
        raise NotImplementedError


class TextItem(Item):
    """An item with one part of content."""

    def opening(self) -> list[Change]:
        """With the part, which is empty as yet."""
        return [*super().opening(), self.change("content_part.added", content_index=0, part=self._part())]

    def closing(self, status: str) -> list[Change]:
        """With the part in whole."""
        part = self.change("content_part.done", content_index=0, part=self._part())
        return [self._done(), part, *super().closing(status)]

    def _part(self) -> dict[str, Any]:
        raise NotImplementedError

    def _done(self) -> Change:
        raise NotImplementedError


class Message(TextItem):
    """Text for the reader."""

    prefix = "msg"

    def __init__(self, item_id: str, place: int) -> None:
        super().__init__(item_id, place)
        self._logprobs: list[dict[str, Any]] = []

    def _fields(self, *, begun: bool) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [self._part()] if begun else []}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def score(self, logprobs: LogprobList) -> None:
        """Log-probabilities of tokens that add nothing to the text; no event tells of them but the last."""
        self._logprobs += logprobs

    def _delta(self, text: str, logprobs: LogprobList) -> Change:
        self._logprobs += logprobs
        return self.change("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def _done(self) -> Change:
        return self.change("output_text.done", content_index=0, text=self.text, logprobs=list(self._logprobs))


class Reasoning(TextItem):
    """What the model thought. It is told in whole and open, so there is neither a summary nor anything encrypted."""

    prefix = "rs"

    def _fields(self, *, begun: bool) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [self._part()] if begun else []}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002 - OpenAI gives none of reasoning
        return self.change("reasoning_text.delta", content_index=0, delta=text)

    def _done(self) -> Change:
        return self.change("reasoning_text.done", content_index=0, text=self.text)


class Call(Item):
    """The call of a function."""

    prefix = "fc"

    def __init__(self, item_id: str, place: int, name: str, call_id: str, namespace: str | None = None) -> None:
        super().__init__(item_id, place)
        self._namespace = {"namespace": namespace} if namespace else {}
        self._name = name
        self._call_id = call_id

    def closing(self, status: str) -> list[Change]:
        """With its arguments in whole."""
        return [self._done(), *super().closing(status)]

    def _named(self) -> dict[str, str]:
        return {"call_id": self._call_id, **self._namespace, "name": self._name}

    def _fields(self, *, begun: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"type": "function_call", **self._named(), "arguments": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002
        return self.change("function_call_arguments.delta", delta=text)

    def _done(self) -> Change:
        return self.change("function_call_arguments.done", name=self._name, arguments=self.text)


class CustomCall(Call):
    """The call of a custom tool."""

    prefix = "ctc"

    def _fields(self, *, begun: bool) -> dict[str, Any]:  # noqa: ARG002
        return {"type": "custom_tool_call", **self._named(), "input": self.text}

    def _delta(self, text: str, logprobs: LogprobList) -> Change:  # noqa: ARG002
        return self.change("custom_tool_call_input.delta", delta=text)

    def _done(self) -> Change:
        return self.change("custom_tool_call_input.done", input=self.text)
