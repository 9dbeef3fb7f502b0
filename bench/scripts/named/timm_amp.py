"""timm: ConvNeXt in channels_last, float16 autocast, GradScaler, SGD, an average of the weights."""

import timm
import torch
from timm.utils import ModelEmaV3

torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
model = timm.create_model("convnext_tiny", num_classes=100)
model = model.cuda().to(memory_format=torch.channels_last)
average = ModelEmaV3(model, decay=0.999)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler()
for step in range(6):
    images = torch.randn(24, 3, 224, 224).pin_memory().cuda(non_blocking=True)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (24,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    average.update(model)
    print(step, loss.item())
