"""Triton's interpreter, faster, with any numpy, and with an eye on what kernels do to memory (`memory_checker`).

Before every call within a kernel it looks through the whole language for what it has to replace. Here it looks where
something is not replaced yet: when a kernel is launched.

A bound of a loop is an array of one number, which Triton 3.6 makes an integer of as numpy refuses since 2.4.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from packages.kernels.tests.memory_checker import check_memory


@cache
def quicken() -> None:
    """To be called before the first kernel runs; does nothing where kernels are compiled, or absent."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    tl, replace, replace_tensor = interpreter.tl, interpreter._patch_lang, interpreter._patch_lang_tensor

    def is_replaced(language: Any) -> bool:
        return not (tl.core.is_builtin(language.load) or tl.core.is_builtin(language.tensor.__add__))

    def replace_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return interpreter._LangPatchScope() if all(map(is_replaced, languages)) else replace(function)

    def replace_with_bounds(tensor: Any, scope: Any) -> None:
        replace_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang = replace_once
    interpreter._patch_lang_tensor = replace_with_bounds
    check_memory()
