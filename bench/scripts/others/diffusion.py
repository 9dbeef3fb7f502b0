"""A diffusion model: a U-Net with attention, an average of the weights, gradients accumulated."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, c_in), nn.SiLU(), nn.Conv2d(c_in, c_out, 3, 1, 1)
        )
        self.time = nn.Linear(256, c_out)
        self.second = nn.Sequential(
            nn.GroupNorm(8, c_out), nn.SiLU(), nn.Conv2d(c_out, c_out, 3, 1, 1)
        )
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, t):
        h = self.first(x) + self.time(t)[:, :, None, None]
        return self.skip(x) + self.second(h)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, c),
            nn.Conv2d(c, 3 * c, 1),
            nn.Conv2d(c, c, 1),
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, 4, c // 4, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, c=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 256), nn.SiLU(), nn.Linear(256, 256))
        self.begin = nn.Conv2d(3, c, 3, 1, 1)
        self.down1, self.down2, self.down3 = (
            Residual(c, c),
            Residual(c, 2 * c),
            Residual(2 * c, 4 * c),
        )
        self.middle = Attention(4 * c)
        self.up3, self.up2, self.up1 = Residual(6 * c, 2 * c), Residual(3 * c, c), Residual(c, c)
        self.end = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, x, t):
        t = self.time(t[:, None])
        a = self.down1(self.begin(x), t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        d = self.middle(self.down3(F.avg_pool2d(b, 2), t))
        u = self.up3(torch.cat([F.interpolate(d, scale_factor=2), b], 1), t)
        u = self.up2(torch.cat([F.interpolate(u, scale_factor=2), a], 1), t)
        return self.end(self.up1(u, t))


torch.manual_seed(0)
model = UNet().cuda()
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(4):
    for _ in range(2):
        images, t = torch.randn(12, 3, 64, 64, device="cuda"), torch.rand(12, device="cuda")
        noise = torch.randn_like(images)
        noisy = images * (1 - t[:, None, None, None]) + noise * t[:, None, None, None]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(noisy, t), noise) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    print(step, loss.item())
