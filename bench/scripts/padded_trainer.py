"""Transformers' Trainer on texts of many lengths, each batch padded to its longest text.

A Llama or a GPT-2 with random weights in bfloat16, which is evaluated every 20 steps.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

LONGEST = 1024


class Texts(Dataset):
    """Tokens at random, of lengths that are spread as those of texts are."""

    def __init__(self, count, seed):
        self.count = count
        self.seed = seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        length = int(torch.randn((), generator=generator).mul(0.8).add(5.5).exp())
        return torch.randint(0, 32000, (max(16, min(length, LONGEST)),), generator=generator)


def padded(texts):
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def llama():
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=LONGEST,
    )
    return LlamaForCausalLM(config)


def gpt2():
    config = GPT2Config(vocab_size=32000, n_positions=LONGEST)
    return GPT2LMHeadModel(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=12,
            per_device_eval_batch_size=16,
            eval_strategy="steps",
            eval_steps=20,
            prediction_loss_only=True,
            max_steps=chosen.steps,
            bf16=True,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(
            model={"llama": llama, "gpt2": gpt2}[chosen.model](),
            args=arguments,
            train_dataset=Texts(12 * chosen.steps, 0),
            eval_dataset=Texts(64, 1_000_000),
            data_collator=padded,
        )
        trainer.train()


if __name__ == "__main__":
    main()
