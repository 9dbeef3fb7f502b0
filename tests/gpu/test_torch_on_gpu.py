"""PyTorch on gpumem's memory, each test in a process of its own: PyTorch switches once.

The same steps run with PyTorch's own allocator, and their results must agree to the bit.
"""

import json
import textwrap

import pytest
from gpu.torch_programs.allocator import computed
from helpers.child import python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

TRAINING = """
    import json
    import torch
    from torch import nn

    def train(steps=12, capture=False):
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True)
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        generator = torch.Generator().manual_seed(2)
        losses = []
        for _ in range(steps):
            rows = int(torch.randint(1, 700, (), generator=generator))
            data = torch.randn(rows, 512, generator=generator).cuda()
            optimizer.zero_grad()
            loss = (model(data) - data).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    def train_by_graph(replays=10):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        data = torch.randn(64, 256, device="cuda")
        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = (model(data) - data).square().mean()
            loss.backward()
            optimizer.step()
            return loss
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = train_by_graph.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        losses = []
        for _ in range(replays):
            torch.randn(1 << 20, device="cuda").mul_(3)     # what comes between launches
            graph.replay()
            losses.append(loss.item().hex())
        return losses
"""


def run(body, before="", **settings):
    """Run lines after TRAINING in a fresh process; return what they printed last, from JSON."""
    script = textwrap.dedent(before) + textwrap.dedent(TRAINING) + textwrap.dedent(body)
    done = python("-c", script, env=SETTINGS | settings)
    assert "gpumem:" not in done.stderr, done.stderr
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


FULL = "from gpumem.integrations import torch as gpumem_torch\ngpumem_torch.enable(mode='full')\n"


@pytest.fixture(scope="module")
def native():
    return run("print(json.dumps([train(), train_by_graph()]))")


def test_training_over_gpumem_gives_the_same_losses(native):
    losses, _ = native
    assert run("print(json.dumps(train()))", FULL) == losses


def test_captured_training_step_gives_the_same_losses(native):
    _, losses = native
    assert run("print(json.dumps(train_by_graph()))", FULL) == losses


def test_training_on_a_mem_pool_gives_the_same_losses_and_can_be_left(native):
    said = run("""
        import gpumem
        from gpumem.integrations import torch as gpumem_torch

        arena = gpumem.Arena("cuda:0")
        torch.cuda.init()
        with gpumem_torch.using(arena):
            assert gpumem_torch.status().mode == "pool"
            losses = train()
            held = arena.stats().reserved
            graphed = train_by_graph()
        assert gpumem_torch.status().mode is None
        torch.cuda.empty_cache()
        arena.shrink()
        before = arena.stats().num_allocs
        torch.empty(64 << 20, device="cuda")
        print(json.dumps([losses, graphed, held > 0, arena.stats().num_allocs - before]))
    """)
    losses, graphed, held, later = said
    assert [losses, graphed] == native
    assert held
    assert later == 0


def test_torch_memory_is_the_arenas_and_statistics_work():
    said = run(
        """
        import gpumem
        arena = gpumem.get_default_resource("cuda:0")
        tensor = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 10 << 20
        assert torch.cuda.memory_reserved() == arena.stats().reserved >= 10 << 20
        assert arena.stats().in_use >= 10 << 20
        other = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        del other
        assert torch.cuda.max_memory_allocated() == 40 << 20
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 10 << 20
        assert "GPU reserved memory" in torch.cuda.memory_summary()
        segments = torch.cuda.memory_snapshot()
        states = [block["state"] for segment in segments for block in segment["blocks"]]
        assert states.count("active_allocated") == 1
        del tensor
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
        """,
        FULL,
    )
    assert said == [0, 0]


def test_pinned_memory_is_an_arenas_unless_pytorchs_is_wanted():
    script = """
        import gpumem
        said = [gpumem_torch.status().pinned is None]
        kept = torch.empty(33 << 20, dtype=torch.uint8, pin_memory=True)
        arena = gpumem_torch.status().pinned
        said.append(None if arena is None else arena.stats().requested_in_use)
        refused = 0
        for again in (None, arena is not None, arena is None):
            try:
                gpumem_torch.enable(pinned=again)
            except gpumem.errors.IntegrationError:
                refused += 1
        print(json.dumps([*said, refused]))
    """
    assert run(script, FULL) == [True, 33 << 20, 1]
    own = FULL.replace("mode='full'", "mode='full', pinned=False")
    assert own != FULL
    assert run(script, own) == [True, None, 1]


def test_pinned_memory_alone_is_right_behind_copies_and_exact(native):
    """Blocks are freed behind queued copies and used again; the GPU's memory stays PyTorch's."""
    script = """
        before = torch.full((1 << 20,), 5.0).pin_memory()
        gpumem_torch.enable_pinned(limit="1GiB")
        stream, there = torch.cuda.Stream(), []
        busy = torch.randn(4096, 4096, device="cuda")
        with torch.cuda.stream(stream):
            there.append(before.to("cuda", non_blocking=True))
            del before
            for number in range(40):
                busy = (busy @ busy).clamp(-1, 1)
                host = torch.empty((3 + number % 3) << 20, pin_memory=True).fill_(number)
                there.append(host.to("cuda", non_blocking=True))
                assert host.is_pinned()
                del host
        stream.synchronize()
        wrong = [n for n, each in enumerate(there[1:]) if not (each == n).all()]
        arena = gpumem_torch.status().pinned
        kept = [torch.empty(65 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
        held = arena.stats().reserved / arena.stats().max_in_use
        try:
            torch.empty(600 << 20, dtype=torch.uint8, pin_memory=True)
        except torch.OutOfMemoryError as error:
            text = str(error)
        losses = [train(), train_by_graph()]
        print(json.dumps([wrong, float(there[0].min()), held, text, losses,
                          torch.cuda.get_allocator_backend()]))
    """
    before = "from gpumem.integrations import torch as gpumem_torch\n"
    wrong, first, held, text, losses, backend = run(script, before)
    assert (wrong, first, losses, backend) == ([], 5.0, native, "native")
    assert held <= 1.01
    assert "limit 1.0 GiB" in text
    assert "the host: " in text


def test_out_of_memory_is_torchs_error_with_the_arenas_report():
    kind, text, after = run(
        """
        import gpumem
        torch.cuda.set_per_process_memory_fraction(0.05)
        kept = torch.ones(1 << 20, device="cuda")
        try:
            torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            said = ["OutOfMemoryError", str(error)]
        except RuntimeError as error:
            said = ["RuntimeError", str(error)]
        print(json.dumps([*said, float(kept.sum())]))
        """,
        FULL,
    )
    assert kind == "OutOfMemoryError"
    assert "asked for 40.0 GiB" in text
    assert after == computed(1 << 20)


def test_without_a_compiler_full_mode_is_refused_and_auto_is_pool_with_a_warning(tmp_path):
    refusal, warned, mode, total = run(
        """
        import warnings
        import gpumem
        from gpumem.integrations import torch as gpumem_torch

        arena = gpumem.Arena("cuda:0")
        refusal = None
        try:
            gpumem_torch.enable(arena, mode="full")
        except gpumem.errors.IntegrationError as error:
            refusal = str(error)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gpumem_torch.enable(arena)
        x = torch.ones(1 << 20, device="cuda")
        texts = [str(each.message) for each in said]
        print(json.dumps([refusal, texts, gpumem_torch.status().mode, float(x.sum())]))
        """,
        CXX="/nonexistent/c++",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert "/nonexistent/c++ cannot be run" in refusal
    assert 'mode="pool"' in refusal
    assert any("/nonexistent/c++ cannot be run" in text for text in warned)
    assert (mode, total) == ("pool", computed(1 << 20))


def test_several_threads_and_streams_keep_their_bytes():
    assert (
        run(
            """
        import threading
        wrong = []
        def work(number):
            torch.cuda.set_device(0)
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(200):
                    rows = 1 + (step * 37 + number * 11) % 900
                    data = torch.full((rows, 257), number, device="cuda", dtype=torch.float32)
                    if int((data + data != 2 * number).sum()):
                        wrong.append((number, step))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(len(wrong))
        """,
            FULL,
        )
        == 0
    )


def test_enable_after_cuda_initialisation_and_disable_are_refused():
    said = run("""
        from gpumem.errors import IntegrationError
        from gpumem.integrations import torch as gpumem_torch
        torch.cuda.init()
        torch.empty(1, device="cuda")
        said = []
        try:
            gpumem_torch.enable(mode="full")
        except IntegrationError as error:
            said.append(str(error))
        said.append(gpumem_torch.status().mode)
        gpumem_torch.enable()
        said.append(gpumem_torch.status().mode)
        gpumem_torch.disable()
        said.append(gpumem_torch.status().mode)
        print(json.dumps(said))
    """)
    assert "initialised CUDA" in said[0]
    assert said[1:] == [None, "pool", None]
    said = run(
        """
        from gpumem.errors import IntegrationError
        try:
            gpumem_torch.disable()
        except IntegrationError as error:
            said = [str(error)]
        try:
            with gpumem_torch.using(mode="full"):
                torch.ones(4, device="cuda").sum().item()
        except IntegrationError as error:
            said.append(str(error))
        print(json.dumps([*said, gpumem_torch.status().mode]))
        """,
        FULL,
    )
    assert "for good" in said[0]
    assert said[-1] == "full"


@pytest.mark.parametrize("kept", ["tensor", "graph", "arena", "closed"])
def test_exit_is_quiet_whatever_is_alive(kept):
    bodies = {
        "tensor": "kept = torch.ones(1 << 20, device='cuda'); torch.kept = kept",
        "graph": "train_by_graph(); torch.kept = train_by_graph",
        "arena": "import gpumem; kept = torch.ones(4, device='cuda'); "
        "gpumem.kept = gpumem.get_default_resource('cuda:0')",
        "closed": "torch.ones(4, device='cuda'); import gpumem, gc; gc.collect(); "
        "gpumem.get_default_resource('cuda:0').close()",
    }
    script = FULL + textwrap.dedent(TRAINING) + bodies[kept]
    assert python("-c", script).stderr == ""
