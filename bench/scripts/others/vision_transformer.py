"""torchvision's ViT-B/16 in float32 with TF32, Adam one tensor at a time, an evaluation between."""

import torch
import torchvision

torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
model = torchvision.models.vit_b_16(num_classes=100).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
for step in range(6):
    model.train()
    images, labels = torch.randn(16, 3, 224, 224).cuda(), torch.randint(100, (16,)).cuda()
    loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = (model(images).argmax(1) == labels).sum().item()
    print(step, float(loss), hits)
