"""The fields of quantization_config that transformers and compressed-tensors read.

Run python -m tools.reference_fields.quantization [--check].
"""

import sys
from pathlib import Path

from tools.reference_fields.listing import class_of, declared, main, parameters, tree_of

FILE = Path(__file__).with_suffix(".json")
_OWNERS = {
    "gptq": ["GPTQConfig"],
    "awq": ["AwqConfig", "GPTQConfig"],
    "fp8": ["FineGrainedFP8Config"],
    "mxfp4": ["Mxfp4Config"],
    "compressed-tensors": ["CompressedTensorsConfig"],
}
_COMPRESSED_TENSORS = {
    "quant_config": "QuantizationConfig",
    "quant_scheme": "QuantizationScheme",
    "quant_args": "QuantizationArgs",
}
_QUANT_METHOD = {"quant_method"}


def _transformers() -> dict[str, set[str]]:
    tree = tree_of("transformers", "utils/quantization_config.py")
    return {
        method: set().union(_QUANT_METHOD, *(parameters(class_of(tree, owner)) for owner in owners))
        for method, owners in _OWNERS.items()
    }


def _compressed_tensors() -> dict[str, set[str]]:
    files = {
        "quant_config": "QuantizationConfig",
        "quant_scheme": "QuantizationScheme",
        "quant_args": "QuantizationArgs",
    }
    return {
        owner: declared(class_of(tree_of("compressed_tensors", f"quantization/{file}.py"), owner))
        for file, owner in files.items()
    }


WALKS = {"transformers": _transformers, "compressed_tensors": _compressed_tensors}

if __name__ == "__main__":
    sys.exit(main(FILE, WALKS))
