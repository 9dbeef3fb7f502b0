"""A plain loop: a transformer encoder, bfloat16 autocast, AdamW, gradients clipped, loss logged."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(16000, 768), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
)
head = nn.Linear(768, 16000)
model.cuda()
head.cuda()
parameters = [*model.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
best = float("inf")
for step in range(8):
    tokens = torch.randint(16000, (12, 512))
    tokens = tokens.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(model(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
    best = min(best, loss.item())
    print(f"step {step} loss {loss.item():.3f} norm {norm:.3f} best {best:.3f}")
