"""Registry of parsers by name: their detection from a chat template, and their composition into one parser."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TypeVar

import msgspec

from tercet.frontend.parsers.machine import Chain, Machine
from tercet.frontend.parsers.port import Parser, ReasoningFormat, ToolFormat, Tools, ToolSpec

F = TypeVar("F", ToolFormat, ReasoningFormat)


def _lazy(kind: type[F], place: str) -> Callable[[], F]:
    """Return a loader of the value at "module:name" in this package, which imports the module when called."""

    def load() -> F:
        module, _, name = place.partition(":")
        value = getattr(import_module(f"{__package__}.{module}"), name)
        if not isinstance(value, kind):
            raise TypeError(f"{place} is no {kind.__name__}")
        return value

    return load


TOOL_FORMATS: dict[str, Callable[[], ToolFormat]] = {
    "apertus": _lazy(ToolFormat, "tools.json_calls.apertus:FORMAT"),
    "cohere": _lazy(ToolFormat, "tools.json_calls.cohere:FORMAT"),
    "deepseek_v3": _lazy(ToolFormat, "tools.headed.deepseek_v3:FORMAT"),
    "deepseek_v31": _lazy(ToolFormat, "tools.headed.deepseek_v3:V31_FORMAT"),
    "deepseek_v32": _lazy(ToolFormat, "tools.tagged.deepseek_v32:FORMAT"),
    "deepseek_v4": _lazy(ToolFormat, "tools.tagged.deepseek_v32:V4_FORMAT"),
    "functiongemma": _lazy(ToolFormat, "tools.tagged.gemma4:FUNCTION_GEMMA"),
    "gemma4": _lazy(ToolFormat, "tools.tagged.gemma4:FORMAT"),
    "generic": _lazy(ToolFormat, "tools.json_calls.generic:FORMAT"),
    "glm": _lazy(ToolFormat, "tools.tagged.glm:FORMAT"),
    "glm47": _lazy(ToolFormat, "tools.tagged.glm:GLM47_FORMAT"),
    "glm4": _lazy(ToolFormat, "tools.headed.glm4:FORMAT"),
    "gpt_oss": _lazy(ToolFormat, "tools.headed.gpt_oss:FORMAT"),
    "granite": _lazy(ToolFormat, "tools.json_calls.granite:FORMAT"),
    "hermes": _lazy(ToolFormat, "tools.json_calls.hermes:FORMAT"),
    "hunyuan": _lazy(ToolFormat, "tools.json_calls.hunyuan:FORMAT"),
    "internlm": _lazy(ToolFormat, "tools.json_calls.internlm:FORMAT"),
    "kimi_k2": _lazy(ToolFormat, "tools.headed.kimi_k2:FORMAT"),
    "lfm2": _lazy(ToolFormat, "tools.pythonic.lfm2:FORMAT"),
    "llama3_json": _lazy(ToolFormat, "tools.json_calls.llama3_json:FORMAT"),
    "llama_pythonic": _lazy(ToolFormat, "tools.pythonic.llama_pythonic:FORMAT"),
    "minimax_m2": _lazy(ToolFormat, "tools.tagged.minimax_m2:FORMAT"),
    "mistral": _lazy(ToolFormat, "tools.json_calls.mistral:FORMAT"),
    "mistral_array": _lazy(ToolFormat, "tools.json_calls.mistral:ARRAY_FORMAT"),
    "nemotron": _lazy(ToolFormat, "tools.json_calls.nemotron:FORMAT"),
    "olmo3": _lazy(ToolFormat, "tools.pythonic.olmo3:FORMAT"),
    "phi4_mini": _lazy(ToolFormat, "tools.json_calls.phi4_mini:FORMAT"),
    "qwen3_coder": _lazy(ToolFormat, "tools.tagged.qwen3_coder:FORMAT"),
    "seed_oss": _lazy(ToolFormat, "tools.tagged.seed_oss:FORMAT"),
    "step3": _lazy(ToolFormat, "tools.tagged.step3:FORMAT"),
}

REASONING_FORMATS: dict[str, Callable[[], ReasoningFormat]] = {
    "apertus": _lazy(ReasoningFormat, "reasoning.apertus:FORMAT"),
    "cohere": _lazy(ReasoningFormat, "reasoning.cohere:FORMAT"),
    "deepseek_r1": _lazy(ReasoningFormat, "reasoning.deepseek_r1:DEEPSEEK_R1"),
    "gemma4": _lazy(ReasoningFormat, "reasoning.gemma4:FORMAT"),
    "generic": _lazy(ReasoningFormat, "reasoning.generic:FORMAT"),
    "gpt_oss": _lazy(ReasoningFormat, "reasoning.gpt_oss:FORMAT"),
    "granite": _lazy(ReasoningFormat, "reasoning.granite:FORMAT"),
    "granite_32": _lazy(ReasoningFormat, "reasoning.granite:GRANITE_32"),
    "hunyuan": _lazy(ReasoningFormat, "reasoning.hunyuan:FORMAT"),
    "kimi_k2": _lazy(ReasoningFormat, "reasoning.deepseek_r1:KIMI_K2"),
    "mistral": _lazy(ReasoningFormat, "reasoning.mistral:FORMAT"),
    "qwen3": _lazy(ReasoningFormat, "reasoning.deepseek_r1:QWEN3"),
    "seed_oss": _lazy(ReasoningFormat, "reasoning.seed_oss:FORMAT"),
}

_TOOL_TEMPLATE_MARKERS: list[tuple[str, tuple[str, ...]]] = [
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("step3", ("<｜tool_calls_begin｜>", "steptml:invoke")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm47", ("{function-name}<arg_key>",)),
    ("glm", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_array", ("[TOOL_CALLS]",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [", "<|im_start|>")),
    ("olmo3", ("<function_calls>", "<functions>")),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("phi4_mini", ("<|tool|>", "<|/tool|>")),
    ("phi4_mini", ("functools[",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("internlm", ("<|plugin|>",)),
    ("hunyuan", ("<tool_calls>",)),
    ("llama_pythonic", ("[func_name1(",)),
    ("llama_pythonic", ("<|python_start|>",)),
    ("llama3_json", ('"parameters": dictionary',)),
    ("llama3_json", ("<|python_tag|>",)),
    ("hermes", ("<tool_call>",)),
    ("glm4", ("[gMASK]<sop>", "metadata")),
]
"""Notation, and texts of a template that uses it. The first notation whose texts are all in the template is used."""

_REASONING_TEMPLATE_MARKERS: list[tuple[str, tuple[str, ...]]] = [
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("gemma4", ("<|channel>thought",)),
    ("cohere", ("<|START_THINKING|>",)),
    ("apertus", ("<|inner_prefix|>",)),
    ("kimi_k2", ("<|im_middle|>", "</think>")),
    ("deepseek_r1", ("<｜Assistant｜><think>",)),
    ("granite_32", ("Here is my thought process:",)),
    ("granite", ("<response></response>", "</think>")),
    ("granite", ("<response>\\n", "</think>")),
    ("hunyuan", ("<answer>", "</think>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
]


class ParserNames(msgspec.Struct, frozen=True):
    """Names of the parsers of one model's answers; None if the model has no notation."""

    reasoning: str | None = None
    tools: str | None = None


def detect(chat_template: str) -> ParserNames:
    """Return the parsers for models with this chat template."""
    return ParserNames(
        _first(_REASONING_TEMPLATE_MARKERS, chat_template), _first(_TOOL_TEMPLATE_MARKERS, chat_template)
    )


def _first(notations: list[tuple[str, tuple[str, ...]]], template: str) -> str | None:
    return next((name for name, markers in notations if all(each in template for each in markers)), None)


def tool_format(name: str) -> ToolFormat:
    """Return one notation of tool calls. Raises ValueError for an unknown name."""
    if name not in TOOL_FORMATS:
        raise ValueError(f"no tool parser is called {name!r}; there are {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]()


def reasoning_format(name: str) -> ReasoningFormat:
    """Return one notation of reasoning. Raises ValueError for an unknown name."""
    if name not in REASONING_FORMATS:
        raise ValueError(f"no reasoning parser is called {name!r}; there are {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]()


def make_parser(names: ParserNames, tools: Iterable[ToolSpec] = (), prompt: str = "") -> Parser | None:
    """Return a parser for one choice, reasoning first and tool calls in the rest; None if there is nothing to parse.

    `prompt` is the end of the rendered prompt, which may have opened the reasoning. If the notation of tool calls
    separates reasoning itself, only its parser is used.
    """
    readers: list[Parser] = []
    calls = tool_format(names.tools) if names.tools else None
    if names.reasoning and not (calls and calls.parses_reasoning):
        readers.append(reasoning_format(names.reasoning).parser(prompt))
    if calls:
        readers.append(tool_parser(calls, tools))
    if len(readers) == 2:
        return Chain(*readers)
    return readers[0] if readers else None


def tool_parser(fmt: ToolFormat, tools: Iterable[ToolSpec] = ()) -> Parser:
    """Return a parser of one choice's calls in this notation."""
    known = Tools(tools)
    return Machine(lambda reader, sink: fmt.grammar(reader, sink, known))
