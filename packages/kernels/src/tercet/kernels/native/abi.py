"""ctypes declarations of the C interface: structs and signatures of `csrc/*.h`, field for field."""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int64, c_void_p
from typing import Any

import torch

from tercet.kernels.ops.activation import Gate

FLOAT32, BFLOAT16, INT8, INT4, BLOCKS, FLOAT_BLOCKS = range(6)
FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
"""Number formats by dtype; int4 and blocks have no dtype."""
SINGLES = 2
"""Value of `ScaleType` in linear.h that holds every scale."""
GATES: dict[Gate, int] = {"silu": 0, "gelu_tanh": 1, "clamped": 2}
"""Values of `Gate` in linear.h."""


Field = tuple[str, Any]


def _ints(*names: str) -> list[Field]:
    return [(name, c_int64) for name in names]


def _pointers(*names: str) -> list[Field]:
    return [(name, c_void_p) for name in names]


class Coding(Structure):
    """`Coding` of linear.h."""

    _fields_ = (*_ints("bits", "block", "scale_type", "zero"),)


class Linear(Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        *_ints("n", "k", "format"),
        *_pointers("panels", "scales", "offsets", "bias"),
        ("coding", Coding),
    )


class Packing(Structure):
    """`Packing` of pack.h."""

    _fields_ = (*_ints("format", "start", "step"), *_pointers("panels", "scales", "offsets"))


class BlockSource(Structure):
    """`BlockSource` of pack.h."""

    _fields_ = (*_ints("n", "k"), ("coding", Coding), *_pointers("codes", "scales", "minimums"))


class Cache(Structure):
    """`Cache` of attention.h."""

    _fields_ = (*_pointers("k", "v"), *_ints("format", "pages", "page_size", "kv_heads", "head_dim", "value_dim"))


class Rows(Structure):
    """`Rows` of attention.h."""

    _fields_ = (
        *_ints("rows", "tokens"),
        *_pointers("query_start", "kv_lens", "page_table"),
        *_ints("page_stride"),
        *_pointers("slot_mapping", "seen"),
    )


class Scoring(Structure):
    """`Scoring` of attention.h."""

    _fields_ = (("scale", c_float), ("softcap", c_float), *_ints("window"), *_pointers("sinks"))


class Filter(Structure):
    """`Filter` of sampling.h."""

    _fields_ = (*_ints("top_k"), ("top_p", c_float), ("floor", c_float))


class Choice(Structure):
    """`Choice` of mixture.h."""

    _fields_ = (
        *_ints("top_k", "sigmoid", "renormalize", "groups", "top_groups", "group_best"),
        ("scale", c_float),
        *_pointers("correction"),
    )


class Mixture(Structure):
    """`Mixture` of mixture.h."""

    _fields_ = (
        *_ints("count", "gate", "shared"),
        ("choice", Choice),
        *[(name, Linear) for name in ("router", "shared_gate")],
        *_pointers("gate_up", "down"),
    )


class Adapters(Structure):
    """`Adapters` of lora.h."""

    _fields_ = (*_ints("rank", "inputs", "outputs", "parts"), *_pointers("sizes", "a", "b"))


class AdapterRows(Structure):
    """`AdapterRows` of lora.h."""

    _fields_ = (*_ints("runs", "places"), *_pointers("table", "ranks"))


class Layer(Structure):
    """`Layer` of decoder.h."""

    _fields_ = (
        *[(name, Linear) for name in ("qkv", "o", "gate_up", "down")],
        *_pointers("mixture", "input_norm", "post_norm", "q_norm", "k_norm", "attention_norm", "mlp_norm"),
        *_pointers("sinks", "rope"),
        ("cache", Cache),
        *_ints("window", "group"),
        *_pointers("qkv_adapters", "o_adapters", "gate_up_adapters", "down_adapters"),
    )


class Model(Structure):
    """`Model` of decoder.h."""

    _fields_ = (
        *_ints("layer_count", "hidden", "heads", "kv_heads", "head_dim", "vocab"),
        *_ints("positions", "rotary_dim"),
        *_pointers("norm", "layers", "embedding"),
        *_ints("embedding_format"),
        ("head", Linear),
        *_ints("gate"),
        *[(name, c_float) for name in ("eps", "embedding_scale", "attention_scale", "softcap")],
    )


class Step(Structure):
    """`Step` of decoder.h."""

    _fields_ = (
        *_ints("tokens", "groups"),
        *_pointers("input_ids", "positions", "rows", "adapted", "embeddings", "places"),
        *_ints("replaced", "parts"),
    )


class ShmCollectives(Structure):
    """`ShmCollectives` of shm_collectives.h."""

    _fields_ = (*_ints("rank", "size", "room"), *_pointers("memory"), *_ints("turn"))


class Recurrence(Structure):
    """`Recurrence` of recurrent.h."""

    _fields_ = (*_ints("heads", "groups", "rows", "columns", "decays"), *_pointers("decay", "states", "out"))


class DeltaRows(Structure):
    """`DeltaRows` of recurrent.h."""

    _fields_ = (*_ints("format", "q_stride", "k_stride", "v_stride"), *_pointers("q", "k", "v", "beta"))


class Convolution(Structure):
    """`Convolution` of causal_conv.h."""

    _fields_ = (
        *_ints("channels", "taps", "format", "stride", "state_format", "silu"),
        *_pointers("weight", "bias", "x", "states", "out"),
    )


class Segment(Structure):
    """`Segment` of segments.h: a row of `Segments.table`."""

    _fields_ = (*_ints("begin", "end", "state", "snapshot"),)


_SHARED = (
    *(Model, Layer, Step, Rows, Scoring, Filter, Packing, BlockSource),
    *(ShmCollectives, Mixture, Adapters, AdapterRows, Recurrence, Segment, DeltaRows, Convolution),
)
"""Structs whose sizes identify a library that was compiled from other sources."""
_I, _P = c_int64, c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "struct_bytes": (_I, []),
    "levels": (_I, []),
    "threads": (_I, []),
    "message": (c_char_p, []),
    "set_threads": (None, [_I]),
    "rmsnorm": (None, [_P, _P, _P, _P, _P, _I, _I, c_float, _I, _I]),
    "gated_rmsnorm": (None, [_P, _P, _P, _I, _P, _I, _I, _I, c_float, _I, _I, _I]),
    "silu_and_mul": (None, [_P, _P, _I, _I, _I]),
    "rope": (None, [_P, _I, _P, _P, _P, _I, _I, _I, _I, _I]),
    "attend": (None, [_P, POINTER(Cache), POINTER(Rows), POINTER(Scoring), _I, _P]),
    "packed_bytes": (_I, [_I, _I, _I]),
    "pack": (None, [_P, _I, _I, _I, POINTER(Packing)]),
    "choose_coding": (None, [POINTER(BlockSource)]),
    "packed_block_bytes": (_I, [_I, _I, POINTER(Coding)]),
    "pack_blocks": (None, [POINTER(BlockSource), POINTER(Coding), POINTER(Packing)]),
    "linear": (None, [POINTER(Linear), _P, _I, _P]),
    "mixture": (None, [POINTER(Mixture), _P, _I, _P]),
    "unpack_rows": (None, [POINTER(Linear), _P, _I, _P]),
    "forward": (None, [POINTER(Model), POINTER(Step), _P]),
    "causal_conv": (None, [POINTER(Convolution), _P, _I]),
    "delta_rule": (None, [POINTER(Recurrence), POINTER(DeltaRows), _P, _I]),
    "state_space_scan": (None, [POINTER(Recurrence), _P, _I, _P, _P, _P]),
    "selective_scan": (None, [POINTER(Recurrence), _P, _I, _P, _P, _P, _P]),
    "argmax": (None, [_P, _I, _I, _P, _P]),
    "apply_bitmask": (None, [_P, _I, _I, _P, _I]),
    "penalize": (None, [_P, _I, _P, _P, _I, _P, _P, _P, _P, _P]),
    "token_logprobs": (None, [_P, _I, _P, _P, _I, _I, _P, _P, _P]),
    "gumbel": (None, [_P, _P, _P, _I, _P]),
    "shm_bytes": (_I, [_I, _I]),
    "sum_over_ranks": (None, [POINTER(ShmCollectives), _P, _I, _I]),
    "gather_from_ranks": (None, [POINTER(ShmCollectives), _P, _I, _P]),
    "sample": (None, [_P, _I, _I, _P, POINTER(Filter), _P, _P]),
}
"""Result and argument types of each function, without its prefix `tercet_`. A result of None is a status: see guard.h.
"""

_ERRORS: dict[int, type[Exception]] = {1: ValueError, 2: MemoryError, 3: RuntimeError}
"""Exception types by status."""


def declare(library: ctypes.CDLL) -> dict[str, Any]:
    """Return the functions of a loaded library.

    Functions with a status return nothing and raise the exception that `_ERRORS` has for it. Raises AttributeError for
    a missing function, or for structs of other sizes.
    """
    functions: dict[str, Any] = {}

    def check(status: int, _function: Callable[..., Any], _arguments: tuple[Any, ...]) -> None:
        if status:
            raise _ERRORS[status](functions["message"]().decode())

    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, f"tercet_{name}")
        function.restype, function.argtypes = result or c_int64, arguments
        if result is None:
            function.errcheck = check
        functions[name] = function
    if functions["struct_bytes"]() != sum(map(ctypes.sizeof, _SHARED)):
        raise AttributeError("it was compiled from other sources")
    return functions
