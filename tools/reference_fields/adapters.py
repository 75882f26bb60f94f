"""The fields of adapter_config.json that PEFT declares for LoRA.

Run python -m tools.reference_fields.adapters [--check].
"""

import sys
from pathlib import Path

from tools.reference_fields.listing import class_of, declared, main, tree_of

FILE = Path(__file__).with_suffix(".json")


def _peft() -> dict[str, set[str]]:
    every = tree_of("peft", "config.py")
    lora = class_of(tree_of("peft", "tuners/lora/config.py"), "LoraConfig")
    shared = declared(class_of(every, "PeftConfigMixin")) | declared(class_of(every, "PeftConfig"))
    return {"LoraConfig": declared(lora) | shared}


WALKS = {"peft": _peft}

if __name__ == "__main__":
    sys.exit(main(FILE, WALKS))
