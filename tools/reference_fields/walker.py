"""Config fields that transformers' source declares and reads, found in its syntax trees without imports."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

_OTHER_CONFIGS = {"generation_config", "quantization_config", "peft_config", "cache_config", "load_config"}
"""Names that look like a model's config but hold another one."""
_ROPE = ("rope_parameters", "rope_scaling", "rope_params")
_ACCESSORS = ("get", "pop", "setdefault")
_RUN_WHEN_MADE = re.compile("__post_init__|_?validate|convert_rope_params_to_dict|standardize_rope_params")
"""Methods of a config class that read what config.json holds; the others load and save files."""


@dataclass
class Fields:
    """Fields found in one or several files."""

    declared: dict[str, str] = field(default_factory=dict)
    """Name to the source of its default."""
    read: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of fields (`attribute_map`)."""
    rope: set[str] = field(default_factory=set)
    """Keys of `rope_parameters` and `rope_scaling` that are read."""
    methods: set[str] = field(default_factory=set)
    """Methods of config classes, which look like fields where they are passed on."""

    def add(self, other: "Fields") -> None:
        """Add the fields of another file."""
        self.declared |= other.declared
        self.read |= other.read
        self.aliases |= other.aliases
        self.rope |= other.rope
        self.methods |= other.methods


@cache
def root(package: str = "transformers") -> Path:
    """Return the folder of an installed package. Raises LookupError where it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


@cache
def tree_of(path: str) -> ast.Module:
    """Return the syntax tree of a file of transformers."""
    return ast.parse((root() / path).read_text())


def imports_of(path: str) -> set[str]:
    """Return the modules of transformers that a file imports, as paths below its root without `.py`."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = Path(path).parents[node.level - 1]
            base = folder / node.module.replace(".", "/") if node.module else folder
            names = [""] if node.module else [alias.name for alias in node.names]
            found |= {(base / name).as_posix() for name in names}
    return found


def fields_of(path: str) -> Fields:
    """Return the fields that config classes in a file of transformers declare, and those that its code reads."""
    return fields_in(tree_of(path))


def fields_in(tree: ast.Module) -> Fields:
    """Return the fields that config classes in a syntax tree declare, and those that its code reads."""
    found = Fields()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if _is_config_class(node):
                _add_config_class(node, found)
            elif node.name == "RopeParameters":
                found.rope |= {name for name, _ in _annotated(node)}
        _add_reads(node, found)
    found.read = {name for name in found.read if not name.startswith("_")}
    return found


def _add_config_class(node: ast.ClassDef, found: Fields) -> None:
    found.declared.update((name, ast.unparse(value) if value else "") for name, value in _annotated(node))
    for statement in node.body:
        target = _assigned(statement)
        if target == "attribute_map" and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
            found.aliases.update(ast.literal_eval(statement.value))
        if target in ("default_theta", "default_rope_type") and isinstance(statement, ast.Assign | ast.AnnAssign):
            found.declared[target] = ast.unparse(statement.value) if statement.value else ""
    methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef) if not _is_property(method)}
    found.methods |= methods
    assigned = {leaf.attr for leaf in ast.walk(node) if _is_self_attribute(leaf, ast.Store)}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and _RUN_WHEN_MADE.match(statement.name):
            found.read |= _own_reads(statement) - methods - assigned


def _own_reads(method: ast.FunctionDef) -> set[str]:
    """Return the fields that a method of a config class reads from its object and its constructor arguments."""
    found: set[str] = set()
    for leaf in ast.walk(method):
        if isinstance(leaf, ast.Call) and leaf.args:
            if isinstance(leaf.func, ast.Attribute) and leaf.func.attr in _ACCESSORS:
                found |= _constant(leaf.args[:1]) if _named(leaf.func.value) == "kwargs" else set()
            elif _is_getattr(leaf) and _named(leaf.args[0]) == "self":
                found |= _constant(leaf.args[1:2])
        elif isinstance(leaf, ast.Compare) and _named(leaf.comparators[0]) == "kwargs":
            found |= _constant([leaf.left])
        elif _is_self_attribute(leaf, ast.Load):
            found.add(leaf.attr)
    return found


def _add_reads(node: ast.AST, found: Fields) -> None:
    """Add the fields that one node reads, without its children."""
    for child in ast.iter_child_nodes(node):
        called = isinstance(node, ast.Call) and child is node.func
        if called or not isinstance(child, ast.Attribute) or not isinstance(child.ctx, ast.Load):
            continue
        if child.attr != "setter" and _is_config(child.value):
            found.read.add(child.attr)
    if isinstance(node, ast.Call) and node.args:
        if _is_getattr(node) and _is_config(node.args[0]):
            found.read |= _constant(node.args[1:2])
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _ACCESSORS and _is_rope(node.func.value):
            found.rope |= _constant(node.args[:1])
    elif isinstance(node, ast.Subscript) and _is_rope(node.value):
        found.rope |= _constant([node.slice])
    elif isinstance(node, ast.Compare) and _is_rope(node.comparators[0]):
        found.rope |= _constant([node.left])


def _is_config_class(node: ast.ClassDef) -> bool:
    bases = [_named(base) for base in node.bases]
    return node.name.endswith("ConfigMixin") or any(
        base.endswith(("PreTrainedConfig", "ConfigMixin")) for base in bases
    )


def _is_property(method: ast.FunctionDef) -> bool:
    return any(_named(decorator) in ("property", "setter") for decorator in method.decorator_list)


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            yield _named(statement.target), statement.value


def _assigned(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign):
        return _named(statement.targets[0])
    return _named(statement.target) if isinstance(statement, ast.AnnAssign) else ""


def _is_self_attribute(node: ast.AST, context: type[ast.expr_context]) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and _named(node.value) == "self" and isinstance(node.ctx, context)


def _is_getattr(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1


def _is_config(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _named(node.func).endswith("get_text_config")
    if isinstance(node, ast.Subscript):
        return _named(node.value) == "per_layer_config"
    name = _named(node)
    return (name == "config" or name.endswith("_config")) and name not in _OTHER_CONFIGS


def _is_rope(node: ast.expr) -> bool:
    node = node.value if isinstance(node, ast.Subscript) else node
    return any(word in _named(node) for word in _ROPE)


def _named(node: ast.AST) -> str:
    """Return the last name of a name or of an attribute."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constant(nodes: list[ast.expr]) -> set[str]:
    """Return the strings among some expressions, and those of conditional ones."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.IfExp):
            found |= _constant([node.body, node.orelse])
    return found
