import json
import threading
from io import StringIO

import pytest

from tercet.frontend.supervisor.options import ServeOptions
from tercet.frontend.supervisor.terminal import (
    Display,
    InteractiveTerminal,
    JsonTerminal,
    PlainTerminal,
    QueuedTerminal,
    choose_terminal,
)


@pytest.fixture(params=[PlainTerminal, InteractiveTerminal])
def shown(request: pytest.FixtureRequest) -> tuple[Display, StringIO]:
    stream = StringIO()
    return request.param(stream), stream


def test_lines_are_shown_as_they_are(shown: tuple[Display, StringIO]) -> None:
    display, stream = shown
    long = "[red]no markup[/red] " + "x" * 300
    display.line(long)
    display.progress("scheduler-0", "weights [bold]", 1, 10)
    display.line("between")
    display.close()
    assert long + "\n" in stream.getvalue()
    assert "between\n" in stream.getvalue()


def test_progress_may_end_and_begin_again(shown: tuple[Display, StringIO]) -> None:
    display, stream = shown
    for text in ("first", "second"):
        display.progress("a", text, 5, 10)
        display.progress("b", text, 0, 0)
        assert f"b: {text}\n" in stream.getvalue()
        display.done("a")
        display.done("b")
        display.done("nobody")
    display.close()
    display.line("end")
    assert stream.getvalue().endswith("end\n")


def test_plain_progress_has_a_line_for_every_tenth() -> None:
    stream = StringIO()
    display = PlainTerminal(stream)
    for done in range(1001):
        display.progress("s", "weights", done, 1000)
    display.progress("s", "KV cache: 7 tokens", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines == [*(f"s: weights {percent}%" for percent in range(0, 101, 10)), "s: KV cache: 7 tokens"]


class StoppedTerminal(StringIO):
    """Terminal that blocks until released."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.goes_on.wait(30)
        return super().write(text)


def test_a_stopped_terminal_does_not_block_and_reports_dropped_lines() -> None:
    stream = StoppedTerminal()
    display = QueuedTerminal(PlainTerminal(stream))
    for number in range(3000):
        display.output("s", f"line {number}")
    display.line("tercet: s died")
    shown = threading.Event()
    display.call(shown.set)
    stream.goes_on.set()
    assert shown.wait(30)
    display.line("and on")
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "s: line 0"
    assert 1000 <= len(lines) <= 1005
    left_out = 3000 - sum(line.startswith("s: ") for line in lines)
    assert lines[-3:] == [f"tercet: {left_out} lines came too fast and were left out", "tercet: s died", "and on"]


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file.")])
def test_a_screen_that_nobody_reads_any_more_ends_nothing(error: Exception) -> None:
    class Gone(StringIO):
        def write(self, text: str) -> int:
            raise error

    display = QueuedTerminal(PlainTerminal(Gone()))
    display.line("lost")
    reached = threading.Event()
    display.call(reached.set)
    assert reached.wait(30)
    display.close()


def test_bars_need_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_terminal(ServeOptions()), PlainTerminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert isinstance(choose_terminal(ServeOptions()), InteractiveTerminal)
    assert isinstance(choose_terminal(ServeOptions(log_level="debug")), PlainTerminal)
    assert isinstance(choose_terminal(ServeOptions(log_format="json")), JsonTerminal)


def test_every_line_of_a_json_log_is_an_object() -> None:
    stream = StringIO()
    display = JsonTerminal(stream)
    own = '{"time":"t","level":"INFO","part":"scheduler-0","message":"loaded"}'
    display.output("scheduler-0", own)
    display.output("scheduler-0", '{"time":"t","message":"cut')
    display.line("tercet: error: no part is left")
    display.line("tercet: warning: s died: Fatal Python error: Aborted")
    display.progress("scheduler-0", "weights", 1, 10)
    first, *others = stream.getvalue().splitlines()
    assert first == own
    assert [(each["part"], each["level"], each["message"]) for each in map(json.loads, others)] == [
        ("scheduler-0", "INFO", '{"time":"t","message":"cut'),
        ("supervisor", "ERROR", "tercet: error: no part is left"),
        ("supervisor", "WARNING", "tercet: warning: s died: Fatal Python error: Aborted"),
        ("supervisor", "INFO", "scheduler-0: weights 10%"),
    ]
