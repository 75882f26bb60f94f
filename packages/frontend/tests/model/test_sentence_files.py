import json
import math

import pytest

from tercet.frontend.model.sentence_files import SentenceFiles


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


def test_the_activation_of_a_cross_encoder_s_settings_goes_first() -> None:
    config = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}
    settings = {"activation_fn": "torch.nn.modules.linear.Identity"}
    files = SentenceFiles(
        {
            "config.json": json.dumps(config).encode(),
            "config_sentence_transformers.json": json.dumps(settings).encode(),
        }
    )
    assert files.activate([0.0]) == [0.0]


def test_unsupported_torch_activations_are_refused_and_others_ignored() -> None:
    with pytest.raises(ValueError, match=r"activation 'torch\.nn\.Tanh' is not supported, only Sigmoid"):
        of({"sbert_ce_default_activation_function": "torch.nn.Tanh"})
    assert of({"sbert_ce_default_activation_function": "own.Identity"}).activate([0.0]) == [0.5]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [(None, 0.8), ("cosine", 0.8), ("dot", 20.0), ("euclidean", -math.sqrt(10)), ("manhattan", -4.0)],
)
def test_vectors_are_compared_as_the_model_s_settings_say(name: str | None, wanted: float) -> None:
    settings = json.dumps({"similarity_fn_name": name}).encode()
    files = SentenceFiles({"config_sentence_transformers.json": settings})
    assert files.similarity([5.0, 0.0], [4.0, 3.0]) == pytest.approx(wanted)


def test_a_vector_without_a_direction_is_like_none() -> None:
    assert SentenceFiles({}).similarity([0.0, 0.0], [4.0, 3.0]) == 0.0


def test_a_similarity_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="similarity_fn_name"):
        SentenceFiles({"config_sentence_transformers.json": b'{"similarity_fn_name": "maxsim"}'})
