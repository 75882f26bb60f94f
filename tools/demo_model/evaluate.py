"""Evaluation of the demo model on unseen questions, greedily; prints the share answered and the failures."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tools.demo_model.facts import HERE, read_questions
from tools.demo_model.train import ARTEFACT


@torch.inference_mode()
def reply(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str, limit: int = 96) -> str:
    """Return the model's greedy reply to one user message."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=limit, do_sample=False, temperature=None, top_p=None)
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def main() -> None:
    """Evaluate one directory on one file of questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ARTEFACT, help="directory of the model")
    parser.add_argument("--questions", type=Path, default=HERE / "heldout.jsonl", help="file of questions")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    questions = read_questions(args.questions)
    failures = [(q, said) for q in questions if not q.answered_by(said := reply(model, tokenizer, q.text))]
    for question, said in failures:
        print(f"{question.text}\n  expected {' or '.join(question.expect)}\n  got      {said}")
    right = len(questions) - len(failures)
    print(f"{right} of {len(questions)} answered ({right / len(questions):.0%})")


if __name__ == "__main__":
    main()
