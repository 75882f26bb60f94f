from tools.commit_subjects import fault


def test_subjects_with_an_area_and_an_imperative_are_accepted() -> None:
    for subject in (
        "scheduler/lora: compute RMSNorm once per layer",
        "docs: add a troubleshooting guide",
        "frontend, protocol: move keys to http/auth.py",
        "kernels/moe_align: fix output alignment, so Triton compiles once for all batch sizes"[:72],
    ):
        assert fault(subject) == "", subject


def test_other_subjects_are_refused() -> None:
    for subject in (
        "What adapters multiply is normed once",
        "frontend: What is counted is bounded",
        "frontend: the counter is bounded",
        "frontend: add a counter.",
        "frontend:add a counter",
        "frontend: " + "a" * 63,
    ):
        assert fault(subject), subject
