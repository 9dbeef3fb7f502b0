"""Training whose activations do not fit: `offload`, PyTorch's own way, and one that moves all.

    python -m bench.torch_offload [--rows fits longest ...] [--rounds 5] [--small]
    torchrun --nproc-per-node 2 -m bench.torch_offload --rows sharded

PyTorch has its memory from one arena. A round runs each way in turn, with `UNCOUNTED` steps, as
the arena's pages find their places, and `STEPS` that count; a figure is the median over rounds, a
ratio the median of the rounds' ratios to the same steps without offload and without a limit. The
arena refuses what is above the limit. A bound is the ratio at which the least bytes, those above
the limit, cross the bus at its speed, out within the forward pass and back within the other. Rows:

"fits" has no limit. "longest" searches the limit at which a length just fits, then the longest
input under it. "lengths" draws its lengths. "anchors" compares the ways at 1.5 of the length:
`save_on_cpu`, and hooks that move everything on a stream and keep the last five. "recomputed" has
checkpoints, and a limit of two layers' inputs. "models" have their fixed part and 0.8 of their
activations. "growth" runs 1,000 short steps. "hides" has the share of the activations that the
bus carries during the forward pass, by width and tokens. "sharded", which is measured alone, has
the fixed part and 0.7 of the activations of each rank, by FSDP2; without torchrun the one rank has
all.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpumem
from bench import markdown
from bench.harness import ratios_within_rounds
from bench.workloads.transformer import Checkpointed, Decoder, Decoding, next_token_loss
from bench.workloads.vision import UNet
from gpumem.integrations import torch as gpumem_torch

UNCOUNTED, STEPS = 8, 2
LENGTH = 12_288
MATH_LENGTH = 1024  # tokens; attention written out has a matrix of their square
MIB = 1 << 20
Context = Callable[[], Any]


# ---- what is trained -----------------------------------------------------------------------------


@dataclass
class Training:
    """A model, its optimizer, and a loss of an input of a size."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]
    optimizer: torch.optim.Optimizer
    keeps_gradients: bool = False
    forward: float = 0.0
    """Seconds of the last step's forward pass on the GPU."""

    def step(self, size: int, context: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with context:
            loss = self.loss(size)
        end.record()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        end.synchronize()
        self.forward = begin.elapsed_time(end) / 1000


def decoder(chosen: argparse.Namespace, kind: type[Decoder] = Decoder, **more: int) -> Training:
    """Return Llama's kind of eight layers; its plain descent keeps nothing beside the weights."""
    small = chosen.small
    of = Decoding(
        **{
            "vocabulary": 8000,
            "width": 512 if small else 4096,
            "layers": 8,
            "heads": 32,
            "key_heads": 8,
            "hidden": 1376 if small else 11008,
            "positions": 1 << 17,
            **more,
        }
    )
    with torch.device("cuda"):
        model = kind(of).bfloat16()

    def loss(length: int) -> torch.Tensor:
        tokens = torch.randint(8000, (1, length + 1), device="cuda")
        return next_token_loss(model, tokens)

    return Training(model, loss, torch.optim.SGD(model.parameters(), 1e-4))


def adam(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    return Training(model, loss, optimizer, keeps_gradients=True)


def of_transformers(kind: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, config)(**settings)
    with torch.device("cuda"):
        model: nn.Module = getattr(transformers, kind)(made).bfloat16().train()
    return model


def vit(small: bool) -> tuple[Training, int]:
    width = 128 if small else 1024
    model = of_transformers(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=width,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4 * width,
        num_labels=1000,
    )

    def loss(batch: int) -> torch.Tensor:
        images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        return model(pixel_values=images, labels=torch.zeros(batch, device="cuda").long()).loss

    return adam(model, loss), 4 if small else 128


def whisper(small: bool) -> tuple[Training, int]:
    width, heads = (128, 4) if small else (1024, 16)
    sizes = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 12), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    model = of_transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", d_model=width, **sizes
    )

    def loss(batch: int) -> torch.Tensor:
        sound = torch.randn(batch, 80, 3000, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(50_000, (batch, 200), device="cuda")
        return model(input_features=sound, labels=labels).loss

    return adam(model, loss), 1 if small else 24


def unet(small: bool) -> tuple[Training, int]:
    width, side = (8, 64) if small else (64, 256)
    model = UNet(width, 3).cuda()

    def loss(batch: int) -> torch.Tensor:
        images = torch.randn(batch, 3, side, side, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return nn.functional.mse_loss(model(images), images)

    return adam(model, loss), 4 if small else 32


def mixtral(small: bool) -> tuple[Training, int]:
    width = 128 if small else 2048
    model = of_transformers(
        "MixtralForCausalLM",
        "MixtralConfig",
        vocab_size=8000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=4,
    )

    def loss(length: int) -> torch.Tensor:
        tokens = torch.randint(8000, (1, length), device="cuda")
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return adam(model, loss), 512 if small else 16_384


MODELS = {"ViT": vit, "Whisper": whisper, "U-Net": unet, "Mixtral": mixtral}


# ---- the other ways ------------------------------------------------------------------------------


class Stash(saved_tensors_hooks):
    """Moves every saved tensor but parameters on a stream, and keeps the last five meanwhile."""

    def __init__(self, size: int = 5, min_bytes: int = 1024) -> None:
        self.stream = torch.cuda.Stream()
        self.leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self.back: list[torch.Tensor] = []
        self.size = size
        self.min_bytes = min_bytes
        self.node: object = None
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.nbytes < self.min_bytes or not tensor.is_cuda:
            return tensor
        main = torch.cuda.current_stream()
        while len(self.leaving) >= self.size:
            main.wait_event(self.leaving.pop(0)[1])
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        self.leaving.append((tensor, self.stream.record_event()))
        return host, tensor.device

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        main = torch.cuda.current_stream()
        while self.leaving:
            main.wait_event(self.leaving.pop(0)[1])
        with torch.cuda.stream(self.stream):
            tensor: torch.Tensor = packed[0].to(packed[1], non_blocking=True)
        main.wait_stream(self.stream)
        self.back.append(tensor)
        node = torch._C._current_autograd_node()
        if node is not self.node:
            self.node = node
            node.register_hook(self.release)
        return tensor

    def release(self, *gradients: object) -> None:
        """After a node: its tensors go once the GPU has run it."""
        self.stream.wait_event(torch.cuda.current_stream().record_event())
        self.back.clear()


# ---- measuring -----------------------------------------------------------------------------------


def arena() -> Any:
    return gpumem.get_default_resource(f"cuda:{torch.cuda.current_device()}")


@dataclass
class Way:
    """How steps run: in a context, under a limit of the arena (None: without)."""

    context: Context = nullcontext
    limit: int | None = None
    seconds: list[float] = field(default_factory=list)
    forward: float = 0.0
    peak: int = 0


def run(training: Training, size: int, way: Way, steps: int = 1) -> float:
    """Return the seconds of a step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = perf_counter()
    for _ in range(steps):
        training.step(size, way.context())
    torch.cuda.synchronize()
    way.peak = max(way.peak, torch.cuda.max_memory_allocated())
    way.forward = training.forward
    return (perf_counter() - begin) / steps


def set_limit(limit: int | None) -> None:
    # Without one, that of the GPU's memory: below any limit pages have the same sizes.
    gc.collect()
    torch.cuda.empty_cache()
    arena().limit = limit or torch.cuda.get_device_properties().total_memory


def compare(
    training: Training, sizes: list[int], ways: Mapping[str, Way], rounds: int, reference: str
) -> dict[str, float]:
    """Run each way in turn; returns ratios to the reference."""
    for _ in range(rounds):
        for way in ways.values():
            set_limit(way.limit)
            run(training, sizes[0], way, UNCOUNTED)
            each = [run(training, size, way, STEPS) for size in sizes]
            way.seconds.append(sum(each) / len(each))
    set_limit(None)
    return ratios_within_rounds({name: way.seconds for name, way in ways.items()}, reference)


def fits(training: Training, size: int, way: Way, steps: int) -> bool:
    set_limit(way.limit)
    try:
        run(training, size, way, steps)
    except torch.OutOfMemoryError:
        return False
    finally:
        training.optimizer.zero_grad()
        set_limit(None)
    return True


def offload(limit: int | None) -> Any:
    return gpumem_torch.offload(limit)


def bus() -> float:
    """Return the bytes per second of the slower direction between the GPU and pinned memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    seconds = []
    for to, source in ((host, gpu), (gpu, host)):
        to.copy_(source)
        begin = perf_counter()
        for _ in range(4):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append((perf_counter() - begin) / 4)
    return (1 << 30) / max(seconds)


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


# ---- rows ----------------------------------------------------------------------------------------


class Bench:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.rounds = chosen.rounds
        self.length = 512 if chosen.small else LENGTH
        self.rows: list[list[str]] = []
        self.llama: Training | None = None

    def add(self, row: str, way: str, figure: str, ratio: float | None, more: str) -> None:
        self.rows.append([row, way, figure, "" if ratio is None else f"{ratio:.3f}", more])
        print(*self.rows[-1], sep=" | ", flush=True)

    def add_ways(self, row: str, ways: Mapping[str, Way], ratios: Mapping[str, float]) -> None:
        for name, way in ways.items():
            seconds = statistics.median(way.seconds)
            more = f"{mib(way.peak)} MiB, forward {1000 * way.forward:.1f} ms"
            self.add(row, name, f"{1000 * seconds:.1f} ms", ratios[name], more)

    def add_bound(self, row: str, native: Way, limit: int) -> None:
        seconds, excess = statistics.median(native.seconds), native.peak - limit
        crossing = excess / (speed := bus())
        passes = (native.forward, seconds - native.forward)
        bound = sum(max(each, crossing) for each in passes)
        more = f"{mib(excess)} MiB at {speed / 1e9:.1f} GB/s take {1000 * crossing:.1f} ms each way"
        self.add(row, "bound", f"{1000 * bound:.1f} ms", bound / seconds, more)

    def decoder(self) -> Training:
        if self.llama is None:
            self.llama = decoder(self.chosen)
        return self.llama

    def limit(self) -> int:
        """Return the lowest limit at which the length fits without offload, by steps of 1/256."""
        training, way = self.decoder(), Way()
        run(training, self.length, way, 3)
        base = torch.cuda.memory_allocated()
        limit = way.peak
        while not fits(training, self.length, Way(limit=limit), 3):
            limit += limit // 256
        share = (way.peak - base) / way.peak
        self.add("limit", "native", f"{mib(limit)} MiB", None, f"activations {share:.2f}")
        return limit

    def fits(self) -> None:
        made = offload(None)
        ways = {"native": Way(), "offload": Way(lambda: made)}
        ratios = compare(self.decoder(), [self.length], ways, self.rounds, "native")
        self.add_ways("fits", ways, ratios)
        self.add("fits", "moved", mib(made.report().moved), None, "MiB")

    def longest(self) -> None:
        limit = self.limit()
        training, made = self.decoder(), offload(limit)
        longest = found = 0.0
        for share in (1.5, 2.0, 3.0, 4.0):
            length = int(share * self.length)
            way = Way(lambda: made, limit)
            before = made.report().moved
            if not fits(training, length, way, 5):
                break
            host = made._mover.host
            longest, found = share, (made.report().moved - before) / 5
            more = f"{mib(max(host._peaks))} MiB out at once, {mib(host.held)} MiB held"
            self.add("fits by offload", f"{share} L", mib(found), None, more)
        for share in sorted({1.5, longest} - {0.0}):
            ways = {"native": Way(), "offload": Way(lambda: made, limit)}
            size = int(share * self.length)
            try:
                ratios = compare(training, [size], ways, self.rounds, "native")
            except torch.OutOfMemoryError as error:
                self.add("longest", f"{share} L", "out of memory", None, str(error)[:60])
                set_limit(None)
                continue
            self.add_ways(f"{share} L", ways, ratios)
            self.add(f"{share} L", "all moves", str(made.report()), None, "")

    def lengths(self) -> None:
        limit, draw = self.limit(), random.Random(1)
        sizes = [int(self.length * draw.uniform(0.5, 1.5)) for _ in range(12)]
        made = offload(limit)
        ways = {"native": Way(), "offload": Way(lambda: made, limit)}
        ratios = compare(self.decoder(), sizes, ways, max(1, self.rounds // 2), "native")
        self.add_ways("lengths", ways, ratios)

    def anchors(self) -> None:
        limit = self.limit()
        size, made, stash = int(1.5 * self.length), offload(limit), Stash()
        ways = {
            "offload": Way(lambda: made, limit),
            "stash of 5": Way(lambda: stash),
            "save_on_cpu": Way(lambda: save_on_cpu(pin_memory=True)),
            "native": Way(),
        }
        ratios = compare(self.decoder(), [size], ways, self.rounds, "native")
        self.add_ways("anchors, 1.5 L", ways, ratios)
        self.add_bound("anchors, 1.5 L", ways["native"], limit)
        host = made._mover.host
        more = f"{mib(max(host._peaks))} MiB out at once, {mib(host.held)} MiB held"
        self.add("anchors, 1.5 L", "offload", str(made.report()), None, more)
        mine = statistics.median(ways["offload"].seconds)
        for name in ("stash of 5", "save_on_cpu"):
            ratio = mine / statistics.median(ways[name].seconds)
            self.add("anchors, 1.5 L", f"offload / {name}", "", ratio, "")

    def recomputed(self) -> None:
        self.llama = None
        training = decoder(self.chosen, Checkpointed)
        training.keeps_gradients = True  # else the peak is at the end, with one input left
        size = (8 if self.chosen.small else 2) * self.length
        way = Way()
        run(training, size, way, 3)
        one = 2 * size * training.model.of.width
        limit = way.peak - 6 * one
        made = offload(limit)
        ways = {"native": Way(), "offload": Way(lambda: made)}
        run(training, size, ways["offload"], 3)
        ways["offload"].peak = 0
        ratios = compare(training, [size], ways, self.rounds, "native")
        self.add_ways("recomputed", ways, ratios)
        left = 8 - (ways["native"].peak - ways["offload"].peak) / one
        self.add("recomputed", "layer inputs at the peak", f"{left:.2f}", None, str(made.report()))

    def models(self) -> None:
        self.llama = None
        for name, make in MODELS.items():
            gc.collect()
            training, size = make(self.chosen.small)
            self.limited(name, training, size, 0.8)
            del training

    def limited(self, name: str, training: Training, size: int, part: float) -> None:
        """Compare steps under a limit of the fixed part and a part of the activations."""
        way = Way()
        run(training, size, way, 3)
        fixed = torch.cuda.memory_allocated()
        way.peak = 0
        run(training, size, way)
        activations = way.peak - fixed
        limit = int(fixed + part * activations)
        made = offload(limit)
        ways = {"native": Way(), "offload": Way(lambda: made, limit)}
        share = activations / way.peak
        try:
            ratios = compare(training, [size], ways, self.rounds, "native")
        except torch.OutOfMemoryError as error:
            set_limit(None)
            self.add(name, f"activations {share:.2f}", "out of memory", None, str(error)[:60])
            return
        self.add_ways(f"{name}, {share:.2f}", ways, ratios)
        self.add_bound(name, ways["native"], limit)
        self.add(name, "", str(made.report()), None, f"limit {mib(limit)}")

    def hides(self) -> None:
        self.llama = None
        speed = bus()
        for width in (512,) if self.chosen.small else (1024, 2048, 4096):
            training = decoder(self.chosen, width=width, hidden=11 * width // 4, heads=width // 128)
            for length in (512,) if self.chosen.small else (4096, 16_384):
                way = Way()
                run(training, length, way, 3)
                fixed, way.peak = torch.cuda.memory_allocated(), 0
                run(training, length, way)
                share = way.forward * speed / (way.peak - fixed)
                rule = 3.3e-6 * (21 * width + 2 * length) * speed / 55e9
                row = f"hides, {width} x {length}"
                more = f"forward {1000 * way.forward:.1f} ms, {mib(way.peak - fixed)} MiB"
                self.add(row, f"rule {rule:.2f}", f"{share:.2f}", None, more)

    def sharded(self) -> None:
        from torch import distributed
        from torch.distributed.fsdp import fully_shard

        if "RANK" not in os.environ:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
        distributed.init_process_group("nccl")
        training = decoder(self.chosen)
        for each in (*training.model.blocks, training.model):
            fully_shard(each)
        training.optimizer = torch.optim.SGD(training.model.parameters(), 1e-4)
        name = f"rank {distributed.get_rank()} of {distributed.get_world_size()}"
        self.limited(name, training, self.length, 0.7)
        limit = torch.cuda.memory_allocated() + 1
        gradients: dict[str, list[Any]] = {}
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Other kernels of attention add up gradients in an order that differs from run to run.
        ways = {"native": nullcontext(), "again": nullcontext(), "offload": offload(limit)}
        for way, context in ways.items():
            torch.manual_seed(distributed.get_rank())
            with sdpa_kernel(SDPBackend.MATH):
                with context:
                    loss = training.loss(MATH_LENGTH)
                loss.backward()
            gradients[way] = [each.grad.to_local() for each in training.model.parameters()]
            training.optimizer.zero_grad()
        for way in ("again", "offload"):  # which moves all
            same = all(map(torch.equal, gradients["native"], gradients[way]))
            self.add(name, way, "the same bits" if same else "OTHER BITS", None, "")
        distributed.destroy_process_group()

    def growth(self) -> None:
        self.llama = None
        training = decoder(self.chosen, width=512, hidden=1376, layers=4)
        way = Way()
        run(training, 512, way, 3)
        made = gpumem_torch.offload(int(0.8 * way.peak), min_bytes="64KiB")
        said = []
        for count in (100, 900):
            run(training, 512, Way(lambda: made), count)
            gc.collect()
            pinned = gpumem_torch.status().pinned.stats()
            said.append(
                (torch.cuda.memory_allocated(), arena().stats().reserved, pinned.reserved,
                 len(made._records), len(made.report().modules), len(gc.get_objects()))
            )  # fmt: skip
        for what, *found in zip(
            ("allocated", "reserved", "pinned", "records", "modules", "objects"), *said, strict=True
        ):
            self.add("growth", what, str(found[1] - found[0]), None, f"{found[0]:,} before")


def main() -> None:
    names = ("fits", "longest", "lengths", "growth", "recomputed", "models", "anchors", "hides")
    parser = argparse.ArgumentParser(prog="python -m bench.torch_offload", description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=(*names, "sharded"), default=names)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="narrow models, to try the bench")
    chosen = parser.parse_args()
    gpumem_torch.enable(mode="full")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.zeros(1, device="cuda")
    set_limit(None)
    bench = Bench(chosen)
    for name in chosen.rows:
        begin = perf_counter()
        getattr(bench, name)()
        print(f"{name}: {perf_counter() - begin:.0f} s", flush=True)
    print(markdown.table(["row", "way", "figure", "/ native", ""], bench.rows))


if __name__ == "__main__":
    main()
