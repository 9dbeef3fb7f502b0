"""torch.compile: a small GPT, whose training step is compiled."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.after(x))))


torch.manual_seed(0)
embed, head = nn.Embedding(20000, 512), nn.Linear(512, 20000)
model = nn.Sequential(embed, *(Block(512, 8) for _ in range(6)), nn.LayerNorm(512), head).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)


@torch.compile
def loss_of(tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


for step in range(6):
    tokens = torch.randint(20000, (16, 257), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_of(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
