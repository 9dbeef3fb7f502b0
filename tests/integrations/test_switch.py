"""enable, disable and using, as every integration has them, over a framework that is a variable."""

import os
import threading

import pytest
from helpers.threads import in_a_thread, in_threads, running

import gpumem
from gpumem._testing.integrations import Framework, PerDevice, Setting, Switch, Using
from gpumem.errors import IntegrationError
from gpumem.integrations import Status, torch

OWN = "its own memory"


class Variable(Framework):
    """A framework with the memory that `memory` names."""

    name = "Variable"

    def __init__(self):
        self.memory = OWN
        self.refusal = None
        self.stuck = None
        self.switches = 0

    def attach(self, setting):
        if self.refusal:
            raise IntegrationError(self.refusal)
        before, self.memory = self.memory, setting
        self.switches += 1
        return before

    def restore(self, before):
        self.memory = before
        self.switches += 1

    def why_not_restorable(self):
        return self.stuck


@pytest.fixture
def framework():
    return Variable()


@pytest.fixture
def switch(framework):
    return Switch(framework)


A = Setting("a")
B = Setting("b")
C = Setting("a", (("pinned", True),))


# ---- enable and disable ------------------------------------------------------------------------


def test_disable_restores_the_state_before_the_first_enable(switch, framework):
    switch.enable(A)
    assert framework.memory == A
    switch.enable(B)
    switch.enable(C)
    assert framework.memory == C
    switch.disable()
    assert framework.memory == OWN


def test_enable_of_the_enabled_choice_does_nothing(switch, framework):
    switch.enable(A)
    switch.enable(Setting("a"))
    assert framework.switches == 1


def test_disable_without_enable_does_nothing(switch, framework):
    switch.disable()
    switch.enable(A)
    switch.disable()
    switch.disable()
    assert framework.switches == 2


def test_failed_enable_changes_nothing(switch, framework):
    framework.refusal = "initialised already"
    with pytest.raises(IntegrationError, match="initialised already"):
        switch.enable(A)
    assert framework.memory == OWN
    assert switch.current() is None
    framework.refusal = None
    switch.enable(A)
    framework.refusal = "not now"
    with pytest.raises(IntegrationError, match="not now"):
        switch.enable(B)
    assert framework.memory == A
    assert switch.current() == A


def test_irreversible_switch_refuses_disable_and_enable_with_the_reason(switch, framework):
    switch.enable(A)
    framework.stuck = "its first tensor is made"
    for call in (switch.disable, lambda: switch.enable(B)):
        with pytest.raises(IntegrationError, match="its first tensor is made"):
            call()
        assert framework.memory == A
        assert switch.current() == A
    switch.enable(A)


# ---- using -------------------------------------------------------------------------------------


def test_using_nests_and_restores(switch, framework):
    switch.enable(A)
    with Using(switch, B):
        assert framework.memory == B
        with Using(switch, C):
            assert framework.memory == C
        assert framework.memory == B
    assert framework.memory == A
    switch.disable()
    assert framework.memory == OWN


def test_using_restores_after_an_exception(switch, framework):
    with pytest.raises(KeyError), Using(switch, A):
        raise KeyError
    assert framework.memory == OWN
    assert switch.current() is None


def test_using_the_active_choice_switches_nothing(switch, framework):
    with Using(switch, A), Using(switch, Setting("a")):
        assert framework.switches == 1
    assert framework.memory == OWN


def test_failed_using_leaves_nothing_open(switch, framework):
    framework.refusal = "not now"
    with pytest.raises(IntegrationError, match="not now"), Using(switch, A):
        raise AssertionError("the block must not begin")
    framework.refusal = None
    switch.enable(A)
    switch.disable()


def test_only_the_innermost_using_can_be_left(switch, framework):
    outer, inner = Using(switch, A), Using(switch, B)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(IntegrationError, match="entered after it"):
        outer.leave()
    assert framework.memory == B
    inner.leave()
    assert framework.memory == A
    outer.leave()
    assert framework.memory == OWN


def test_using_is_entered_and_left_once(switch, framework):
    use = Using(switch, A)
    with pytest.raises(IntegrationError, match="not entered"):
        use.leave()
    with use:
        pass
    with pytest.raises(IntegrationError, match="not open"):
        use.leave()
    with pytest.raises(IntegrationError, match="entered once"):
        use.__enter__()
    assert framework.switches == 2


def test_using_cannot_be_left_by_another_thread(switch, framework):
    with Using(switch, A) as use:
        with pytest.raises(IntegrationError, match="which alone can leave it"):
            in_a_thread(use.leave)
        assert framework.memory == A
    assert framework.memory == OWN


def test_using_of_an_ended_thread_can_be_left(switch, framework):
    use = Using(switch, A)
    in_a_thread(use.__enter__)
    use.leave()
    assert framework.memory == OWN


@pytest.mark.parametrize("call", ["enable", "disable"])
def test_enable_and_disable_inside_a_using_are_refused(switch, framework, call):
    switch.enable(A)
    with Using(switch, B):
        with pytest.raises(IntegrationError, match="inside a `using`"):
            switch.enable(A) if call == "enable" else switch.disable()
        assert framework.memory == B
    assert framework.memory == A


def test_leaving_an_irreversible_using_raises_and_updates_the_status(switch, framework):
    use = Using(switch, A)
    with pytest.raises(IntegrationError, match=r"keeps gpumem's memory.*a tensor"), use:
        framework.stuck = "a tensor is made"
    assert framework.memory == A
    assert switch.current() == A
    switch.enable(A)  # it is what is enabled
    with pytest.raises(IntegrationError, match="not open"):
        use.leave()
    framework.stuck = None
    switch.disable()
    assert framework.memory == OWN


def test_exception_in_the_block_is_not_hidden_by_a_failed_leave(switch, framework):
    def body():
        with Using(switch, A):
            framework.stuck = "a tensor is made"
            raise KeyError

    with pytest.raises(KeyError) as caught:
        body()
    assert any("a tensor is made" in note for note in caught.value.__notes__)


def test_irreversible_switch_allows_using_the_enabled_choice(switch, framework):
    switch.enable(A)
    framework.stuck = "a tensor is made"
    with Using(switch, A):
        pass
    with pytest.raises(IntegrationError, match="a tensor is made"), Using(switch, B):
        raise AssertionError("the block must not begin")
    assert switch.current() == A


def test_concurrent_enable_and_disable_restore_the_initial_state(switch, framework):
    def body():
        for _ in range(200):
            switch.enable(A)
            switch.enable(B)
            switch.disable()

    in_threads(body, 4)
    switch.disable()
    assert framework.memory == OWN
    assert switch.current() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside other threads
def test_forked_child_finds_the_lock_free_and_can_disable(switch, framework):
    held, done = threading.Event(), threading.Event()

    def hold():
        with switch._lock:
            held.set()
            done.wait()

    switch.enable(A)
    with running(hold):
        held.wait()
        child = os.fork()
        if child == 0:
            try:
                switch.disable()
                os._exit(0 if framework.memory == OWN else 1)
            except BaseException:
                os._exit(2)
        done.set()
    assert os.waitpid(child, 0)[1] == 0
    assert framework.memory == A


def test_switch_errors_derive_from_builtin_errors():
    assert issubclass(IntegrationError, gpumem.GpumemError)
    assert issubclass(IntegrationError, RuntimeError)
    assert issubclass(gpumem.errors.MissingFrameworkError, IntegrationError)
    assert issubclass(gpumem.errors.MissingFrameworkError, ImportError)


# ---- frameworks with a source for each device ----------------------------------------------------


class Devices(PerDevice):
    name = "Devices"

    def __init__(self):
        self.sources = {0: "own 0", 1: "own 1"}
        self.broken = None

    def get(self, index):
        return self.sources[index]

    def put(self, index, source):
        if index == self.broken and "own" not in str(source):
            raise IntegrationError("broken")
        self.sources[index] = source

    def over(self, resources, index):
        return resources.given[index]


class Given:
    """Stands for Resources: what was given, by device."""

    def __init__(self, **given):
        self.given = {int(name[1:]): source for name, source in given.items()}

    def __eq__(self, other):
        return self.given == other.given


def test_only_named_devices_are_switched():
    framework = Devices()
    switch = Switch(framework)
    switch.enable(Setting(Given(d0="a")))
    assert framework.sources == {0: "a", 1: "own 1"}
    with Using(switch, Setting(Given(d1="b"))):
        assert framework.sources == {0: "a", 1: "b"}
    assert framework.sources == {0: "a", 1: "own 1"}
    switch.enable(Setting(Given(d1="c")))
    assert framework.sources == {0: "own 0", 1: "c"}
    switch.enable(Setting(Given(d0="d", d1="d")))
    switch.disable()
    assert framework.sources == {0: "own 0", 1: "own 1"}


def test_switching_several_devices_is_all_or_nothing():
    framework = Devices()
    switch = Switch(framework)
    switch.enable(Setting(Given(d0="a")))
    framework.broken = 1
    with pytest.raises(IntegrationError, match="broken"):
        switch.enable(Setting(Given(d0="b", d1="b")))
    assert framework.sources == {0: "a", 1: "own 1"}
    switch.disable()
    assert framework.sources == {0: "own 0", 1: "own 1"}


def test_torch_has_its_status_under_one_name():
    assert isinstance(torch.status(), Status)
    assert type(torch.status()) is torch.TorchStatus
    assert not hasattr(torch, "Status")
