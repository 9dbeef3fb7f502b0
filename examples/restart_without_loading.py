"""A server of a Transformers model is killed and starts again without loading its weights.

    python examples/restart_without_loading.py [--device cuda:0] [--width 256] [--layers 4]

The model is transformers' own Llama, made from a config with random weights, and saved in a
temporary folder. The first server loads it from there, answers, and seals the weights. It is killed
by SIGKILL. The second one finds the sealed set and makes the same model over it. The times are from
the start of each process to its first token, with the imports that both have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import gpumem
from gpumem import interop

try:
    import torch
    import transformers
except ImportError as error:
    print(f"this example needs PyTorch and transformers: {error}")
    sys.exit()

PROMPT = [[1, 5, 2, 6]]


def save(folder: str, width: int, layers: int, device: str) -> None:
    """Save a model with random weights."""
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, dtype="bfloat16"
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


def attached(config: Any, kept: interop.SealedSet) -> Any:
    """Make a model over the tensors of a set, which are neither read nor copied."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = kept.state_dict()
    model.load_state_dict(tensors, strict=False, assign=True)
    # A buffer that the state dict leaves out, such as the frequencies of positions.
    for name, _ in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensors[name])
    return model.eval()


def first_token(model: Any, device: str) -> int:
    """Return the likeliest token after the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor(PROMPT, device=device)).logits
    return int(logits[0, -1].argmax())


def serve(name: str, folder: str, device: str) -> None:
    """Answer the prompt, and then seal the weights, unless that is done; serve until killed."""
    config = transformers.AutoConfig.from_pretrained(folder)
    imported = time.monotonic()
    try:
        model = attached(config, interop.open(name))
        how = "from the sealed set"
    except (gpumem.errors.KeeperError, gpumem.errors.NotSealedError):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
        how = "loaded"
    made = time.monotonic()
    token = first_token(model, device)
    answered = time.monotonic()
    if how == "loaded":
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        model = attached(config, interop.seal(name, tensors))
        assert first_token(model, device) == token
    times = {"imports": imported, "model": made, "first token": answered}
    print(json.dumps({"how": how, "token": token, "times": times}), flush=True)
    sys.stdin.read()


def started_and_killed(*arguments: str) -> dict[str, Any]:
    """Start a server, read its first answer, and kill it."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "--serve", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        answer: dict[str, Any] = json.loads(server.stdout.readline())
        server.kill()
    answer["times"] = {what: at - begin for what, at in answer["times"].items()}
    return answer


def main(device: str, width: int, layers: int) -> int:
    """Save the model, start two servers, print their times."""
    name = f"example-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        save(folder, width, layers, device)
        answers = [started_and_killed(name, folder, device) for _ in range(2)]
    kept = interop.sealed_sets()
    gib = sum(each["bytes"] for each in kept if each["name"] == name) / (1 << 30)
    interop.drop(name, force=True)
    print(f"{gib:.2f} GiB of weights on {device}; seconds after the start of the process:")
    for answer in answers:
        times = ", ".join(f"{what} {at:.2f}" for what, at in answer["times"].items())
        print(f"{answer['how']}: {times}; token {answer['token']}")
    return int(answers[0]["token"] != answers[1]["token"] or answers[1]["how"] == "loaded")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
    sys.exit(main(given.device, given.width, given.layers))
