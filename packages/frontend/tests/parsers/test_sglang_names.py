from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tercet.frontend.parsers.sglang_names import REASONING_PARSERS, TOOL_PARSERS


def test_the_parsers_exist_and_no_name_means_two() -> None:
    assert set(TOOL_PARSERS.values()) <= set(TOOL_FORMATS)
    assert set(REASONING_PARSERS.values()) <= set(REASONING_FORMATS)
    assert not TOOL_PARSERS.keys() & TOOL_FORMATS.keys()
    assert not REASONING_PARSERS.keys() & REASONING_FORMATS.keys()
