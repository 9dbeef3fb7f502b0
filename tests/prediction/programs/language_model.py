"""Trains a small decoder in bfloat16, with AdamW, on batches of three lengths."""

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH = 512, 8, 6, 16_000, 16
LENGTHS = (384, 512, 448)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))


torch.manual_seed(0)
layers = (Block() for _ in range(LAYERS))
ends = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, *ends).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for length in LENGTHS:
    tokens = torch.randint(VOCABULARY, (BATCH, length + 1)).cuda()
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
print_peaks()
