"""Training as people write it: by themselves, with Lightning, Accelerate and transformers."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def rows():
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(96, 64, generator=generator))


def steps(own, optimizer, forward=None, count=6):
    forward = forward or own
    losses = []
    for step in range(count):
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad(set_to_none=True)
        loss = (forward(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def checkpointed():
    """Activations are computed again in the backward pass, dropout with them."""
    own = nn.Sequential(*(nn.Sequential(model(), nn.Dropout(0.1)) for _ in range(3))).cuda()

    def forward(data):
        for each in own:
            data = checkpoint(each, data, use_reentrant=False)
        return data

    return steps(own, torch.optim.AdamW(own.parameters()), forward)


def activations_on_the_host():
    own = model().cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return steps(own, torch.optim.AdamW(own.parameters()))


def with_lightning():
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.own = model()
            self.losses = []

        def training_step(self, batch, index):
            (data,) = batch
            loss = (self.own(data) - data).square().mean()
            self.losses.append(float(loss.detach()).hex())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.own.parameters())

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=6,
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(rows(), batch_size=16))
    return module.losses


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    own, optimizer, loader = accelerator.prepare(
        own, optimizer, DataLoader(rows(), batch_size=16, pin_memory=True)
    )
    losses = []
    for (data,) in loader:
        with accelerator.accumulate(own):
            loss = (own(data) - data).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    accelerator.free_memory()
    return losses


def with_transformers():
    """A tiny model made from its configuration; the trainer's own account of memory is on."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    own = LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape, **heads))
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(128, (32,), generator=generator) for _ in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_checkpointing=True,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            skip_memory_metrics=False,
            seed=1,
        )
        data = [{"input_ids": text, "labels": text} for text in texts]
        trainer = Trainer(model=own, args=arguments, train_dataset=data)
        done = trainer.train()
    assert done.metrics["train_mem_gpu_peaked_delta"] >= 0
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


# ---- process groups ------------------------------------------------------------------------------


def alone():
    """Begin a process group of this process only."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def with_ddp():
    from torch.nn.parallel import DistributedDataParallel

    alone()
    own = DistributedDataParallel(model().cuda(), device_ids=[0])
    losses = steps(own, torch.optim.AdamW(own.parameters()))
    dist.destroy_process_group()
    return losses


def with_fsdp():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    alone()
    own = nn.Sequential(model(), model()).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in own:
        fully_shard(each, mp_policy=policy)
    fully_shard(own, mp_policy=policy)
    losses = steps(own, torch.optim.AdamW(own.parameters()))
    dist.destroy_process_group()
    return losses


def symmetric_memory():
    """What `empty` gives holds what is written; how far a group of one process gets with it."""
    import torch.distributed._symmetric_memory as symmetric

    alone()
    tensor = symmetric.empty(1 << 16, dtype=torch.float32, device="cuda")
    tensor.fill_(3)
    total = float(tensor.sum())
    try:
        handle = symmetric.rendezvous(tensor, dist.group.WORLD)
        said = [handle.rank, handle.world_size]
    except Exception as error:
        said = type(error).__name__
    del tensor
    dist.destroy_process_group()
    return [total, said]
