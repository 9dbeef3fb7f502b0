"""Lightning: an autoencoder of convolutions, bf16-mixed, with validation and a schedule."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.SiLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def step(self, batch, name):
        (images,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log(name, loss, prog_bar=True)
        return loss

    def training_step(self, batch, _):
        return self.step(batch, "loss")

    def validation_step(self, batch, _):
        self.step(batch, "validation")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "validation"},
        }


def main():
    lightning.seed_everything(0)
    images = DataLoader(TensorDataset(torch.randn(192, 3, 128, 128)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Autoencoder(), images, images)


if __name__ == "__main__":
    main()
