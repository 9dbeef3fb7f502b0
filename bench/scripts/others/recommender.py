"""A recommender: bags of embeddings, Adagrad, batches of 8,192, scores on the CPU."""

import torch
from torch import nn

torch.manual_seed(0)
tables = nn.ModuleList(nn.EmbeddingBag(200_000, 64, mode="sum") for _ in range(8)).cuda()
bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU()).cuda()
top = nn.Sequential(nn.Linear(64 + 36, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
parameters = [*tables.parameters(), *bottom.parameters(), *top.parameters()]
optimizer = torch.optim.Adagrad(parameters, lr=0.01)
upper = torch.triu_indices(9, 9, offset=1).cuda()
for step in range(6):
    dense = torch.randn(8192, 13).cuda(non_blocking=True)
    bags = torch.randint(200_000, (8, 8192, 4)).cuda(non_blocking=True)
    clicks = torch.randint(2, (8192,)).float().cuda(non_blocking=True)
    first = bottom(dense)
    vectors = torch.stack(
        [first, *(table(ids) for table, ids in zip(tables, bags, strict=True))], 1
    )
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, upper[0], upper[1]]
    logits = top(torch.cat([first, products], 1)).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scores = logits.detach().sigmoid().cpu()
    print(step, loss.item(), scores.mean().item())
