"""T5 with Adafactor: sequences padded to the longest of each batch, Seq2SeqTrainer."""

import tempfile

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(40, 256, (), generator=generator))
        return {"ids": torch.randint(2, 32000, (length,), generator=generator)}


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=16,
            max_steps=5,
            optim="adafactor",
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
        )
        model = T5ForConditionalGeneration(
            T5Config(d_model=512, num_layers=6, decoder_start_token_id=0)
        )
        Seq2SeqTrainer(model, arguments, data_collator=collate, train_dataset=Pairs()).train()
