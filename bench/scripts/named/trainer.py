"""Transformers' Trainer: a Llama of 12 layers in bfloat16, two batches to a step."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 32000, (512,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def main():
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=512,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=5,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
