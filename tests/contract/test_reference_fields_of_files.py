"""Fields that PEFT, transformers and sentence-transformers read from files: listed, and each classified."""

import ast
from collections.abc import Mapping
from types import ModuleType

import pytest

from tercet.scheduler.executor.lora.adapter_config import ADAPTER
from tercet.scheduler.file_fields import FileFields
from tercet.scheduler.models.config import quantized_fields
from tercet.scheduler.models.families import bert, modernbert
from tercet.scheduler.sentence_fields import (
    MODULE,
    NORMALIZE,
    POOLING,
    SETTINGS_FIELDS,
    TRANSFORMER,
    TRANSFORMER_NAMES,
)
from tools.reference_fields import adapters, encoders, listing, quantization, sentence_transformers

TOOLS = [adapters, encoders, quantization, sentence_transformers]
TABLES: dict[tuple[ModuleType, str], FileFields] = {
    (adapters, "LoraConfig"): ADAPTER,
    (encoders, "modernbert"): modernbert.FIELDS,
    **{(encoders, name): bert.FIELDS for name in ("bert", "roberta", "xlm_roberta", "camembert")},
    (quantization, "gptq"): quantized_fields.GPTQ,
    (quantization, "awq"): quantized_fields.AWQ,
    (quantization, "fp8"): quantized_fields.FP8,
    (quantization, "mxfp4"): quantized_fields.MXFP4,
    (quantization, "compressed-tensors"): quantized_fields.COMPRESSED_TENSORS,
    (quantization, "QuantizationConfig"): quantized_fields.COMPRESSED_TENSORS,
    (quantization, "QuantizationScheme"): quantized_fields.COMPRESSED_GROUP,
    (quantization, "QuantizationArgs"): quantized_fields.COMPRESSED_WEIGHTS,
    (sentence_transformers, "Transformer"): TRANSFORMER,
    (sentence_transformers, "Pooling"): POOLING,
    (sentence_transformers, "Normalize"): NORMALIZE,
    (sentence_transformers, "modules.json"): MODULE,
    (sentence_transformers, "settings"): SETTINGS_FIELDS,
}
FILE_NAMES = "files of the transformer"


def listed(tool: ModuleType) -> Mapping[str, list[str]]:
    """Return the checked-in fields of each object, over all packages."""
    return {name: fields for objects in listing.stored(tool.FILE).values() for name, fields in objects.items()}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: str(tool.__name__).rpartition(".")[2])
def test_the_list_is_that_of_the_installed_source(tool: ModuleType) -> None:
    """A failure means that the tool must run again and each new field be classified."""
    found = listing.walked(tool.WALKS)
    assert found or tool is sentence_transformers
    assert listing.differences(listing.stored(tool.FILE), found) == []


def test_a_change_of_the_reference_is_told_by_its_field() -> None:
    before, after = {"peft": {"LoraConfig": ["r", "gone"]}}, {"peft": {"LoraConfig": ["r", "new"], "Other": ["x"]}}
    assert listing.differences(before, after) == [
        "peft: LoraConfig: new is new",
        "peft: LoraConfig: gone is gone",
        "peft: Other: x is new",
    ]


@pytest.mark.parametrize(
    ("tool", "name"),
    [(tool, name) for tool in TOOLS for name in listed(tool) if name != FILE_NAMES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_listed_field_is_in_exactly_one_class(tool: ModuleType, name: str) -> None:
    fields = TABLES[tool, name]
    classes = [fields.honoured, fields.no_effect.keys(), fields.refused.keys()]
    wrong = [field for field in listed(tool)[name] if sum(field in each for each in classes) != 1]
    assert wrong == []
    assert all(fields.no_effect.values())
    assert all(only.why for only in fields.refused.values())


def test_every_name_of_the_transformer_s_file_is_read() -> None:
    assert sorted(TRANSFORMER_NAMES) == listed(sentence_transformers)[FILE_NAMES]


def test_the_walks_find_fields_however_they_are_read() -> None:
    source = (
        "class C:\n    a: int = 1\n    k: ClassVar[int]\n"
        "    def __init__(self, b, *, c=0, **kwargs):\n"
        "        kwargs.get('d'); kwargs.pop('e', 0); 'f' in kwargs; kwargs['g']\n"
        "    def read(self, config):\n        config.h; self.config.i; getattr(config, 'j', 0); config._k\n"
    )
    tree = ast.parse(source)
    owner = listing.class_of(tree, "C")
    assert listing.declared(owner) == {"a"}
    assert listing.parameters(owner) == {"b", "c", "d", "e", "f", "g"}
    assert listing.attributes_read(tree, "config") == {"h", "i", "j"}
    with pytest.raises(LookupError, match="there is no class D"):
        listing.class_of(tree, "D")
