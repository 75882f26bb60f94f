"""Lists of fields, each from one package's source, checked in beside the tool that generates them."""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

Listing = dict[str, dict[str, list[str]]]
"""Fields by package and object: those that the package reads, sorted."""


def tree_of(package: str, path: str) -> ast.Module:
    """Return the syntax tree of a file of an installed package; nothing of it is imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    """Return the class of a name."""
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        raise LookupError(f"there is no class {name}: the reference has changed, and so must this tool")
    return found


def declared(owner: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares with a type."""
    return {
        node.target.id
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node)
    }


def parameters(owner: ast.ClassDef, method: str = "__init__") -> set[str]:
    """Return the names of a method's parameters, and of the further ones that it takes by `kwargs`."""
    found = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    arguments = [*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs]
    return {argument.arg for argument in arguments} - {"self", "cls"} | keys_read(found, "kwargs")


def keys_read(tree: ast.AST, *names: str) -> set[str]:
    """Return the texts by which the mappings of these names are read: x["a"], x.get("a"), "a" in x."""
    return {key for node in ast.walk(tree) for owner, key in _key_reads(node) if owner in names}


def _key_reads(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str(key))):
            yield owner, key
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=owner), attr="get" | "pop" | "setdefault"),
            args=[ast.Constant(value=str(key)), *_],
        ):
            yield owner, key
        case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In()], comparators=[ast.Name(id=owner)]):
            yield owner, key


def attributes_read(tree: ast.AST, *names: str) -> set[str]:
    """Return the attributes that are read of variables of these names, or of such attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                found |= {name} if owner in names else set()
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=owner), ast.Constant(value=str(name)), *_]):
                found |= {name} if owner in names else set()
    return {name for name in found if not name.startswith("_")}


def stored(file: Path) -> Listing:
    """Return the checked-in list."""
    listing: Listing = json.loads(file.read_text())["fields"] if file.is_file() else {}
    return listing


def main(file: Path, walks: dict[str, Callable[[], dict[str, set[str]]]]) -> int:
    """Write the list, or return 1 and print the differences if `--check` finds any.

    Entries of packages that are not installed are kept.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    found = walked(walks)
    if check:
        lines = differences(stored(file), found)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return int(bool(lines))
    versions = json.loads(file.read_text())["versions"] if file.is_file() else {}
    versions |= {package: version(package.replace("_", "-")) for package in found}
    content = {"versions": versions, "fields": stored(file) | found}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return 0


def walked(walks: dict[str, Callable[[], dict[str, set[str]]]]) -> Listing:
    """Return the lists of those packages that are installed."""
    found: Listing = {}
    for package, walk in walks.items():
        try:
            version(package.replace("_", "-"))
        except PackageNotFoundError:
            continue
        found[package] = {name: sorted(fields) for name, fields in walk().items()}
    return found


def differences(left: Listing, right: Listing) -> list[str]:
    """Return a line for each field that one of two lists of a package has and the other has not."""
    lines = []
    for package, objects in right.items():
        known = left.get(package, {})
        for name in sorted(known.keys() | objects):
            before, after = {*known.get(name, [])}, {*objects.get(name, [])}
            lines += [f"{package}: {name}: {field} is new" for field in sorted(after - before)]
            lines += [f"{package}: {name}: {field} is gone" for field in sorted(before - after)]
    return lines
