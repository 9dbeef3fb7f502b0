"""``gpumem run``: programs that import a PyTorch without a GPU, and their children."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import torch_build

from gpumem.report import page

TORCH = Path(__file__).parents[1] / "helpers" / "fake_torch"

# What a program sees of gpumem, which it does not import itself.
SEEN = """
import json, sys
def seen():
    integration = sys.modules.get("gpumem.integrations.torch")
    if integration is None:
        return None
    status = integration.status()
    return [status.enabled, status.mode]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder with a build of the allocator for the stand-in of PyTorch."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        torch_build.carry()
    return folder


@pytest.fixture
def gpumem(tmp_path, monkeypatch, cache):
    """Run the command in a folder of the test's own; returns what came of it."""
    places = [str(TORCH), os.environ.get("PYTHONPATH", ""), os.fspath(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **options):
        command = [sys.executable, "-m", "gpumem", "run", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)

    return run


def script(tmp_path, body, name="script.py"):
    path = tmp_path / name
    path.write_text(SEEN + textwrap.dedent(body))
    return path


def answer(done, *told):
    assert (done.returncode, done.stderr.splitlines()) == (0, list(told)), done.stderr
    return json.loads(done.stdout)


def test_script_finds_gpumem_enabled_once_pytorch_is_imported(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        before = seen()
        import torch
        print(json.dumps([before, seen(), sys.argv[1:], torch.__spec__.loader.name]))
        """,
    )
    said = answer(gpumem(path, "--flag", "-x", "value"))
    assert said == [None, [True, "full"], ["--flag", "-x", "value"], "torch"]


def test_program_that_looks_pytorch_up_before_it_imports_it(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import importlib.util
        found = [importlib.util.find_spec("torch") for _ in range(2)]
        assert found[0].loader.get_filename("torch") == found[0].origin
        assert importlib.util.find_spec("gpumem") is not None
        import torch, gpumem
        kept = gpumem.Arena("host").allocate(5000)
        print(json.dumps([seen(), torch.__spec__.loader.name]))
        """,
    )
    out = tmp_path / "out.html"
    said = answer(gpumem("--report", "out.html", path), f"gpumem: wrote {out}")
    assert said == [[True, "full"], "torch"]
    assert list(runs_of(out).values()) == [5000]


def test_import_of_pytorch_that_fails_at_first_is_followed_by_gpumem_later(gpumem, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not now')")
    path = script(
        tmp_path,
        """
        import os
        try:
            import torch
        except ImportError:
            os.remove("torch.py")
        import importlib
        importlib.invalidate_caches()
        import torch
        print(json.dumps(seen()))
        """,
    )
    assert answer(gpumem(path)) == [True, "full"]


@pytest.mark.parametrize("mode", ["full", "auto"])
def test_program_that_enables_gpumem_itself_before_pytorch_is_imported(gpumem, tmp_path, mode):
    path = script(
        tmp_path,
        f"""
        from gpumem.integrations import torch as integration
        assert "torch" not in sys.modules
        integration.enable(mode={mode!r})
        import torch
        integration.enable(mode={mode!r})
        print(json.dumps(seen()))
        """,
    )
    assert answer(gpumem(path)) == [True, "full"]


def test_program_that_does_not_import_pytorch_imports_nothing_of_gpumems(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        print(json.dumps([name for name in sys.modules if name.startswith("gpumem")]))
        """,
    )
    assert answer(gpumem(path)) == []


def test_children_have_it_too(gpumem, tmp_path):
    script(tmp_path, "import torch; print(json.dumps(seen()))", "child.py")
    path = script(
        tmp_path,
        """
        import subprocess
        done = subprocess.run([sys.executable, "child.py"], capture_output=True, text=True)
        print(done.stdout, end="")
        """,
    )
    assert answer(gpumem(path)) == [True, "full"]


def test_processes_of_multiprocessing_have_it_too(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import multiprocessing
        def work(queue):
            import torch
            queue.put(seen())
        if __name__ == "__main__":
            said = []
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=work, args=(queue,))
                process.start()
                said.append(queue.get())
                process.join()
            print(json.dumps(said))
        """,
    )
    assert answer(gpumem(path)) == [[True, "full"], [True, "full"]]


def test_module_and_command_are_run(gpumem, tmp_path):
    script(tmp_path, "import torch; print(json.dumps(seen()))", "mine.py")
    assert answer(gpumem("-m", "mine")) == [True, "full"]
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} mine.py\n")
    launcher.chmod(0o700)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    assert answer(gpumem("launcher", env={**os.environ, "PATH": path})) == [True, "full"]


def test_exit_code_and_signals_are_the_programs(gpumem, tmp_path):
    assert gpumem(script(tmp_path, "sys.exit(7)")).returncode == 7
    done = gpumem(script(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert done.returncode == -9


def test_exit_status_after_an_interrupt_is_the_programs_with_a_page_too(gpumem, tmp_path):
    body = """
        import os, signal, time, gpumem
        kept = gpumem.Arena("host").allocate(5000)
        os.kill(os.getpid(), signal.SIGINT)
        while True:     # the signal may reach another thread, which does not end a pause
            time.sleep(0.01)
    """
    path = script(tmp_path, body)
    assert gpumem(path).returncode == -signal.SIGINT
    done = gpumem("--report", "out.html", path)
    assert (done.returncode, "KeyboardInterrupt" in done.stderr) == (-signal.SIGINT, True)
    assert list(runs_of(tmp_path / "out.html").values()) == [5000]


def test_programs_own_start_of_python_is_run(gpumem, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'run'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    path = script(
        tmp_path,
        """
        import sitecustomize
        import torch
        print(json.dumps([mine, sitecustomize.__file__, seen()]))
        """,
    )
    assert answer(gpumem(path)) == ["run", str(tmp_path / "sitecustomize.py"), [True, "full"]]


def test_limit_is_the_arenas(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        setting = sys.modules["gpumem.integrations.torch"]._switch.current()
        print(json.dumps(setting.resources._config["max_mem"]))
        """,
    )
    assert answer(gpumem("--max-mem", "20GiB", path)) == 20 << 30


def test_limits_may_be_shares_of_the_memory_that_they_limit(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        from gpumem.integrations.torch._startup import Options
        options = Options.of_environment()
        print(json.dumps([options.max_mem, options.pinned, options.offload]))
        """,
    )
    assert answer(gpumem("--pinned=25%", "--offload=90%", path)) == [0, "25%", "90%"]
    assert answer(gpumem("--max-mem=80%", path)) == ["80%", None, None]


@pytest.fixture
def node():
    name = f"test-run-{os.getpid()}"
    yield name
    Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{name}").unlink(missing_ok=True)


def test_node_limit_is_the_budgets_and_bounds_the_figures_of_free_memory(gpumem, tmp_path, node):
    path = script(
        tmp_path,
        """
        import torch
        import gpumem
        node = sys.modules["gpumem.integrations.torch"]._switch.current().resources._node
        budget = gpumem.Budget(None, node=node)
        before = torch.cuda.mem_get_info()
        budget.reserve("5GiB").commit()
        print(json.dumps([budget.node, before, torch.cuda.memory.mem_get_info(0)]))
        """,
    )
    name, before, after = answer(gpumem("--node-limit", f"{node}/a=20GiB", path))
    assert (name, before, after) == (f"{node}/a", [20 << 30] * 2, [15 << 30, 20 << 30])
    # The next one finds the limit; in a name above, which has none, the GPU's figures hold.
    assert answer(gpumem("--node-limit", f"{node}/a", path))[1] == [20 << 30] * 2
    assert answer(gpumem("--node-limit", node, path))[1] == [70 << 30, 80 << 30]


def test_node_limit_is_of_pinned_memory_where_that_alone_is_gpumems(gpumem, tmp_path, node):
    path = script(
        tmp_path,
        """
        import torch
        from gpumem.integrations.torch import _pinned
        print(json.dumps([_pinned.node, torch.cuda.mem_get_info()]))
        """,
    )
    done = gpumem("--pinned", "--node-limit", f"{node}=3GiB", path)
    assert json.loads(done.stdout) == [node, [70 << 30, 80 << 30]], done.stderr


def runs_of(path):
    """Give the label and the peak of each run of a page."""
    runs = page.facts_of(path)["runs"]
    return {run["label"]: run["figures"]["peak_live_bytes"] for run in runs}


def test_page_has_a_run_of_each_process_that_allocated(gpumem, tmp_path):
    script(tmp_path, "import torch, gpumem; gpumem.Arena('host').allocate(5000)", "child.py")
    path = script(
        tmp_path,
        """
        import os, subprocess, torch, gpumem
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        kept = gpumem.Arena("host").allocate(1000)
        child = subprocess.Popen([sys.executable, "../child.py"])
        child.wait()
        subprocess.run([sys.executable, "-c", "import torch"])       # allocates nothing
        print(json.dumps([os.getpid(), child.pid]))
        """,
    )
    out = tmp_path / "out.html"
    for _ in range(2):  # the second one's page replaces the first one's
        parent, child = answer(gpumem("--report", "out.html", path), f"gpumem: wrote {out}")
        assert runs_of(out) == {f"process {child}": 5000, f"process {parent}": 1000}
        os.rmdir("elsewhere")
    facts = page.facts_of(out)
    assert facts["runs"][facts["shown"]]["label"] == f"process {child}"  # the busiest
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.html", "script.py", "child.py"}


def test_page_has_what_a_forked_child_allocated_and_not_what_its_parent_did(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import os, gpumem
        kept = gpumem.Arena("host").allocate(1000)
        children = []
        for needed in (5000, 0):
            if (child := os.fork()) == 0:
                kept_here = gpumem.Arena("host").allocate(needed)
                sys.exit()
            children.append(child)
            os.waitpid(child, 0)
        print(json.dumps([os.getpid(), children[0]]))
        """,
    )
    out = tmp_path / "out.html"
    done = gpumem("--report", "out.html", path)
    assert (done.returncode, done.stderr) == (0, f"gpumem: wrote {out}\n")
    parent, child = json.loads(done.stdout)
    assert runs_of(out) == {f"process {child}": 5000, f"process {parent}": 1000}


def owners_of(path):
    (run,) = page.facts_of(path)["runs"]
    return set(run["owners"])


def test_page_names_the_line_that_allocated_unless_stacks_are_off(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import gpumem
        def cache():
            return gpumem.Arena("host").allocate(5000)
        kept = cache()
        """,
    )
    out = tmp_path / "out.html"
    for more, owner in (((), f"cache ({path}:"), (("--stacks", "0"), "host:0")):
        assert gpumem("--report", "out.html", *more, path).returncode == 0
        (found,) = owners_of(out)
        assert found.startswith(owner)
    refused = gpumem("--report", "out.html", "--stacks", "2", path)
    assert (refused.returncode, "0<=x<=1" in refused.stderr) == (2, True)


def test_ranks_that_end_together_are_all_on_the_page(gpumem, tmp_path):
    # Each rank waits for the end of its input, which all have in common; a launcher that imports
    # neither PyTorch nor gpumem has nothing to tell.
    rank = "import gpumem; kept = gpumem.Arena('host').allocate(1000); sys.stdin.read()"
    script(tmp_path, rank, "rank.py")
    path = script(
        tmp_path,
        """
        import os, subprocess
        reads, writes = os.pipe()
        command = [sys.executable, "rank.py"]
        ranks = [
            subprocess.Popen(command, stdin=reads, env={**os.environ, "RANK": str(rank)})
            for rank in (10, 2, 0, 1)
        ]
        os.close(writes)
        print(json.dumps([rank.wait() for rank in ranks]))
        """,
    )
    assert answer(gpumem("--report", "out.html", path)) == [0] * 4
    runs = [(f"rank {rank}", 1000) for rank in (0, 1, 2, 10)]
    assert list(runs_of(tmp_path / "out.html").items()) == runs
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.html", "script.py", "rank.py"}


def test_pytorch_that_cannot_be_switched_is_told_and_used(gpumem, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.1.0'\n")
    path = script(tmp_path, "import torch; print(torch.__version__)")
    done = gpumem(path)
    assert (done.returncode, done.stdout) == (0, "2.1.0\n")
    assert done.stderr.startswith("gpumem: not enabled for PyTorch: ")
    assert done.stderr.count("\n") == 1


def test_without_a_compiler_pytorch_keeps_its_allocator_and_one_line_says_so(gpumem, tmp_path):
    path = script(tmp_path, "import torch; print(json.dumps(seen()))")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "/nonexistent/c++"}
    done = gpumem(path, env=os.environ | environment)
    assert (done.returncode, json.loads(done.stdout)) == (0, [False, None])
    assert done.stderr.startswith("gpumem: not enabled for PyTorch: gpumem's allocator cannot be")
    assert done.stderr.count("\n") == 1


def test_report_without_an_enabled_pytorch_shows_the_programs_own_arenas(gpumem, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.1.0'\n")
    body = "import torch, gpumem; gpumem.Arena('host').allocate({})"
    done = gpumem("--report", "out.html", script(tmp_path, body.format(5000)))
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first.startswith("gpumem: not enabled for PyTorch: ")
    assert second == f"gpumem: wrote {tmp_path / 'out.html'}"
    assert "<html" in (tmp_path / "out.html").read_text()
    done = gpumem("--report", "none.html", script(tmp_path, body.format(0)))
    assert not (tmp_path / "none.html").exists()
    assert "none.html: not written: no block was allocated through gpumem" in done.stderr


def test_report_shows_the_arenas_of_a_program_without_pytorch(gpumem, tmp_path):
    done = gpumem(
        "--report",
        "out.html",
        script(tmp_path, "import gpumem; kept = gpumem.Arena('host').allocate(5000)"),
    )
    assert (done.returncode, done.stderr) == (0, f"gpumem: wrote {tmp_path / 'out.html'}\n")
    assert "<html" in (tmp_path / "out.html").read_text()


def test_process_that_ends_before_its_launcher_does_not_tell_of_the_page(gpumem, tmp_path):
    body = "import {} gpumem; kept = gpumem.Arena('host').allocate({})"
    script(tmp_path, body.format("", 5000), "child.py")
    launch = "; import subprocess; subprocess.run([sys.executable, 'child.py'])"
    for needed in (0, 1000):  # one that allocates nothing tells of it too
        path = script(tmp_path, body.format("torch,", needed) + launch)
        done = gpumem("--report", "out.html", path)
        lines = [line for line in done.stderr.splitlines() if "wrote" in line]
        assert lines == [f"gpumem: wrote {tmp_path / 'out.html'}"]


def test_missing_report_of_a_program_without_pytorch_and_gpumem_is_told(gpumem, tmp_path):
    done = gpumem("--report", "out.html", script(tmp_path, "print('ran')"))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "out.html: not written: this process has imported neither PyTorch" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


def test_child_without_the_commands_variable_runs_without_gpumem(gpumem, tmp_path):
    path = script(
        tmp_path,
        """
        import os, subprocess
        environment = {name: os.environ[name] for name in os.environ if name != "GPUMEM_RUN"}
        child = "import sys, torch; print(int('gpumem' in sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", child], env=environment, capture_output=True, text=True
        )
        print(json.dumps([done.stdout, done.stderr]))
        """,
    )
    assert answer(gpumem(path)) == ["0\n", ""]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-of-this-name"], "'nothing-of-this-name' is neither a file nor a command"),
        (["--max-memory", "1GiB", "x.py"], "Did you mean"),
        (["--max-mem", "much", "x.py"], "much"),
        (["--node-limit", "gpu0=much", "x.py"], "much"),
        (["--node-limit", "gpu 0=20GiB", sys.executable], "invalid node = 'gpu 0'"),
        (["--node-limit", "gpu0=80%", sys.executable], "limit = '80%': expected bytes"),
        (["--pinned=0%", "x.py"], "above 0% and at most 100%"),
        (["--max-mem", "180%", "x.py"], "invalid --max-mem = '180%': expected a percentage"),
        (["--offload=101%", "x.py"], "above 0% and at most 100%"),
        (["--stacks", "nan", "x.py"], "'nan' is not a valid number from 0 to 1"),
        ([], "PROGRAM"),
    ],
)
def test_invalid_command_line_is_refused(gpumem, arguments, said):
    done = gpumem(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("none/page.html", "there is no folder"),
        ("locked/page.html", "is read-only"),
        ("", "it is a folder"),
    ],
)
def test_page_that_cannot_be_written_is_refused_before_the_program_runs(
    gpumem, tmp_path, page, said
):
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.access(tmp_path / "locked", os.W_OK) and "locked" in page:
        pytest.skip("this user may write into every folder")
    done = gpumem("--report", page, script(tmp_path, "print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{page or '.'} cannot be written: " in done.stderr
    assert said in done.stderr


def test_page_that_would_replace_the_program_is_refused(gpumem, tmp_path):
    path = script(tmp_path, "print('ran')")
    done = gpumem("--report", path, path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected another file than the program" in done.stderr


def test_nothing_is_left_behind(gpumem, tmp_path):
    path = script(tmp_path, "import torch")
    assert gpumem(path).returncode == 0
    assert {each.name for each in tmp_path.iterdir()} == {"script.py"}


def test_settings_of_pytorchs_allocator_without_effect_are_named_once(
    gpumem, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    done = gpumem(script(tmp_path, "import torch; print(json.dumps(seen()))"))
    assert json.loads(done.stdout) == [True, "full"]
    assert done.stderr.count("max_split_size_mb has no effect over gpumem") == 1


def test_memory_fraction_that_is_none_leaves_pytorch_its_own_allocator(
    gpumem, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:1.5")
    done = gpumem(script(tmp_path, "import torch; print(json.dumps(seen()))"))
    assert json.loads(done.stdout) == [False, None]
    assert "invalid per_process_memory_fraction = '1.5'" in done.stderr
