"""Categories of a training step's memory, compared with the program's own counts.

A recorded run is compared with parameters, gradients, states and inputs as the program counts them
by its tensors, and its activations with the tensors that hooks see saved in a second run. Each
workload runs in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from bench.markdown import table

WORKLOADS = ("gpt2_train", "llama_train", "resnet50_train", "unet_train", "t5_train")
COUNTED = ("parameters", "optimizer state", "inputs", "gradients", "activations")
DRAWN = ("rand", "randint", "randn", "randn_like")


class Storages:
    """Bytes of different storages by address, and the tensors that brought them."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}
        self.tensors: dict[int, list[weakref.ref[Any]]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                storage = tensor.untyped_storage()
                self.nbytes[storage.data_ptr()] = storage.nbytes()
                self.tensors.setdefault(storage.data_ptr(), []).append(weakref.ref(tensor))

    def has(self, address: int) -> bool:
        """Return whether the program still has a tensor of a storage."""
        return any(each() is not None for each in self.tensors.get(address, ()))

    def without(self, others: Iterable[int]) -> int:
        return sum(self.nbytes[address] for address in self.nbytes.keys() - set(others))

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


class Counts:
    """The program's own counts: a row for each backward pass, and one for each step."""

    def __init__(self, torch: Any, workload: Any) -> None:
        self.torch, self.workload = torch, workload
        self.rows: list[dict[str, int]] = []
        self.gradients: list[int] = []
        self.inputs, self.saved = Storages(), Storages()

    def of(self, kind: type) -> list[Any]:
        return [each for each in vars(self.workload).values() if isinstance(each, kind)]

    def before_backward(self) -> None:
        parameters, state = Storages(), Storages()
        for module in self.of(self.torch.nn.Module):
            parameters.add([*module.parameters(), *module.buffers()])
        for optimizer in self.of(self.torch.optim.Optimizer):
            for held in optimizer.state.values():
                state.add(each for each in held.values() if isinstance(each, self.torch.Tensor))
        for address in [*self.inputs.nbytes]:
            if address not in self.saved.nbytes and not self.inputs.has(address):
                del self.inputs.nbytes[address]
        known = parameters.nbytes | self.inputs.nbytes
        self.rows.append(
            {
                "parameters": parameters.total,
                "optimizer state": state.total,
                "inputs": self.inputs.without(parameters.nbytes),
                "activations": self.saved.without(known),
            }
        )
        self.inputs, self.saved = Storages(), Storages()

    def before_step(self, optimizer: Any, *_: object) -> None:
        found = Storages()
        for group in optimizer.param_groups:
            found.add(each.grad for each in group["params"])
        self.gradients.append(found.total)


@contextmanager
def counting(torch: Any, counts: Counts, saving: bool) -> Iterator[None]:
    """Count in the calls of a program; `saving`: what is saved for backward passes, too."""
    backward = torch.Tensor.backward
    sources = {name: getattr(torch, name) for name in DRAWN}

    def counted_backward(*args: Any, **kwargs: Any) -> None:
        counts.before_backward()
        backward(*args, **kwargs)

    def counted(draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.inputs.add([drawn := draw(*args, **kwargs)])
            return drawn

        return call

    def pack(tensor: Any) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if address not in counts.saved.nbytes and not counts.inputs.has(address):
            counts.inputs.nbytes.pop(address, None)  # another block took the address
        counts.saved.add([tensor])
        return tensor

    torch.Tensor.backward = counted_backward
    for name, draw in sources.items():
        setattr(torch, name, counted(draw))
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args: counts.inputs.add(x for x in args if isinstance(x, torch.Tensor))
        )
        for module in counts.of(torch.nn.Module)
    ]
    for optimizer in counts.of(torch.optim.Optimizer):
        hooks.append(optimizer.register_step_pre_hook(counts.before_step))
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
    try:
        with saved if saving else nullcontext():
            yield
    finally:
        torch.Tensor.backward = backward
        for name, draw in sources.items():
            setattr(torch, name, draw)
        for hook in hooks:
            hook.remove()


def times(make: Callable[[], Any], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Return the time of a recorded step by that of the same step without; medians of rounds."""
    from gpumem import observe

    ways: dict[str, Callable[[], Any]] = {
        "without": nullcontext,
        "recorded": lambda: observe.record(capacity=1 << 18),
        "with stacks": lambda: observe.record(capacity=1 << 18, stacks=True),
    }
    workloads = {way: make() for way in ways}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds):
        # The first to take a step of new sizes moves pages for it: each way is first in turn.
        turn = round_ % len(ways)
        for way, context in [*ways.items()][turn:] + [*ways.items()][:turn]:
            with context():
                workloads[way].step()  # the first of a recording
                wait()
                begin = time.perf_counter()
                workloads[way].step()
                wait()
                taken[way].append(time.perf_counter() - begin)
    warm = {way: found[rounds // 4 :] for way, found in taken.items()}
    ratios = {
        way: [mine / bare for mine, bare in zip(warm[way], warm["without"], strict=True)]
        for way in ("recorded", "with stacks")
    }
    return {way: statistics.median(found) for way, found in ratios.items()} | {
        "without": statistics.median(warm["without"])
    }


def measure(name: str, size: str, steps: int, seed: int, rounds: int) -> dict[str, Any]:
    """Run a workload recorded, then with hooks; return both counts and the recorded peak."""
    from gpumem import observe
    from gpumem.integrations import torch as integration
    from gpumem.traces.groups import bytes_at, groups_of, peak_event, phase_at

    integration.enable(mode="full")
    integration.record_phases()
    import torch

    from bench.workloads import make

    made = functools.partial(make, name, size, torch.device("cuda"), seed)

    def run(saving: bool) -> Counts:
        workload = made()
        counts = Counts(torch, workload)
        with counting(torch, counts, saving):
            for _ in range(steps):
                workload.step()
        return counts

    recording = observe.record(capacity=1 << 22, stacks=True)
    recorded = run(False)
    recording.stop()
    saved = run(True)
    trace = recording.trace()
    groups = groups_of(trace, "category")
    assert groups is not None and trace.details is not None
    phases = trace.details.phases

    def live(event: int) -> dict[str, int]:
        return {found: nbytes for found, nbytes, _ in bytes_at(trace, event, groups)}

    passes = [live(each.begin - 1) for each in phases if each.name == "backward"]
    ends = [live(each.begin - 1) for each in phases if each.name == "optimizer"]
    # Only hooks see the inputs that nothing but the graph holds.
    of_hooks = ({name: row[name] for name in ("inputs", "activations")} for row in saved.rows)
    rows = [own | other for own, other in zip(recorded.rows, of_hooks, strict=True)]
    ratios: dict[str, list[float]] = {each: [] for each in COUNTED}
    for ours, row in zip(passes, rows, strict=True):
        for each in row:
            if row[each]:
                ratios[each].append(ours.get(each, 0) / row[each])
    for ours, own in zip(ends, recorded.gradients, strict=True):
        ratios["gradients"].append(ours.get("gradients", 0) / own)
    at = peak_event(trace)
    return {
        "workload": name,
        "events": trace.events,
        "lost": recording.lost,
        "peak": trace.peak_requested,
        "phase": phase_at(trace, at),
        "at the peak": live(at),
        "other": live(at).get("other", 0) / trace.peak_requested,
        "ratios": ratios,
        "times": times(made, rounds, torch.cuda.synchronize),
    }


def row_of(found: dict[str, Any]) -> list[str]:
    extremes = [
        f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
        for ratios in (found["ratios"][each] for each in COUNTED)
    ]
    largest = sorted(found["at the peak"].items(), key=lambda pair: -pair[1])[:3]
    told = ", ".join(f"{name} {nbytes / found['peak']:.0%}" for name, nbytes in largest)
    peak = f"{found['peak'] / 2**30:.2f}"
    taken = [f"{found['times'][way]:.3f}" for way in ("recorded", "with stacks")]
    other = f"{found['other']:.1%}"
    return [found["workload"], peak, found["phase"], told, other, *extremes, *taken]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_categories", description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--size", choices=["tiny", "full"], default="full")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20, help="of the steps that are timed")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(
            json.dumps(measure(chosen.one, chosen.size, chosen.steps, chosen.seed, chosen.rounds))
        )
        return 0
    found = []
    for name in chosen.workloads:
        options = {
            "one": name,
            "size": chosen.size,
            "steps": chosen.steps,
            "rounds": chosen.rounds,
            "seed": chosen.seed,
        }
        command = [sys.executable, "-m", "bench.torch_categories"]
        command += [f"--{option}={value}" for option, value in options.items()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        head = [
            "Workload",
            "Peak, GiB",
            "Phase",
            "Largest",
            "Other",
            *COUNTED,
            "Time",
            "with stacks",
        ]
        print(table(head, [row_of(each) for each in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
