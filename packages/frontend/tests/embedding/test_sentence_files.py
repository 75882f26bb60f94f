import json
import math

import pytest

from tercet.frontend.embedding.sentence_files import SentenceFiles


def of(config: dict[str, object]) -> SentenceFiles:
    return SentenceFiles({"config.json": json.dumps(config).encode()})


def test_one_label_is_a_sigmoid_and_several_a_softmax() -> None:
    files = of({})
    assert files.activate([0.0]) == [0.5]
    assert files.activate([2.0]) == pytest.approx([1 / (1 + math.exp(-2))])
    shares = files.activate([1.0, 2.0, 4.0])
    assert sum(shares) == pytest.approx(1)
    assert shares[2] / shares[0] == pytest.approx(math.exp(3))


@pytest.mark.parametrize("score", [-1000.0, 1000.0])
def test_large_scores_do_not_overflow(score: float) -> None:
    assert of({}).activate([score])[0] == pytest.approx(float(score > 0))
    assert of({}).activate([score, 0.0])[0] == pytest.approx(float(score > 0))


@pytest.mark.parametrize(
    ("config", "activated"),
    [
        ({"problem_type": "multi_label_classification"}, [0.5, 0.5]),
        ({"problem_type": "regression"}, [0.0, 0.0]),
        ({"problem_type": "single_label_classification"}, [0.5, 0.5]),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, [0.0, 0.0]),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, [0.0, 0.0]),
        (
            {
                "problem_type": "regression",
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            },
            [0.5, 0.5],
        ),
    ],
)
def test_the_model_s_config_decides(config: dict[str, object], activated: list[float]) -> None:
    assert of(config).activate([0.0, 0.0]) == activated


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"prompts": [1]}'])
def test_files_without_sense_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own words
        SentenceFiles({"config_sentence_transformers.json": content})
