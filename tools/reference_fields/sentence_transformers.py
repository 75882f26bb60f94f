"""The fields that sentence-transformers reads of the files beside a model.

Run python -m tools.reference_fields.sentence_transformers [--check].
"""

import ast
import sys
from pathlib import Path

from tools.reference_fields.listing import class_of, keys_read, main, parameters, tree_of

FILE = Path(__file__).with_suffix(".json")
_PACKAGE = "sentence_transformers"
_MODULES = {
    "Transformer": "base/modules/transformer.py",
    "Pooling": "sentence_transformer/modules/pooling.py",
    "Normalize": "base/modules/normalize.py",
}
_MODELS = ("base/model.py", "sentence_transformer/model.py", "cross_encoder/model.py")
_NOT_IN_FILES = {"backend", "model_name_or_path"}
"""Parameters that the caller passes."""


def _sentence_transformers() -> dict[str, set[str]]:
    found = {name: _module(name, path) for name, path in _MODULES.items()}
    models = [tree_of(_PACKAGE, path) for path in _MODELS]
    found["modules.json"] = set().union(*(keys_read(tree, "module_config") for tree in models))
    found["settings"] = set().union(*(keys_read(tree, "model_config") | _written(tree) for tree in models))
    found["files of the transformer"] = {
        node.value
        for node in ast.walk(tree_of(_PACKAGE, _MODULES["Transformer"]))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("_config.json")
        if node.value.startswith("sentence_")
    }
    return found


def _module(name: str, path: str) -> set[str]:
    """Return the parameters of a module's constructor, with their older names."""
    tree = tree_of(_PACKAGE, path)
    renamed = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target) in ("_OLD_TO_NEW", "_LEGACY_POOLING_MODE_KWARGS", "config_key_renames")
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return parameters(class_of(tree, name)) - _NOT_IN_FILES | renamed


def _written(tree: ast.Module) -> set[str]:
    """Return the settings that a model writes."""
    writers = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_get_model_config"
    ]
    keys = {
        key.value
        for writer in writers
        for node in ast.walk(writer)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return keys - {"sentence_transformers", "transformers", "pytorch"} | set().union(
        *(keys_read(writer, "config") for writer in writers)
    )


WALKS = {_PACKAGE: _sentence_transformers}

if __name__ == "__main__":
    sys.exit(main(FILE, WALKS))
