"""Generates from three batches of prompts, with a cache of keys and values that grows."""

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, VOCABULARY, NEW_TOKENS = 1024, 16, 8, 16_000, 48
PROMPTS = ((24, 300), (32, 420), (16, 700))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cache):
        batch, length, _ = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, *kept = split.permute(2, 0, 3, 1, 4)
        if cache:
            kept = [torch.cat(pair, 2) for pair in zip(cache, kept, strict=True)]
        heads = F.scaled_dot_product_attention(q, *kept, is_causal=length > 1)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.silu(self.up(self.after(x)))), kept


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
embedding, blocks = nn.Embedding(VOCABULARY, WIDTH), [Block() for _ in range(LAYERS)]
model = nn.ModuleList([embedding, *blocks]).cuda()
with torch.inference_mode():
    for batch, length in PROMPTS:
        tokens = torch.randint(VOCABULARY, (batch, length)).cuda()
        caches = [None] * LAYERS
        for _ in range(NEW_TOKENS):
            x = embedding(tokens)
            for index, block in enumerate(blocks):
                x, caches[index] = block(x, caches[index])
            tokens = (x[:, -1] @ embedding.weight.T).argmax(-1, keepdim=True)
print_peaks()
