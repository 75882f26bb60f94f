"""Triton's interpreter, faster, with any numpy, and with an eye on what kernels do to memory (`memory_checker`).

Before every call within a kernel it looks through the whole language for what it has to replace, and restores that
after every launch. Here the language is replaced once for each module that has kernels, and stays so: this process
compiles no kernel. Types of one shape share what is derived from it; nothing is computed for assertions that are off.

A bound of a loop is an array of one number, which Triton 3.6 makes an integer of as numpy refuses since 2.4.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from packages.kernels.tests.memory_checker import check_memory


@cache
def quicken() -> None:
    """Speed the interpreter up before the first kernel runs; do nothing where kernels are compiled, or absent."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    _replace_language_once(interpreter)
    _share_shapes(interpreter.tl.core)
    _look_up_dtypes(interpreter)
    _pass_host_memory(interpreter.GridExecutor)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are looked for in vain only while assertions are off"
    builder.options = replace(builder.options, sanitize_overflow=False)
    check_memory()


def _replace_language_once(interpreter: Any) -> None:
    replace_language, replace_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    semantic, replaced = interpreter.interpreter_semantic, set[int]()

    def replace_once(function: Any) -> Any:
        if id(function.__globals__) not in replaced:
            replace_language(function)
            replaced.add(id(function.__globals__))
        return interpreter._LangPatchScope()

    def replace_with_bounds(tensor: Any, scope: Any) -> None:
        replace_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def replace_member(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # its wrapper only asks whether there is a `_semantic`

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_lang, interpreter._patch_lang_tensor = replace_once, replace_with_bounds
    interpreter._patch_attr = replace_member


def _share_shapes(core: Any) -> None:
    """Make the shape of a type, and of the tensors that have it, once for each shape."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    several = (list, tuple, core.tuple)

    @cache
    def known(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        numel = core.validate_block_shape(sizes)
        return core.tuple(sizes), numel, constexpr(numel), core.tuple([constexpr(size) for size in sizes])

    scalar = constexpr(1), core.tuple([])

    def type_of(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        self.element_ty = element_ty
        self.shape, self.numel, *self.constants = known(sizes)

    def tensor_of(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.constants if type.is_block() else scalar

    def unwrapped(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return unwrap(value) if isinstance(value, several) else value

    core.block_type.__init__, core.tensor.__init__ = type_of, tensor_of
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core._unwrap_if_constexpr = unwrapped


def _look_up_dtypes(interpreter: Any) -> None:
    of_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = of_type(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of


def _pass_host_memory(executor: Any) -> None:
    """Let kernels work on tensors of the CPU themselves, whose memory is copied otherwise, if only onto itself."""
    copy, copy_back = executor._init_args_hst, executor._restore_args_dev

    def arguments(self: Any, args: Any, options: Any) -> Any:
        tensors = [value for value in [*args, *options.values()] if not isinstance(value, int | float)]
        here = all(isinstance(value, torch.Tensor) and value.is_cpu for value in tensors if value is not None)
        return (args, options) if here else copy(self, args, options)

    def results(self: Any, args: Any, args_here: Any, options: Any, options_here: Any) -> None:
        if args_here is not args:
            copy_back(self, args, args_here, options, options_here)

    executor._init_args_hst, executor._restore_args_dev = arguments, results
