"""PyG: a GCN over one large graph, nodes of the training set by a mask, evaluation each epoch."""

import torch
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
nodes = 60_000
x = torch.randn(nodes, 128).cuda()
edges = torch.randint(nodes, (2, 600_000)).cuda()
y = torch.randint(40, (nodes,)).cuda()
train = torch.zeros(nodes, dtype=torch.bool)
train[torch.randperm(nodes)[:20_000]] = True
train = train.cuda()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(GCNConv(128 if i == 0 else 256, 256) for i in range(3))
        self.last = torch.nn.Linear(256, 40)

    def forward(self, x, edges):
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x, edges).relu(), 0.5, self.training)
        return self.last(x)


model = Network().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x, edges)[train], y[train])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x, edges).argmax(1)[~train] == y[~train]).float().mean().item()
    print(epoch, loss.item(), accuracy)
