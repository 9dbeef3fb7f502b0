"""DistributedDataParallel: torchvision's ResNet-50, bfloat16, workers of a loader, SGD."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main():
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29518"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 3, 160, 160), torch.randint(1000, (128,)))
    loader = DataLoader(data, batch_size=32, num_workers=2, pin_memory=True, drop_last=True)
    model = DistributedDataParallel(torchvision.models.resnet50().cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
