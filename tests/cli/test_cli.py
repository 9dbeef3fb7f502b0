"""The command line: what it prints, where, and with which exit code."""

import importlib
import json
import os
import pickle
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.child import run
from helpers.torch_snapshots import entry, snapshot_file
from hypothesis import given
from hypothesis import strategies as st

import gpumem
from gpumem import replay as replaying
from gpumem._support.sizes import exact_size, format_size, is_size_with_unit, parse_size
from gpumem._support.texts import counted
from gpumem.cli import commands
from gpumem.errors import ConfigError, OutOfMemoryError

# By its full name: in its package, "demo" is the command.
demo_module = importlib.import_module("gpumem.cli.demo")
REPLAY_KEYS = [
    "device",
    "events",
    "peak_requested_bytes",
    "peak_live_or_unfinished_bytes",
    "peak_in_use_bytes",
    "peak_reserved_bytes",
    "fragmentation",
    "ns_per_event",
    "failed_allocs",
    "driver_calls",
    "pages_moved",
    "memory",
    "notice",
]
SMALL = {
    "action": [0, 2],
    "block": [0, 0],
    "size": [4096] * 2,
    "stream": [0] * 2,
    "time_us": [0] * 2,
}


@pytest.fixture
def small_trace(tmp_path):
    path = tmp_path / "small.npz"
    np.savez(path, **SMALL)
    return path


def one_object(output):
    """Read stdout as exactly one JSON object."""
    value, end = json.JSONDecoder().raw_decode(output)
    assert isinstance(value, dict)
    assert output[end:] == "\n"
    return value


def python(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# ------------------------------------------------------------------------------------- the group


def test_help_says_in_a_whole_sentence_what_each_command_does(gpumem_command):
    rows = gpumem_command("--help")[1].split("Commands:\n")[1].splitlines()
    assert len(rows) == len(commands.commands)
    assert [row for row in rows if not row.endswith(".") or "..." in row] == []


def test_help_names_every_command(gpumem_command):
    code, out, err = gpumem_command()
    assert (code, err) == (0, "")
    for name in ("info", "run", "replay", "report", "plan", "top", "bench", "demo", "completion"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


def test_the_version_needs_no_module_of_a_command():
    done = run("""
        import sys
        from gpumem.cli import main
        main(["--version"])
        print(*(name for name in sys.modules if name.startswith("gpumem.cli.")))
        """)
    assert done.stdout.splitlines() == [f"gpumem {gpumem.__version__}", ""]


def test_version_is_printed(gpumem_command):
    assert gpumem_command("--version") == (0, f"gpumem {gpumem.__version__}\n", "")


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_every_command_has_help_and_a_json_option(gpumem_command, name):
    code, out, _ = gpumem_command(name, "--help")
    assert code == 0
    assert "--json" in out or name == "run"  # which prints what its program prints


def test_command_runs_as_a_module():
    done = python("-m", "gpumem", "replay", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpumem: nope: no such file")


def test_importing_gpumem_imports_neither_the_command_line_nor_a_framework():
    done = python("-c", "import sys, gpumem; print(*sys.modules)")
    heavy = {"click", "rich", "gpumem.cli", "torch", "cupy", "cuda", "numba"}
    assert done.returncode == 0
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_closed_pipe_causes_no_traceback(options):
    command = [sys.executable, "-m", "gpumem", "info", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=60) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "gpt2_varlen_train", "--json"),
        ("replay", "--list"),
        ("info",),
        ("info", "--json"),
        ("completion", "bash"),
        ("--version",),
        (),
    ],
)
def test_unwritable_stdout_is_one_line_and_exit_code_1(arguments):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpumem", *arguments], stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (1, b"gpumem: stdout: No space left on device\n")


def test_closed_stdout_is_one_line_and_exit_code_1():
    script = f"exec {sys.executable} -m gpumem info --json >&-"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"gpumem: stdout: it is closed\n")


def test_tables_print_on_an_ascii_terminal():
    done = python(
        "-m", "gpumem", "replay", "--list", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0
    assert done.stdout.isascii()


# ----------------------------------------------------------------------------------------- info


def test_info_as_json_describes_every_device_and_every_capability(gpumem_command):
    code, out, err = gpumem_command("info", "--json")
    facts = one_object(out)
    assert (code, err) == (0, "")
    assert facts["versions"]["gpumem"] == gpumem.__version__
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert [d["device"] for d in facts["devices"]] == [str(d) for d in gpumem.devices()]
    host = facts["devices"][-1]
    assert (host["type"], host["index"]) == ("host", 0)
    assert 0 < host["free_bytes"] <= host["total_bytes"]
    assert set(host["capabilities"]) == set(gpumem.Device("host").capabilities)
    for answer in host["capabilities"].values():
        assert answer["supported"] or answer["reason"]


def test_info_warns_of_the_other_distribution_named_gpumem(gpumem_command, monkeypatch, tmp_path):
    assert one_object(gpumem_command("info", "--json")[1])["warnings"] == []
    metadata = tmp_path / "gpumem-9.8.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: gpumem\nVersion: 9.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    (warning,) = one_object(gpumem_command("info", "--json")[1])["warnings"]
    assert "distribution gpumem 9.8" in warning
    assert "gpumem-core" in warning
    assert "gpumem 9.8" in " ".join(gpumem_command("info")[1].split())


def test_info_says_why_there_is_no_cuda(gpumem_command, monkeypatch):
    status = gpumem.DriverStatus(False, "no\n driver here", 0, ())
    monkeypatch.setattr(gpumem, "driver_status", lambda: status)
    facts = one_object(gpumem_command("info", "--json")[1])
    assert facts["cuda"] == {
        "available": False,
        "reason": "no driver here",
        "missing_functions": [],
    }
    assert facts["versions"]["driver"] is None
    assert "not available: no driver here" in gpumem_command("info")[1]


def test_info_shows_the_cuda_version_and_missing_driver_functions(gpumem_command, monkeypatch):
    status = gpumem.DriverStatus(True, "", 12090, ("cuMemCreate",))
    monkeypatch.setattr(gpumem, "driver_status", lambda: status)
    assert one_object(gpumem_command("info", "--json")[1])["versions"]["driver"] == "12.9"
    out = gpumem_command("info")[1]
    assert re.search(r"CUDA +12\.9", out)
    assert "not in this driver: cuMemCreate" in out


def test_info_shows_devices_with_capabilities_or_reasons(gpumem_command):
    code, out, _ = gpumem_command("info")
    assert code == 0
    host = gpumem.Device("host")
    assert host.name in out
    for name, answer in host.capabilities.items():
        expected = "yes" if answer.supported else "no: "
        assert re.search(rf"^ ?{name} +{expected}", out, re.MULTILINE)


def test_info_lists_a_failing_device(gpumem_command, monkeypatch):
    silent = gpumem.Device("host:63")
    monkeypatch.setattr(gpumem, "devices", lambda: [silent])
    code, out, _ = gpumem_command("info", "--json")
    device = one_object(out)["devices"][0]
    assert code == 0
    assert device["total_bytes"] is None
    assert "unknown device 'host:63'" in device["error"]
    assert "not usable" in gpumem_command("info")[1]


# --------------------------------------------------------------------------------------- replay


def test_replay_as_json_has_exactly_the_documented_keys(gpumem_command):
    code, out, err = gpumem_command("replay", "multistream_train", "--device", "host", "--json")
    result = one_object(out)
    assert (code, err) == (0, "")
    assert list(result) == REPLAY_KEYS
    assert (result["device"], result["events"]) == ("host:0", 20138)
    assert result["peak_requested_bytes"] == 3455561800
    assert result["failed_allocs"] == 0
    assert result["peak_reserved_bytes"] >= result["peak_in_use_bytes"]
    assert result["fragmentation"] == pytest.approx(
        result["peak_reserved_bytes"] / result["peak_requested_bytes"]
    )


def test_replay_shows_the_result_next_to_what_the_recorded_run_reserved(gpumem_command):
    code, out, err = gpumem_command("replay", "multistream_train", "--device", "host")
    assert (code, err) == (0, "")
    assert re.search(r"trace +multistream_train, 3 streams", out)
    assert re.search(r"peak requested +3\.2 GiB", out)
    assert re.search(r"failed allocations +0", out)
    assert re.search(r"when recorded +7\.5 GiB reserved, 2\.319", out)


def test_replay_with_lag_shows_what_unfinished_work_withholds(gpumem_command):
    options = ["multistream_train", "--device", "host", "--lag-us", 10000]
    code, out, err = gpumem_command("replay", *options)
    assert (code, err) == (0, "")
    assert re.search(r"peak live or unfinished +4\.0 GiB, reserved / it \d\.\d{3}", out)


def test_replay_reads_every_format(gpumem_command, tmp_path, small_trace):
    snapshot = snapshot_file(tmp_path / "snapshot.pickle", [entry("alloc", 512, 4096)])
    log = tmp_path / "rmm.csv"
    log.write_text(
        "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000001,allocate,0x200,4096,0x0\n"
    )
    for path in (small_trace, snapshot, log):
        code, out, _ = gpumem_command("replay", path, "--device", "host", "--json")
        assert code == 0
        assert one_object(out)["peak_requested_bytes"] == 4096


def test_replay_names_the_memory_of_several_that_it_takes(gpumem_command, tmp_path):
    busy = [entry("alloc", 512 * i, 1) for i in range(1, 4)]
    path = snapshot_file(tmp_path / "snapshot.pickle", [busy[0]], busy)
    code, out, err = gpumem_command("replay", path, "--device", "host", "--json")
    assert (code, one_object(out)["memory"], one_object(out)["events"]) == (0, "device 1", 3)
    assert "has device 0, device 1; device 1 is replayed (--memory)" in err
    assert err.strip() == f"notice: {one_object(out)['notice']}"
    code, out, err = gpumem_command("replay", path, "--device=host", "--memory=0", "--json")
    assert (code, one_object(out)["memory"], one_object(out)["notice"]) == (0, "device 0", "")
    code, out, err = gpumem_command("replay", path, "--device=host", "--memory=2")
    assert (code, out) == (2, "")
    assert "device is 2, expected 0..1" in err


def test_replay_lists_the_bundled_traces(gpumem_command):
    code, out, _ = gpumem_command("replay", "--list")
    assert code == 0
    assert re.search(r"gpt2_varlen_train +102,762 +1 +11\.2 GiB", out)
    listed = one_object(gpumem_command("replay", "--list", "--json")[1])["samples"]
    names = ["gpt2_out_of_memory", "gpt2_train", "gpt2_varlen_train", "multistream_train"]
    assert [s["name"] for s in listed] == names
    assert listed[3]["events"] == 20138
    assert listed[3]["streams"] == 3
    assert listed[3]["peak_requested_bytes"] == 3455561800
    assert os.path.isfile(listed[3]["path"])


@pytest.mark.parametrize("limit", ["1GiB", "1073741824", "1.0 gib"])
def test_replay_counts_failed_allocations_under_a_limit(gpumem_command, limit):
    code, out, err = gpumem_command(
        "replay", "multistream_train", "--device", "host", "--max-mem", limit, "--json"
    )
    result = one_object(out)
    assert code == 1
    assert f"{result['failed_allocs']:,} of 6,771 allocations failed" in err
    assert result["peak_reserved_bytes"] <= 1 << 30 < result["peak_requested_bytes"]
    assert result["failed_allocs"] > 0
    assert result["fragmentation"] >= 1


def test_replay_says_that_fragmentation_lacks_failed_allocations(gpumem_command):
    code, out, err = gpumem_command(
        "replay", "multistream_train", "--device", "host", "--max-mem", "1GiB"
    )
    assert code == 1
    assert len(err.splitlines()) == 1
    assert re.search(r"fragmentation +1\.\d+ of the allocations that did not fail", out)


def test_replay_of_failed_allocations_alone_has_no_fragmentation(small_trace):
    result = replaying.replay(small_trace, "host", config={"backing": "regions"}, max_mem=1)
    assert (result.failed_allocs, result.peak_reserved_bytes) == (1, 0)
    assert result.fragmentation == 1.0


def test_replay_settings_reach_the_arena(gpumem_command, small_trace, monkeypatch):
    seen = []

    def record(trace, device, *, config, lag_us):
        seen.append((str(device), dict(config), lag_us))
        return original(trace, device, config=config, lag_us=lag_us)

    original = replaying.replay
    monkeypatch.setattr(replaying, "replay", record)
    options = ["--config", "arena.initial_chunk_size_bytes = 4MiB", "--config", "enable=1"]
    options += ["--max-mem", "2GB", "--device", "host:0", "--lag-us", 7, "--json"]
    code, out, _ = gpumem_command("replay", small_trace, *options)
    assert (code, one_object(out)["failed_allocs"]) == (0, 0)
    expected = {
        "arena.initial_chunk_size_bytes": "4194304",
        "enable": "1",
        "arena.max_mem": "2000000000",
    }
    assert seen == [("host:0", expected, 7)]


def test_replay_accepts_a_setting_repeated_with_one_value(gpumem_command, small_trace):
    repeated = ["--config", "max_mem=1GiB"] * 2 + ["--max-mem", "1073741824"]
    assert gpumem_command("replay", small_trace, *repeated, "--device", "host")[0] == 0


def test_replay_calls_the_driver_directly_with_the_arena_disabled(gpumem_command):
    options = ["--device", "host", "--config", "enable=false", "--json"]
    code, out, _ = gpumem_command("replay", "multistream_train", *options)
    assert code == 0
    assert one_object(out)["driver_calls"] > 6771  # one per allocation, and the frees


class Malicious:
    def __reduce__(self):
        return os.system, ("false",)


def write_garbage(path):
    path.write_bytes(b"garbage \x00\xff")


def write_malicious(path):
    path.write_bytes(pickle.dumps({"device_traces": [[Malicious()]]}))


def write_truncated(path):
    np.savez(path.with_suffix(".npz"), **SMALL)
    path.write_bytes(path.with_suffix(".npz").read_bytes()[:-40])


def write_inconsistent(path):
    with path.open("wb") as file:
        np.savez(file, **{**SMALL, "size": [4096, 1]})


@pytest.mark.parametrize("json_option", [[], ["--json"]])
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_garbage, "not a trace"),
        (write_malicious, "system', expected plain data only"),
        (write_truncated, "damaged .npz archive"),
        (write_inconsistent, "event 1: block 0 is freed with size 1, expected 4096"),
        (lambda path: path.touch(), "the file is empty"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: None, "no such file, and no sample of that name"),
    ],
)
def test_invalid_trace_is_one_line_on_stderr_and_exit_code_2(
    gpumem_command, tmp_path, write, message, json_option
):
    path = tmp_path / "trace\nwith a line break"
    write(path)
    code, out, err = gpumem_command("replay", path, *json_option)
    assert (code, out) == (2, "")
    assert err.startswith("gpumem: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("command", [["report"], ["report", "--json"], ["replay", "--device=host"]])
def test_file_name_that_a_terminal_would_obey_is_shown_escaped(
    gpumem_command, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xff\x1b[2J.npz")  # not UTF-8
    with open(name, "wb") as file:
        np.savez(file, **SMALL)
    code, out, err = gpumem_command(*command, name)
    assert (code, err) == (0, "")
    assert all(line.isprintable() for line in out.split("\n"))
    code, out, err = gpumem_command(*command, f"absent{name}")
    assert (code, out) == (2, "")
    assert err.removesuffix("\n").isprintable()


@pytest.mark.parametrize("command", ["report", "replay"])
@pytest.mark.parametrize(
    "meta",
    [
        '{"peak_reserved": 1' + "0" * 400 + "}",
        '{"peak_reserved": -5, "lost": -1, "torn": 1' + "0" * 400 + "}",
        '{"speed": Infinity, "share": NaN, "began_with": [], "lost": 3}',
    ],
    ids=["huge", "negative", "not finite"],
)
def test_facts_of_a_trace_that_cannot_be_are_left_out(gpumem_command, tmp_path, command, meta):
    path = tmp_path / "trace.npz"
    np.savez(path, **SMALL, meta=meta)
    options = ["-o", tmp_path / "page.html"] if command == "report" else ["--device=host"]
    code, out, err = gpumem_command(command, path, *options)
    assert (code, err.startswith("notice: 3 events were lost")) == (0, '"lost": 3' in meta)
    assert "when recorded" not in out


def test_report_of_numbers_that_a_page_cannot_show_is_bad_input(gpumem_command, tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, **{**SMALL, "time_us": [0, 1 << 60]})
    code, out, err = gpumem_command("report", path, "-o", tmp_path / "page.html")
    assert (code, out) == (2, "")
    assert "a page shows numbers from 0 to" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option"),
        (["info", "--nope"], "No such option"),
        (["info", "extra"], "unexpected extra argument"),
        (["replay"], "missing TRACE"),
        (["replay", "--list", "multistream_train"], "--list cannot be combined with TRACE"),
        (["replay", "TRACE", "--nope"], "No such option"),
        (["replay", "TRACE", "--device", "gpu"], "unknown device 'gpu'"),
        (["replay", "TRACE", "--device", "cuda:99"], "unknown device 'cuda:99': expected one of"),
        (["replay", "TRACE", "--device", "host:7"], "unknown device 'host:7': expected one of"),
        (["replay", "TRACE", "--max-mem", "-1"], "invalid size '-1'"),
        (["replay", "TRACE", "--max-mem", "2XB"], "invalid size '2XB'"),
        (["replay", "TRACE", "--lag-us", "-1"], "--lag-us"),
        (["replay", "TRACE", "--lag-us", "soon"], "valid integer from 0 to 1099511627775"),
        (["replay", "TRACE", "--lag-us", 1 << 40], "1099511627776 is not in the range"),
        (["report", "TRACE", "--device", "x"], "valid integer of 0 or more"),
        (["replay", "TRACE", "--config", "max_mem"], "expected KEY=VALUE"),
        (["replay", "TRACE", "--config", "=1"], "expected KEY=VALUE"),
        (["replay", "TRACE", "--config", "nope=1"], "unknown key 'nope'"),
        (["replay", "TRACE", "--config", "max_mem=-1"], "invalid max_mem = '-1'"),
        (["replay", "TRACE", "--config", "max_mem=0.3kB", "--max-mem", "1"], "given twice"),
        (["replay", "TRACE", "--config", "enable=0", "--config", "enable=1"], "given twice"),
        (["replay", "TRACE", "--config", "split_rule=loose"], "split_rule = 'loose'"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_exit_code_2(
    gpumem_command, small_trace, arguments, message
):
    given = [str(small_trace) if word == "TRACE" else word for word in arguments]
    code, out, err = gpumem_command(*given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_failure_is_one_line_on_stderr_and_exit_code_1(gpumem_command, small_trace, monkeypatch):
    def fail(*_, **__):
        raise OutOfMemoryError("no room\nfor 5 bytes")

    monkeypatch.setattr(replaying, "replay", fail)
    result = gpumem_command("replay", small_trace, "--json")
    assert result == (1, "", "gpumem: OutOfMemoryError: no room for 5 bytes\n")


def test_interrupt_is_one_line_on_stderr_and_exit_code_130(
    gpumem_command, small_trace, monkeypatch
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(replaying, "replay", interrupt)
    code, out, err = gpumem_command("replay", small_trace)
    assert (code, out, err.strip()) == (130, "", "gpumem: interrupted")


def test_replay_shows_progress_on_a_terminal_only(small_trace):
    command = [sys.executable, "-m", "gpumem", "replay", str(small_trace), "--json"]
    # Even where colour is forced, a pipe is no terminal.
    assert python(*command[1:], env={**os.environ, "FORCE_COLOR": "1"}).stderr == ""
    controller, terminal = pty.openpty()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=60)
        shown = os.read(controller, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(controller)
    assert "replaying" in shown
    assert list(one_object(done.stdout.decode())) == REPLAY_KEYS


# ----------------------------------------------------------------------------------------- demo


def test_demo_compares_policies_and_shares_memory_without_a_copy(gpumem_command):
    code, out, err = gpumem_command("demo", "--json")
    facts = one_object(out)
    assert (code, err) == (0, "")
    assert facts["trace"] in ("gpt2_varlen_train", "multistream_train")
    assert facts["device"] == str(gpumem.default_device())
    policies = {policy["name"]: policy for policy in facts["policies"]}
    assert list(policies) == ["gpumem", "PyTorch-like caching", "calls of the host device"]
    assert all(p["peak_reserved_bytes"] >= facts["peak_requested_bytes"] for p in policies.values())
    assert policies["gpumem"]["driver_calls"] < policies["calls of the host device"]["driver_calls"]
    numpy_view = facts["views"][0]
    assert (numpy_view["library"], numpy_view["zero_copy"]) == ("NumPy", True)


def test_demo_prints_a_short_table(gpumem_command):
    code, out, _ = gpumem_command("demo")
    assert code == 0
    for text in (gpumem.Device("host").name, "real training run", "PyTorch-like caching"):
        assert text in out
    assert re.search(r"NumPy +\S+ +yes", out)
    assert len(out.splitlines()) < 40
    assert "Next:" in out
    assert "gpumem report" in out or "gpumem run" in out


@pytest.mark.parametrize("library", ["jax", "pyarrow"])
def test_demo_shares_memory_with_what_is_installed(library):
    pytest.importorskip(library)
    check = getattr(demo_module, f"_check_{library}")
    view = demo_module._view(library, gpumem.MemoryInfo("host"), check)
    assert view.zero_copy, view.detail


def test_demo_fails_when_a_library_sees_a_copy(gpumem_command, monkeypatch):
    monkeypatch.setattr(demo_module, "_check_numpy", lambda buffer: False)
    code, out, err = gpumem_command("demo")
    assert code == 1
    assert "no: it uses other bytes" in out
    assert err == "gpumem: NumPy: it uses other bytes\n"


def test_demo_fails_when_a_library_raises(gpumem_command, monkeypatch):
    def refuse(buffer):
        raise RuntimeError("not\nthat one")

    monkeypatch.setattr(demo_module, "_check_numpy", refuse)
    code, out, err = gpumem_command("demo", "--json")
    assert code == 1
    assert one_object(out)["views"][0]["zero_copy"] is False
    assert err == "gpumem: NumPy: RuntimeError: not that one\n"


def test_demo_fails_when_an_allocation_fails(gpumem_command, monkeypatch):
    def limited(trace, device, **options):
        return original(trace, device, max_mem=trace.peak_requested * 9 // 10)

    original = replaying.replay
    monkeypatch.setattr(replaying, "replay", limited)
    code, _, err = gpumem_command("demo")
    assert code == 1
    assert re.search(r"gpumem: \d+ failed allocations; calls of the host device: \d+ failed", err)


@pytest.mark.parametrize(
    ("free_bytes", "trace", "device"),
    [
        (80 << 30, "gpt2_varlen_train", "cuda:0"),
        (16 << 30, "multistream_train", "cuda:0"),
        (4 << 30, "multistream_train", "host:0"),
    ],
)
def test_demo_chooses_a_trace_that_fits_the_gpu(free_bytes, trace, device):
    class Gpu(gpumem.Device):
        free_bytes = property(lambda self: self.room)

    gpu = Gpu("cuda:0")
    Gpu.room = free_bytes
    chosen, where = demo_module._trace_that_fits(gpu)
    assert (chosen.name, str(where)) == (trace, device)


def test_demo_shares_memory_with_pytorch_without_a_copy():
    pytest.importorskip("torch")
    device = demo_module._torch_device(gpumem.default_device())
    view = demo_module._view("PyTorch", gpumem.MemoryInfo(device), demo_module._check_torch)
    assert view.zero_copy, view.detail


# ---------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("123", 123),
        ("7B", 7),
        ("1kB", 1000),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        (" 1.5 GiB ", 3 << 29),
        ("0.001kB", 1),
        ("3tib", 3 << 40),
        ("4TB", 4 * 10**12),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_size_is_plain_bytes_or_has_a_unit(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "-1", "+1", "1e9", "1.5", "0.3B", "G", "1P", "1 2", "1GiBs", "0x10", "٣", "nan", "2**10"],
)
def test_invalid_size_is_refused(text):
    with pytest.raises(ConfigError, match="expected whole bytes from 0 to"):
        parse_size(text)


@pytest.mark.parametrize("text", [str(2**63), "8388608TiB", "1_000", ".5kB", "1.kB", "9" * 40])
def test_size_beyond_63_bits_is_refused(text):
    with pytest.raises(ConfigError, match="expected whole bytes from 0 to"):
        parse_size(text)


@given(st.integers(0, 2**63 - 1), st.sampled_from(["", "B", "kb", "KiB", "MB", "MiB", "TiB"]))
def test_size_with_a_unit_is_its_number_times_the_unit(number, unit):
    factor = parse_size(f"1{unit}")
    if number * factor < 2**63:
        assert parse_size(f"{number}{unit}") == number * factor
    else:
        with pytest.raises(ConfigError):
            parse_size(f"{number}{unit}")


@pytest.mark.parametrize(
    ("text", "has_unit"),
    [("4MiB", True), ("1 kB", True), ("4", False), ("tight", False), ("1.5x", False), ("", False)],
)
def test_setting_is_read_as_a_size_only_with_a_unit(text, has_unit):
    assert is_size_with_unit(text) is has_unit


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (12024970848, "11.2 GiB"),
        (2**63 - 1, "8.0 EiB"),
        (2**80, "1048576.0 EiB"),
    ],
)
def test_sizes_are_shown_in_powers_of_1024(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1023, "1023 B"),
        (50 << 20, "50.0 MiB"),
        ((50 << 20) + 1, "50.0 MiB (52428801 bytes)"),
        (10**9, "953.7 MiB (1000000000 bytes)"),
        (2**63, "8.0 EiB (9223372036854775808 bytes)"),
        (10**400, f"{10**400} bytes"),
    ],
)
def test_exact_sizes_have_the_bytes_that_the_short_form_rounds(nbytes, text):
    assert exact_size(nbytes) == text


def test_counted_things_are_in_the_plural_but_for_one():
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
