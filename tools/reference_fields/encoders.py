"""The fields of an encoder's config.json that transformers declares and reads.

Run python -m tools.reference_fields.encoders [--check].
"""

import sys
from pathlib import Path

from tools.reference_fields.listing import attributes_read, class_of, declared, keys_read, main, tree_of

FILE = Path(__file__).with_suffix(".json")
_CONFIGS = {
    "bert": "BertConfig",
    "roberta": "RobertaConfig",
    "xlm_roberta": "XLMRobertaConfig",
    "camembert": "CamembertConfig",
    "modernbert": "ModernBertConfig",
}


def _transformers() -> dict[str, set[str]]:
    return {family: _family(family, name) for family, name in _CONFIGS.items()}


def _family(family: str, name: str) -> set[str]:
    """Return the fields that the family's config declares or accepts under older names, and that its modules read."""
    own = class_of(tree_of("transformers", f"models/{family}/configuration_{family}.py"), name)
    modules = tree_of("transformers", f"models/{family}/modeling_{family}.py")
    return declared(own) | keys_read(own, "kwargs") | attributes_read(modules, "config")


WALKS = {"transformers": _transformers}

if __name__ == "__main__":
    sys.exit(main(FILE, WALKS))
