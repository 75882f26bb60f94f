import torch

from tercet.kernels.ops.penalties import Penalties, add_bias, apply_penalties


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.5, -0.5, 1.0], [2.0, -2.0, 0.5, -0.5, 1.0]])
    counts = torch.tensor([[0, 3, 1, 0, 0], [0, 3, 1, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[True, True, False, False, False]] * 2)
    penalties = Penalties(
        repetition=torch.tensor([2.0, 1.0]), frequency=torch.tensor([0.0, 0.5]), presence=torch.tensor([0.25, 1.0])
    )
    result = apply_penalties(logits, counts, prompt, penalties)
    assert result[0].tolist() == [1.0, -4.25, 0.0, -0.5, 1.0]  # prompt tokens are repeated, but not present in output
    assert result[1].tolist() == [2.0, -4.5, -1.0, -0.5, 1.0]


def test_neutral_strengths_change_nothing() -> None:
    logits = torch.randn(2, 9)
    counts = torch.randint(0, 4, (2, 9), dtype=torch.int32)
    neutral = Penalties(repetition=torch.ones(2), frequency=torch.zeros(2), presence=torch.zeros(2))
    assert torch.equal(apply_penalties(logits, counts, counts > 1, neutral), logits)


def test_biases_add_up() -> None:
    logits = torch.zeros(2, 4)
    add_bias(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 2, 3]), torch.tensor([1.5, 1.0, -float("inf")]))
    assert logits.tolist() == [[0, 0, 2.5, 0], [0, 0, 0, -float("inf")]]
