"""The walker finds fields in every way that transformers' source names them."""

import ast

import pytest

from tools.reference_fields import decoders, walker

CONFIG = """
class TinyConfig(PreTrainedConfig):
    model_type = "tiny"
    attribute_map = {"num_experts": "num_local_experts"}
    default_theta = 5.0
    cached: ClassVar[int] = 3
    window: int | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.derived = kwargs.pop("popped", None) or kwargs.get("got", 1)
        if "asked" in kwargs:
            self.helper()
        self.derived = getattr(self, "by_name", None)

    def helper(self):
        return self.rope_parameters["theta_key"]

    @classmethod
    def from_pretrained(cls, **kwargs):
        return kwargs.pop("of_loading")

class Unrelated:
    not_a_field: int = 1
"""
MODEL = """
class TinyAttention:
    def __init__(self, config, text_config, generation_config):
        self.a = config.plain
        self.b = self.config.own
        self.c = getattr(config, "with_default", 1) if hasattr(config, "tested") else config.get_text_config().nested
        self.d = text_config.of_part
        self.e = generation_config.of_another
        config.written = 1
        config.called()
        self.f = config.rope_parameters.get("rope_got", 0) + rope_params["rope_indexed"]
"""


def test_fields_of_a_config_class() -> None:
    found = walker.fields_in(ast.parse(CONFIG))
    assert found.declared == {"window": "4096", "layer_types": "None", "default_theta": "5.0"}
    assert found.aliases == {"num_experts": "num_local_experts"}
    assert found.read == {"popped", "got", "asked", "by_name"}
    assert found.rope == {"theta_key"}


def test_fields_that_a_model_reads() -> None:
    found = walker.fields_in(ast.parse(MODEL))
    assert found.read == {
        "plain",
        "own",
        "with_default",
        "tested",
        "nested",
        "of_part",
        "rope_parameters",
    }
    assert found.rope == {"rope_got", "rope_indexed"}


def test_an_import_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SHARED", ())
    with pytest.raises(LookupError, match=r"models/llama/.* imports .*modeling_rope_utils.*: say in decoders.py"):
        decoders.fields_of_architecture("LlamaForCausalLM")
