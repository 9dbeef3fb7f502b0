"""accelerate: a BERT classifier on padded batches of several lengths, metrics gathered."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def batch_of(index):
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(64, 257, (16,), generator=generator)
    longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.randint(5, 30000, (16, longest), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    loader = DataLoader(range(6), batch_size=None, collate_fn=batch_of)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        result = model(**batch)
        accelerator.backward(result.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        hits = accelerator.gather(result.logits.argmax(-1) == batch["labels"])
        print(f"loss {result.loss.item():.3f} accuracy {hits.float().mean().item():.2f}")


if __name__ == "__main__":
    main()
