"""The lists of SGLang's server options and endpoints, read from its source.

`python -m tools.sglang_names DIRECTORY` writes `cli/launch_server/server_args.tsv` and `tools/sglang_endpoints.txt`
from an unpacked sglang package, such as what `pip download sglang --no-deps` and `unzip` leave. Nothing of SGLang is
imported. A line of the first has the group (SGLang's file), the names, what follows the option, and its default.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tercet.frontend.cli.launch_server.translation import ServerArg

OPTIONS = Path(__file__).parents[1] / "packages/frontend/src/tercet/frontend/cli/launch_server/server_args.tsv"
ENDPOINTS = Path(__file__).parent / "sglang_endpoints.txt"
_SERVER_FILES = ("http_server.py", "v1_loads.py", "elastic_ep.py")
"""Files below `srt/entrypoints` with the endpoints of the HTTP server."""
_ARGUMENTS = {0: "flag", "?": "optional", "*": "values", "+": "values"}
"""Words for argparse's `nargs`; without it, one value follows."""


def _line(arg: ServerArg) -> str:
    return "\t".join((arg.group, ",".join(arg.names), arg.takes, arg.default))


def server_args(package: Path) -> list[ServerArg]:
    """Return the options of a sglang package. Raises OSError for a directory that has none."""
    source = package / "srt"
    found = [arg for path in sorted((source / "arg_groups/fields").glob("*.py")) for arg in _of_fields(path)]
    declared = {name for arg in found for name in arg.names}
    added = _of_parser(ast.parse((source / "server_args.py").read_text(encoding="utf-8")))
    return found + [arg for arg in added if arg.names[0] not in declared]


def _of_fields(path: Path) -> Iterator[ServerArg]:
    """Yield the options that annotated fields declare: `name: A[type, Arg(...)] = default`."""
    for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        match each.annotation:
            case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, *metadata])):
                given = {key.arg: key.value for call in metadata if isinstance(call, ast.Call) for key in call.keywords}
                if "no_cli" in given:
                    continue
                name = _literal(given.get("cli_name")) or "--" + each.target.id.replace("_", "-")
                names, takes = (name, *(_literal(given.get("aliases")) or ())), _takes(ast.unparse(kind), given)
                if _is_named(given.get("action"), "BooleanOptionalAction"):
                    names = (*names, *(f"--no-{each.removeprefix('--')}" for each in names))
                yield ServerArg(path.stem.strip("_"), names, takes, _text(each.value))


def _takes(kind: str, given: dict[str | None, ast.expr]) -> str:
    """Return what follows an option with a field of this type, by the rules of SGLang's parser."""
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if _is_named(given.get("action"), "BooleanOptionalAction"):
        return "flag"
    count = _literal(given.get("nargs")) or (_literal(given.get("action_kwargs"), names=True) or {}).get("nargs")
    if count is None and "type_parser" not in given:
        count = 0 if kind == "bool" else "+" if kind.startswith("List[") else None
    return _ARGUMENTS.get(count, "value")


def _of_parser(tree: ast.Module) -> Iterator[ServerArg]:
    """Yield the options of the calls `parser.add_argument(...)`."""
    for each in ast.walk(tree):
        match each:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[_, *_]):
                given = {key.arg: key.value for key in each.keywords}
                flag = _literal(given.get("action")) == "store_true" or _is_named(
                    given.get("action"), "DeprecatedStoreTrueAction"
                )
                names = tuple(str(_literal(name)) for name in each.args)
                yield ServerArg("server_args", names, "flag" if flag else "value", "")


def _is_named(node: ast.expr | None, name: str) -> bool:
    return node is not None and ast.unparse(node).endswith(name)


def _literal(node: ast.expr | None, *, names: bool = False) -> Any:
    """Return the value of a literal, None for other expressions; with `names`, names in it stand for themselves."""
    if node is None:
        return None
    if names:
        node = _NameToText().visit(node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


class _NameToText(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(node.id), node)


def _text(node: ast.expr | None) -> str:
    value = _literal(node)
    return "" if value is None or isinstance(value, bool) else str(value)


def endpoints(package: Path) -> list[tuple[str, str]]:
    """Return method and path of the endpoints of a sglang package. Raises OSError for a directory that has none."""
    texts = [(package / "srt/entrypoints" / name).read_text(encoding="utf-8") for name in _SERVER_FILES]
    return [found for text in texts for node in ast.walk(ast.parse(text)) for found in _routes(node)]


def _routes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the routes of a decorator such as `@app.get("/health")` or `@app.api_route("/x", methods=["POST"])`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="app" | "router"), attr=verb), args=[ast.Constant(value=str(path)), *_]
        ) if path.startswith("/"):
            methods = next((_literal(key.value) for key in node.keywords if key.arg == "methods"), [verb.upper()])
            yield from ((method, path) for method in methods)


def main() -> int:
    """Write the lists, or say that the directory has none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="directory of the unpacked package: it has srt/server_args.py")
    try:
        package = parser.parse_args().package
        found, routes = server_args(package), endpoints(package)
    except OSError as error:
        print(f"no server: {error}", file=sys.stderr)
        return 1
    OPTIONS.write_text("".join(f"{_line(arg)}\n" for arg in found), encoding="utf-8")
    ENDPOINTS.write_text("".join(f"{method} {path}\n" for method, path in routes), encoding="utf-8")
    print(f"{len(found)} options: {OPTIONS}\n{len(routes)} endpoints: {ENDPOINTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
