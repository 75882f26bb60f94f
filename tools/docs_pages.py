"""Tables of the documentation that are generated from the code.

`python -m tools.docs_pages` writes them between their markers in `docs/`; `--check` fails if a page differs.
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tercet.detokenizer.config import DetokenizerConfig
from tercet.frontend.api import metrics
from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.cli.launch_server.translation import ServerArg, server_args
from tercet.frontend.config.config import HttpConfig, LinkConfig, ServingConfig, StoreConfig, TelemetryOptions
from tercet.frontend.manager import series
from tercet.frontend.manager.gateway_series import GATEWAY_SERIES, ModelTotals
from tercet.frontend.parsers.families import FAMILIES
from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tercet.frontend.supervisor.options import FrontendOptions, SchedulerOptions, ServeOptions
from tercet.scheduler.architectures import MODULES, WRAPPERS, embedders, generators, is_encoder
from tercet.scheduler.config import ExpertOptions, HostOptions, ModelOptions, ProcessOptions, ScheduleOptions
from tools.sglang_names import ENDPOINTS

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: str, rows: list[list[str]]) -> str:
    """Return a Markdown table. `head` holds the column titles, separated by commas."""
    titles = [title.strip() for title in head.split(",")]
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def options_table(config: type) -> str:
    """Return the table of an options dataclass: flag, values, default and description."""
    hints, texts = get_type_hints(config), attribute_docstrings(config)
    rows = [
        [_flag(field.name), _values(hints[field.name]), _default(field), texts.get(field.name, "")]
        for field in fields(config)
        if field.name in texts
    ]
    return table("option, values, default, description", rows)


def attribute_docstrings(config: type) -> dict[str, str]:
    """Return the string that follows each annotated field of a class or its bases, by field name."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for base in config.__bases__:
        found |= {} if base is object else attribute_docstrings(base)
    for line, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(following, ast.Expr):
            text = ast.literal_eval(following.value)
            found[line.target.id] = " ".join(str(text).split())
    return found


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _values(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    if get_origin(hint) is tuple:
        return "text, repeatable"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{each.value}`" for each in hint)
    return {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}[hint]


def _default(field: "Field[Any]") -> str:
    value = field.default
    if value is MISSING:
        return "role and host name"
    if isinstance(value, Enum):
        value = value.value
    if value is False or value is True:
        return "on" if value else "off"
    return "" if value in (None, "", ()) else f"`{value}`"


def architectures_table() -> str:
    """Return the architectures with a module of their own, and the output of each."""
    rows = [
        [f"`{name}`", _module(name), "text" + (", vectors, scores" if _encodes(name) else "")]
        for name in sorted(generators(), key=str.lower)
    ]
    return table("architecture in config.json, module, output", rows)


def _encodes(architecture: str) -> bool:
    return architecture.removesuffix("ForCausalLM") in embedders()


def _module(architecture: str) -> str:
    texts = WRAPPERS.get(architecture, {"": architecture})
    modules = dict.fromkeys(f"`models/families/{MODULES[text]}.py`" for text in texts.values())
    return ", ".join(modules)


def encoders_table() -> str:
    """Return the bidirectional families, which embed and classify."""
    rows = [[f"`{name}...`", _module(f"{name}Model")] for name in filter(is_encoder, embedders())]
    return table("architectures that begin with, module", rows)


def parsers_table() -> str:
    """Return the names of `--tool-call-parser` and `--reasoning-parser`."""
    rows = [
        ["`--tool-call-parser`", ", ".join(f"`{name}`" for name in TOOL_FORMATS)],
        ["`--reasoning-parser`", ", ".join(f"`{name}`" for name in REASONING_FORMATS)],
    ]
    return table("option, names", rows)


def notations_table() -> str:
    """Return the notations of tool calls and reasoning that the published templates of each family use."""
    rows = [[each.models, _notation(each.tools), _notation(each.reasoning)] for each in FAMILIES]
    return table("models, tool calls, reasoning", rows)


def _notation(name: str | None) -> str:
    return "none" if name is None else f"`{name}`"


def frontend_metrics_table() -> str:
    """Return the series that frontends count, with labels and descriptions."""
    rows = [
        _series_row(name, family.kind.__name__, ("frontend", *family.labels), family.text)
        for name, family in series.FAMILIES.items()
    ]
    rows += [
        _series_row(name, "HistogramMetricFamily", ("frontend", "model"), text)
        for name, (_, text) in series._HISTOGRAMS.items()
    ]
    return table("series, type, labels, description", rows)


def scheduler_metrics_table() -> str:
    """Return the series of schedulers. All frontends report the same values."""
    labels = ("scheduler", "model")
    rows = [_series_row(name, "GaugeMetricFamily", labels, text) for name, text in metrics._GAUGES.items()]
    counters = {**metrics._COUNTERS, **metrics._STEPS}
    rows += [_series_row(name, "CounterMetricFamily", labels, text) for name, text in counters.items()]
    return table("series, type, labels, description", rows)


def gateway_metrics_table() -> str:
    """Return the series under other servers' names."""
    rows = [
        [f"`{name}`", ", ".join(f"`{label}`" for label in ("model_name", *each.labels(ModelTotals()))), each.text]
        for name, each in GATEWAY_SERIES.items()
    ]
    return table("series, labels, description", rows)


def _series_row(name: str, family: str, labels: tuple[str, ...], text: str) -> list[str]:
    kind = family.removesuffix("MetricFamily").lower()
    suffix = "_total" if kind == "counter" else ""
    return [f"`tercet_{name}{suffix}`", kind, ", ".join(f"`{label}`" for label in labels), text]


def routes_table() -> str:
    """Return every route of the HTTP API, grouped by API."""
    rows = [
        [operation.tag, f"`{method} {path}`", operation.summary]
        for (method, path), operation in sorted(OPERATIONS.items(), key=lambda item: item[1].tag)
    ]
    return table("API, route, description", rows)


def sglang_options_table() -> str:
    """Return the options of SGLang's server that `tercet launch_server` takes."""
    return table("SGLang, Tercet, values", [_sglang_option(arg) for arg in server_args() if arg.alias or arg.ignored])


def _sglang_option(arg: ServerArg) -> list[str]:
    if (alias := arg.alias) is None:
        return [_codes(arg.names), "ignored", arg.ignored]
    return [_codes(arg.names), "same" if alias.ours in arg.names else f"`{alias.ours}`", alias.values]


SGLANG_ABSENT = {
    "/ready": "`/health`",
    "/ping": "`/health`",
    "/set_internal_state": "options are set when the server starts",
    "/*_external_corpus": "tokens are drafted from the prompt and the output alone",
    "/list_external_corpora": "tokens are drafted from the prompt and the output alone",
    "/*hicache*": "there is one KV cache, in the memory of the model",
    "/set_trace_level": "`--log-level`",
    "/configure_logging": "`--log-level`",
    "/*expert_distribution_record": "`/metrics`",
    "/*remote_instance*": "`/update_weights_from_disk`",
    "/update_weights_from_ipc": "`/update_weights_from_tensor`",
    "/*_weight_update": "`flush_cache` of `/update_weights_from_tensor`",
    "/slow_down": "`--max-running-requests`",
    "/pd_role_switch": "prefill and decode run in one scheduler",
    "/load_lora_adapter_from_tensors": "`/load_lora_adapter`",
    "/*_elastic_ep": "`--dp-size`",
    "/v1/realtime": "`/v1/audio/transcriptions`, which streams",
    "/v1/decisions": "`/v1/score`",
    "/v1/systemone": "`/v1/score`",
    "/invocations": "`/v1/chat/completions`",
    "/dumper/*": "`--scheduler.event-log`",
}
"""Equals of SGLang's endpoints that are missing here, by patterns of their paths."""


def sglang_endpoints_table() -> str:
    """Return the endpoints of SGLang's server, each with its equal."""
    methods: dict[str, list[str]] = {}
    for line in ENDPOINTS.read_text(encoding="utf-8").splitlines():
        method, path = line.split()
        methods.setdefault(path, []).append(method)
    return table("SGLang, Tercet", [[f"`{path}`", _sglang_endpoint(path, each)] for path, each in methods.items()])


def _sglang_endpoint(path: str, methods: list[str]) -> str:
    served = [method for method in methods if (method, path) in OPERATIONS]
    if served:
        return "same" if served == methods else f"same, by {' and '.join(served)} alone"
    return f"absent: {next(instead for pattern, instead in SGLANG_ABSENT.items() if fnmatchcase(path, pattern))}"


def sglang_refused_table() -> str:
    """Return the options of SGLang's server that `tercet launch_server` refuses, by what to use instead."""
    refused: dict[str, list[str]] = {}
    for arg in server_args():
        if not (arg.alias or arg.ignored):
            refused.setdefault(arg.instead, []).extend(arg.names)
    return table("instead, options of SGLang", [[instead, _codes(names)] for instead, names in refused.items()])


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _options(config: type) -> Callable[[], str]:
    return lambda: options_table(config)


TABLES: dict[str, Callable[[], str]] = {
    "architectures": architectures_table,
    "encoders": encoders_table,
    "parsers": parsers_table,
    "notations": notations_table,
    "metrics-frontend": frontend_metrics_table,
    "metrics-scheduler": scheduler_metrics_table,
    "metrics-gateway": gateway_metrics_table,
    "routes": routes_table,
    "sglang-options": sglang_options_table,
    "sglang-endpoints": sglang_endpoints_table,
    "sglang-refused": sglang_refused_table,
    "serve": _options(ServeOptions),
    "serve-frontend": _options(FrontendOptions),
    "serve-scheduler": _options(SchedulerOptions),
    "frontend-link": _options(LinkConfig),
    "frontend-http": _options(HttpConfig),
    "frontend-serving": _options(ServingConfig),
    "frontend-store": _options(StoreConfig),
    "frontend-telemetry": _options(TelemetryOptions),
    "scheduler-process": _options(ProcessOptions),
    "scheduler-model": _options(ModelOptions),
    "scheduler-schedule": _options(ScheduleOptions),
    "scheduler-hosts": _options(HostOptions),
    "scheduler-experts": _options(ExpertOptions),
    "detokenizer": _options(DetokenizerConfig),
}
"""Tables by the name that their marker has in a page: `<!-- generated: NAME -->` to `<!-- end -->`."""


def with_tables(page: str) -> str:
    """Return a page with the present tables between its markers."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", page)


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield each page whose tables differ from the code, and its new text."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (written := with_tables(page)) != page:
            yield path, written


def main() -> int:
    """Write the tables, or with `--check` only report pages that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is outdated")
    check = parser.parse_args().check
    status = 0
    for path, written in outdated():
        print(f"{'outdated' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if check:
            status = 1
        else:
            path.write_text(written, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
