"""CUDA graphs: the training step of a wide MLP is captured once and replayed."""

import torch
from torch import nn

torch.manual_seed(0)
layers = (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU())
model = nn.Sequential(*layers, nn.Linear(4096, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
inputs = torch.randn(8192, 1024, device="cuda")
labels = torch.randint(1000, (8192,), device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for index in range(10):
    inputs.copy_(torch.randn(8192, 1024))
    labels.copy_(torch.randint(1000, (8192,)))
    graph.replay()
    print(index, loss.item())
