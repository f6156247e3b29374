"""Train a causal CRATE on a text file with the Trainer of transformers, and generate from it.

``python examples/text_trainer.py words.txt --prompt "The "``. The tokens are the characters of the file, so that
nothing is downloaded. Needs the extra ``hf``: ``pip install '.[hf]'``. After a SIGTERM or a kill, the same command goes
on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from training.trainer import owned, train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from crate_kernels.integrations.transformers import CRATELMConfig


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of the text that follow each other; the model shifts the labels itself."""

    def __init__(self, tokens: Tensor, size: int) -> None:
        self.windows = tokens[: len(tokens) // size * size].view(-1, size)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def characters(text: str, longest: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the characters of a text; the first stands for padding and for others."""
    vocabulary = {character: i for i, character in enumerate(["<pad>", *sorted(set(text))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", padding_side="left", model_max_length=longest
    )


def main(arguments: Sequence[str] | None = None) -> str:
    """Train, save, load again, and return a text."""
    parser = argparse.ArgumentParser(description="Train a causal CRATE on a text file.")
    parser.add_argument("file", help="a text")
    parser.add_argument("--output", default="text-output", help="folder of the checkpoints and of the model")
    parser.add_argument("--prompt", default="The ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="number of characters to add")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    chosen = parser.parse_args(arguments)
    with owned(chosen.output):
        return train_and_generate(chosen)


def train_and_generate(chosen: argparse.Namespace) -> str:
    """Train by the options that were chosen."""
    text = Path(chosen.file).read_text(encoding="utf-8")
    tokenizer = characters(text, chosen.window)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    held_out = max(chosen.window, len(tokens) // 10)
    config = CRATELMConfig(
        block_size=chosen.window,
        vocab_size=len(tokenizer),
        n_layer=chosen.layers,
        n_head=max(1, chosen.width // 64),
        n_embd=chosen.width,
        pad_token_id=tokenizer.pad_token_id,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        TrainingArguments(
            chosen.output,
            num_train_epochs=chosen.epochs,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Windows(tokens[:-held_out], chosen.window),
        eval_dataset=Windows(tokens[-held_out:], chosen.window),
        processing_class=tokenizer,
    )
    train(trainer)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first process writes what all read

    generate = pipeline("text-generation", model=chosen.output)
    # Learned positions end with the window.
    available = chosen.window - len(tokenizer(chosen.prompt)["input_ids"])
    options = {"max_new_tokens": min(chosen.tokens, available), "do_sample": True, "top_k": 20}
    # Padding is no character: drawn, it would be missing in the text.
    return generate(chosen.prompt, suppress_tokens=[tokenizer.pad_token_id], **options)[0]["generated_text"]


if __name__ == "__main__":
    print(main())
