from io import StringIO

import pytest

from tercet.frontend.display import Display, PlainDisplay, TerminalDisplay, choose_display


@pytest.fixture(params=[PlainDisplay, TerminalDisplay])
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
    display = PlainDisplay(stream)
    for done in range(1001):
        display.progress("s", "weights", done, 1000)
    display.progress("s", "KV cache: 7 tokens", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines == [*(f"s: weights {percent}%" for percent in range(0, 101, 10)), "s: KV cache: 7 tokens"]


def test_bars_need_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_display(), PlainDisplay)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert isinstance(choose_display(), TerminalDisplay)
    assert isinstance(choose_display("debug"), PlainDisplay)
