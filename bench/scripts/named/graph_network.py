"""PyG: graph attention on batches of random graphs of several sizes."""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_mean_pool


def graph(index):
    generator = torch.Generator().manual_seed(index)
    nodes = int(torch.randint(200, 400, (), generator=generator))
    edges = torch.randint(nodes, (2, 8 * nodes), generator=generator)
    features = torch.randn(nodes, 64, generator=generator)
    return Data(x=features, edge_index=edges, y=torch.tensor([index % 10]))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GATv2Conv(64, 64, heads=8)
        self.second = GATv2Conv(512, 64, heads=8)
        self.last = torch.nn.Linear(512, 10)

    def forward(self, data):
        hidden = self.first(data.x, data.edge_index).relu()
        hidden = self.second(hidden, data.edge_index).relu()
        return self.last(global_mean_pool(hidden, data.batch))


torch.manual_seed(0)
loader = DataLoader([graph(index) for index in range(384)], batch_size=64, shuffle=True)
model = Network().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
total = 0.0
for batch in loader:
    batch = batch.cuda()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
    loss.backward()
    optimizer.step()
    total += float(loss) * batch.num_graphs
print("mean loss", total / 384)
