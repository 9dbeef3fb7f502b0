"""Stacks of recorded allocations: what is recorded, of which code, on which thread."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref

import pytest
from helpers import child
from helpers.threads import in_a_thread, run_threads

from gpumem import observe

RING = 1 << 12


def frames_here():
    """Return (file, line, name) of the caller and its callers, as Python itself tells them."""
    walked = traceback.walk_stack(sys._getframe(1))
    return [(frame.f_code.co_filename, line, frame.f_code.co_qualname) for frame, line in walked]


def allocations(events):
    return [e for e in events if e.action == "alloc"]


def numbers(recording):
    """Return the number of each allocation's stack."""
    records = recording.events().records
    return records["stack"][records["kind"] == 1].tolist()


def function_of(path, body, **names):
    """Return a new function f of a file of its own."""
    exec(compile(f"def f(*given):\n    {body}\n", path, "exec"), names)
    return names.pop("f")  # no cycle: it dies with its last reference


def tower(height, innermost, name="floor"):
    """Return a function that calls innermost() through so many functions of different code."""
    for level in range(height):
        innermost = function_of(f"/{name}/{level}.py", f"return call({level})", call=innermost)
    return innermost


class Walker:
    """Calls of each kind around an allocation; returns what Python tells of the stack."""

    def __init__(self, arena):
        self.arena = arena

    def plain(self):
        block, told = self.arena.allocate(1), frames_here()
        block.close()
        return told

    def over_lines(self):
        # fmt: off
        block, told = (
            self.arena.allocate(
                1,
            ), frames_here()
        )
        # fmt: on
        block.close()
        return told

    def of_lambda(self):
        return (lambda: self.plain())()

    def of_generator(self):
        return next(self.plain() for _ in range(1))

    def of_sort(self):
        told = []
        sorted([1], key=lambda _: told.extend(self.plain()))
        return told

    def of_coroutine(self):
        async def wait():
            return self.plain()

        with pytest.raises(StopIteration) as ended:
            wait().send(None)
        return ended.value.value

    def recursive(self, depth=5):
        return self.recursive(depth - 1) if depth else self.plain()

    def of_class_body(self):
        class Body:
            told = self.plain()

        return Body.told


@pytest.mark.parametrize(
    "call",
    ["plain", "of_lambda", "of_generator", "of_sort", "of_coroutine", "recursive", "of_class_body"],
)
def test_recorded_stack_is_the_one_that_python_tells(make_arena, call):
    walker = Walker(make_arena())
    with observe.record(walker.arena, stacks=True) as recording:
        told = [getattr(walker, call)() for _ in range(2)]  # seen for the first time, and again
    found = [list(map(tuple, e.stack)) for e in allocations(recording.events())]
    assert found == [each[:64] for each in told]
    assert len(set(numbers(recording))) == 1


def test_call_over_lines_has_its_own_line(make_arena):
    walker = Walker(make_arena())
    with observe.record(walker.arena, stacks=True) as recording:
        walker.over_lines()
    (event,) = allocations(recording.events())
    first = Walker.over_lines.__code__.co_firstlineno
    assert event.stack[0].line == first + 3


def test_calls_of_one_line_share_a_stack_and_those_of_others_do_not(arena):
    call = function_of("/one.py", "a(1); a(1); a(1)\n    a(1)", a=arena.allocate)
    with observe.record(arena, stacks=True) as recording:
        call()
    first, second, third, other = numbers(recording)
    assert first == second == third != other


def test_stack_has_its_64_innermost_frames(arena):
    call = tower(100, lambda _: arena.allocate(1))
    with observe.record(arena, stacks=True) as recording:
        call()
        call()
    for event in allocations(recording.events()):
        assert [f.filename for f in event.stack[1:]] == [f"/floor/{n}.py" for n in range(63)]


def test_equal_code_of_two_files_has_two_stacks(arena):
    calls = [function_of(path, "a(1)", a=arena.allocate) for path in ("/one.py", "/two.py")]
    assert calls[0].__code__ == calls[1].__code__
    with observe.record(arena, stacks=True) as recording:
        for call in (*calls, *calls):
            call()
    files = [e.stack[0].filename for e in allocations(recording.events())]
    assert files == ["/one.py", "/two.py"] * 2


def test_equal_code_made_anew_has_one_stack(arena):
    with observe.record(arena, stacks=True) as recording:
        for _ in range(20):
            function_of("/one.py", "a(1)", a=arena.allocate)()
    assert len(set(numbers(recording))) == 1


def test_code_at_the_address_of_dead_code_has_its_own_stack(arena):
    addresses = set()
    with observe.record(arena, capacity=RING, stacks=True) as recording:
        for number in range(200):
            call = function_of(f"/{number}.py", "a(1)", a=arena.allocate)
            addresses.add(id(call.__code__))
            call()
            del call
    assert len(addresses) < 200, "no address was used twice"
    files = [e.stack[0].filename for e in allocations(recording.events())]
    assert files == [f"/{number}.py" for number in range(200)]


def test_recorded_code_dies_as_any_other(arena):
    call = function_of("/one.py", "a(1)", a=arena.allocate)
    code = weakref.ref(call.__code__)
    with observe.record(arena, stacks=True):
        call()
        del call
        assert code() is None


def test_more_stacks_than_are_remembered_are_recorded_all_the_same(arena):
    often = 70_000
    code = compile("a(1)", "/often.py", "exec")
    names = {"a": arena.allocate}

    def work():
        for _ in range(often):
            exec(code.replace(), names)  # other code, and so another stack, with the same text

    with observe.record(arena, capacity=1 << 18, stacks=True) as recording:
        in_a_thread(work)  # where stacks are short
    found = numbers(recording)
    assert found == found[:1] * often
    assert recording.events().stacks[found[0]][0] == ("/often.py", 1, "<module>")


def test_each_recording_has_the_text_of_a_stack_that_was_seen_before(make_arena, tmp_path):
    arenas = make_arena(), make_arena()

    def allocate(arena):
        arena.allocate(1)

    def files():
        return [[e.stack[0].name for e in allocations(observe.read(path))] for path in paths]

    paths = [tmp_path / "one", tmp_path / "two"]
    with observe.record(arenas[0], paths[0], stacks=True):
        allocate(arenas[0])
        with observe.record(arenas[1], paths[1], stacks=True):
            for arena in (*arenas, *arenas):
                allocate(arena)
        allocate(arenas[0])
    name = allocate.__qualname__
    assert files() == [[name] * 4, [name] * 2]
    with observe.record(arenas[1], paths[1], stacks=True):
        allocate(arenas[1])
    assert files() == [[name] * 4, [name]]


def test_threads_record_their_own_stacks(arena):
    often, count = 300, 6
    start = threading.Barrier(count)

    def work(number):
        # Code that others run too, and code of its own that dies and is made anew.
        start.wait()
        for turn in range(often):
            name = f"thread{number}-{turn // 10}"
            tower(number + 2, lambda _: shared(number), name)()

    def shared(number):
        arena.allocate(1000 + number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    with observe.record(arena, capacity=1 << 14, stacks=True) as recording:
        run_threads(threads)
    found = {}
    for event in allocations(recording.events()):
        number = event.nbytes - 1000
        turn = found[number] = found.get(number, 0) + 1
        name = f"thread{number}-{(turn - 1) // 10}"
        files = [frame.filename for frame in event.stack]
        assert files[2 : number + 5] == [*(f"/{name}/{n}.py" for n in range(number + 2)), __file__]
    assert found == dict.fromkeys(range(count), often)


def test_forked_child_records_stacks_and_leaves_its_parents_file_alone(tmp_path):
    script = """
        import os, sys
        import gpumem
        from gpumem import observe
        from pathlib import Path

        path = Path(sys.argv[1])
        arena = gpumem.Arena("host")

        def allocate(arena):
            arena.allocate(7).close()

        def functions(recording):
            return [e.stack[0].name for e in recording.events() if e.action == "alloc"]

        with observe.record(arena, path, stacks=True) as recording:
            allocate(arena)
            before = path.read_bytes()
            pid = os.fork()
            if pid == 0:
                fresh = gpumem.Arena("host")
                with observe.record(fresh, stacks=True) as own, observe.tag("only the child's"):
                    allocate(fresh)
                    fresh.allocate(8).close()
                assert functions(own) == ["allocate", "<module>"], functions(own)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert path.read_bytes() == before
            allocate(arena)
        assert functions(recording) == ["allocate"] * 2
    """
    child.run_quietly(script, str(tmp_path / "events"))
