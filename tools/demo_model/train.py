"""Builder of the demo model: corpus, tokenizer, training, export. `python -m tools.demo_model.train`."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model.corpus import write_corpus
from tools.demo_model.dataset import batches, encode
from tools.demo_model.facts import HERE
from tools.demo_model.tokenizer import BEGIN, CONTEXT, END, PAD, train_tokenizer

ARTEFACT = HERE.parents[1] / "packages/scheduler/src/tercet/scheduler/embedded"
PEAK_RATE, WARM_UP, WEIGHT_DECAY = 2e-3, 100, 0.05
logger = logging.getLogger("demo_model")


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of 5.2 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(BEGIN),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        attn_implementation="eager",  # on a CPU its backward pass is the faster one at these lengths
    )
    return LlamaForCausalLM(config)


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step: warm-up, then a cosine down to 2%."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def train(
    model: LlamaForCausalLM,
    data: Iterator[tuple[Tensor, Tensor, Tensor]],
    steps: int,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Train with AdamW over `steps` batches, in bfloat16 autocast, with an export every 400 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, (0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    loss_of = torch.compile(weighted_loss, dynamic=False)
    began, total = time.monotonic(), 0.0
    model.train()
    for step in range(1, steps + 1):
        ids, targets, weights = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids, targets, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.item()
        if step % 100 == 0:
            logger.info("step %d of %d, loss %.4f, %.0f s", step, steps, total / 100, time.monotonic() - began)
            total = 0.0
        if step % 400 == 0:
            export(model, tokenizer, checkpoint)


def weighted_loss(model: LlamaForCausalLM, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the cross entropy of the targets, weighted."""
    logits = model(input_ids=ids, use_cache=False).logits
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model in transformers' format, in bfloat16."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.tie_weights()
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=True,
        temperature=0.3,
        top_p=0.9,
    )
    copy.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Build everything from one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=300_000, help="size of the corpus")
    parser.add_argument("--steps", type=int, default=3_300, help="training steps")
    parser.add_argument("--seed", type=int, default=3, help="seed of corpus, weights and batches")
    parser.add_argument("--output", type=Path, default=ARTEFACT, help="directory of the finished model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    corpus = write_corpus(args.conversations, args.seed)
    tokenizer = train_tokenizer(corpus[:40_000])
    buckets = encode(tokenizer, corpus)
    logger.info("%d conversations as %s", len(corpus), [tuple(b.ids.shape) for b in buckets])
    model = new_model(tokenizer)
    logger.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, batches(buckets, args.seed, len(tokenizer)), args.steps, args.output, tokenizer)
    export(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
