"""Fingerprint of a served model."""

from collections.abc import Callable

import pytest

from tercet.frontend.model import served_model
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.protocol.messages.values import ModelIdentity, ModelLimits

FingerprintOf = Callable[..., str]


@pytest.fixture
def fingerprint_of(files: dict[str, bytes], limits: ModelLimits) -> FingerprintOf:
    loaded = ModelFiles(files)

    def make(weights: str = "w", software: str = "tercet-scheduler 0.1.0", **hashes: str) -> str:
        identity = ModelIdentity(weights=weights, files=hashes)
        return ServedModel("tiny", loaded, limits, identity, software=software).fingerprint

    return make


def test_equal_models_have_equal_fingerprints(fingerprint_of: FingerprintOf) -> None:
    assert fingerprint_of("w", a="1", b="2") == fingerprint_of("w", b="2", a="1")


def test_a_fingerprint_tells_apart_what_could_answer_otherwise(
    fingerprint_of: FingerprintOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    prints = [fingerprint_of(), fingerprint_of("other dtype or quantization"), fingerprint_of(template="1")]
    prints.append(fingerprint_of(software="tercet-scheduler 0.2.0"))
    monkeypatch.setattr(served_model, "__version__", "999")
    prints.append(fingerprint_of())
    assert len(set(prints)) == 5
