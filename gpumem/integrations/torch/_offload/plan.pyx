"""Which saved storages a step moves to the host, by its own estimate or by the step before it.

A step is a forward pass and its backward pass. Its points are the moments at which autograd saves a
storage, or needs it the first time. Bytes are those of the allocator, as they would be if nothing
were moved.
"""

from itertools import pairwise

from libc.limits cimport INT_MAX
from libc.math cimport fabs, INFINITY
from libc.stdint cimport int64_t

import numpy as np

cpdef enum:
    AHEAD = 1       # points before its use at which a storage is on the GPU again at the latest
    MARGIN = 128    # the part of the limit that is left, beside the known fragmentation
    MAX_WASTE = 8   # the part of it that the memory between blocks is taken for at most
    MAX_LACK = 16   # the same after refusals of requests that nothing else could make room for
    MAX_MORE = 4    # the same after other refusals
    CALM = 4        # steps without a refusal after which a quarter of it is forgotten, at first
    MAX_CALM = 256  # the same where refusals follow
    GUESS = 4       # largest storages that an unknown step needs for a while, such as for gradients
    GRAINS = 512    # parts of the limit by which steps differ at least
    LIKENESS = 8    # a storage is the recorded one if its size differs by less than this part


cdef class Item:
    """A storage that a step saves.

    Attributes
    ----------
    key : str
        The module that saved it.
    nbytes : int
        Bytes of the storage.
    begin : int
        Point at which it was saved.
    end : int or None
        Point at which it was needed; None: not yet, or never.
    frees : bool
        Whether the program had released it when it was needed, so that moving it frees memory.
    """

    cdef readonly str key
    cdef readonly int64_t nbytes, begin
    cdef public object end
    cdef public bint frees

    def __cinit__(self, str key not None, int64_t nbytes, int64_t begin, end=None, bint frees=True):
        self.key, self.nbytes, self.begin = key, nbytes, begin
        self.end, self.frees = end, frees


cdef class TrainingStep:
    """The storages of a step in the order in which they were saved, and the bytes at its points.

    Attributes
    ----------
    items : list of Item
        The storages.
    lives : list of int
        Bytes at each point.
    bounds : list of float
        Bytes above those of both its ends that the time before each point needs at most.
    highest : int
        Bytes that were really allocated at the highest point.
    waste : int
        Bytes between the blocks at that point, which no large block can have.
    slack : int
        The most bytes that were seen to be needed between two points, above those at both.
    largest : int
        Bytes of the largest storage.
    tops : list of float
        Bytes that the time before each point needs. Known at the step's end.
    """

    cdef readonly list items, lives, bounds, tops
    cdef readonly int64_t highest, waste, slack, largest

    def __cinit__(self):
        self.items, self.lives, self.bounds, self.tops = [], [], [], []

    cdef void end(self):
        # Slack is only seen where it makes a new peak; elsewhere there may be more of it. None is
        # seen below a peak of the time before, such as of a step without offload.
        cdef int64_t slack = self.slack or self.largest
        self.tops = [
            max(pair) + min(bound, 2.0 * slack)
            for pair, bound in zip(pairwise([0, *self.lives]), self.bounds, strict=True)
        ]


def choose(list items not None, list tops not None, double limit, double scale=1):
    """Return the numbers of few items without which no time has more bytes than the limit.

    Of those that live at least half as long as the longest, the largest are chosen first: few
    copies, and places that any later block fits into. Then those that live longest, because their
    copies have the most time. `scale` is the size of the next step by that of the recorded one.
    """
    base = tops[0] if tops else 0
    above = base + (np.array(tops, float) - base) * scale - limit
    high = np.flatnonzero(above > 0)
    excess = above[high]
    begins = [each.begin + 1 for each in items]
    ends = [len(tops) if each.end is None else each.end - AHEAD + 1 for each in items]
    bounds = zip(np.searchsorted(high, begins), np.searchsorted(high, ends), strict=True)
    spans = {
        i: slice(*span) for i, span in enumerate(bounds) if items[i].frees and span[0] < span[1]
    }
    lengths = {i: ends[i] - begins[i] for i in spans}
    half = max(lengths.values(), default=0) / 2
    ranked = sorted(spans, key=lambda i: (-lengths[i], i))
    long = [i for i in ranked if lengths[i] >= half]
    chosen = []
    for i in sorted(long, key=lambda i: -items[i].nbytes) + ranked[len(long) :]:
        if excess[spans[i]].max() > 0:
            chosen.append(i)
            excess[spans[i]] -= items[i].nbytes * scale
    for i in reversed(chosen):
        nbytes = items[i].nbytes * scale
        if excess[spans[i]].max() + nbytes <= 0:
            chosen.remove(i)
            excess[spans[i]] += nbytes
    return set(chosen)


cdef class Planner:
    """Decides for each saved storage whether it moves; it sees steps go by and learns from them.

    Attributes
    ----------
    limit : int
        Bytes that the allocator may hold.
    coming : int
        Bytes of gradients that the backward pass of a first step will allocate.
    out : int
        Bytes that are on the host now and not on the GPU.
    out_before : int
        Those as the time since the last point began.
    leaving : int
        Bytes that are copied to the host, and can be freed on the GPU at any time.
    step : TrainingStep
        The step under way.
    plan : TrainingStep or None
        The recorded step that it follows. None: there is none, or it differs; then a running
        estimate decides.
    """

    cdef public int64_t limit, coming, out, out_before, leaving
    cdef readonly TrainingStep step, plan
    cdef readonly dict _steps       # the last one by the key of its first item
    cdef public int64_t _peak       # at the last point; -1: there was none
    cdef bint sees_peaks, is_backward
    cdef int64_t wanted             # bytes with a request that was refused since the last point
    cdef int64_t live               # at the last point
    # Bytes that no request could have: where nothing else could make room; beside storages that
    # are back early; beside blocks that leave.
    cdef int64_t[3] waste
    # Steps since the last refusal or fall of the known fragmentation; those before the next fall;
    # whether it has fallen since the last refusal.
    cdef int calm, rest
    cdef bint has_fallen
    cdef double scale
    cdef set chosen
    cdef tuple solved

    def __cinit__(self, int64_t limit, *, bint sees_peaks=False):
        self.limit = limit
        self.sees_peaks = sees_peaks
        self.step = TrainingStep()
        self._steps = {}
        self._peak = -1
        self.chosen, self.solved = set(), ()
        self.scale, self.rest = 1, CALM

    def save(self, str key not None, int64_t nbytes, int64_t live, int64_t peak, int64_t waste=0):
        """Note that a storage is saved; return whether it moves.

        `live` bytes are allocated, at most `peak` were, and `waste` lie between blocks.
        """
        cdef TrainingStep step
        cdef Item item
        cdef Py_ssize_t number
        cdef int64_t start
        if self.is_backward:
            self.end_step()
        self.add_point(live, peak, waste)
        step = self.step
        number = len(step.items)
        step.largest = max(step.largest, nbytes)
        item = Item(key, nbytes, len(step.lives) - 1)
        step.items.append(item)
        if number == 0:
            self.follow(item, live)
        elif self.plan is not None and not self.is_like(number, item):
            self.plan = None
        if self.plan is not None:
            item.frees = (<Item>self.plan.items[number]).frees
            return number in self.chosen or live - self.leaving > self.limit
        # Without a record, half of what is left is for the rest of the step.
        start = step.lives[0]
        return live - self.leaving > start + (self.usable() - start - self.coming) / 2.0

    def need(self, TrainingStep step not None, Py_ssize_t number, int64_t live, int64_t peak,
             int64_t waste=0, *, bint frees):
        """Note that the backward pass of a step needs a storage."""
        cdef Item item = step.items[number]
        if step is not self.step or item.end is not None:
            return
        self.is_backward = True
        self.add_point(live, peak, waste)
        item.end, item.frees = len(step.lives) - 1, item.frees and frees

    def has_room(self, Py_ssize_t number, int64_t live):
        """Whether a storage can be brought back now, where `live` bytes are allocated.

        Those that are needed before it are back then.
        """
        cdef Py_ssize_t here = len(self.step.lives)
        cdef Py_ssize_t end = here
        if self.plan is not None:
            end = self.end_of(number)
            if end - here < AHEAD:
                return True     # the plan has room for it
        return (<Item>self.step.items[number]).nbytes <= self.room_until(live, end)

    def room(self, int64_t live):
        """Return the bytes that nothing needs up to the next point; `live` bytes are allocated."""
        return self.room_until(live, 0)

    cdef double room_until(self, int64_t live, Py_ssize_t end):
        # `end` is a point, or 0: the next one.
        cdef TrainingStep plan = self.plan
        cdef Py_ssize_t here = len(self.step.lives) - 1
        cdef Py_ssize_t i
        cdef double rise = 0
        cdef double known
        if plan is None or here < 0:
            known = max(self.step.slack, GUESS * self.step.largest) if end else self.waste[2]
            return self.usable() - known - live
        for i in range(here + 1, min(max(end, here + 1) + 1, len(plan.tops))):
            rise = max(rise, <double>plan.tops[i] - <double>plan.lives[here])
        return (self.limit - self.left(end == 0)) - live - rise * self.scale

    def order(self):
        """Return the numbers of the items of this step, as its backward pass will need them."""
        numbers = range(len(self.step.items))
        return numbers[::-1] if self.plan is None else sorted(numbers, key=self.end_of)

    cdef Py_ssize_t end_of(self, Py_ssize_t number):
        # The point at which the recorded step needed a storage.
        cdef Item item = self.plan.items[number]
        return INT_MAX if item.end is None else item.end

    def drop_step(self):
        """Forget the step under way, whose forward pass no backward pass will follow."""
        if not self.is_backward:
            self.begin_step()

    cdef TrainingStep begin_step(self):
        # Returns the step before it.
        cdef TrainingStep step = self.step
        self.step = TrainingStep()
        self.step.slack = step.slack
        return step

    def end_step(self):
        """Keep the step under way as the plan of a next one like it."""
        cdef TrainingStep step = self.begin_step()
        cdef int64_t between
        cdef int i
        self.is_backward = False
        step.end()
        self.calm += 1
        if self.calm > self.rest:
            # After a fall that no refusal followed, the next one is soon.
            self.rest = CALM if self.has_fallen else self.rest
            self.calm = 1
            self.has_fallen = max(self.waste[0], self.waste[1]) > self.limit // MARGIN
            for i in range(3):
                self.waste[i] -= self.waste[i] // 4
        between = min(step.waste, self.limit // MAX_WASTE)
        for i in range(2):
            self.waste[i] = max(between, self.waste[i])
        if step.items:
            self._steps[(<Item>step.items[0]).key] = step

    def refuse(self, int64_t nbytes, int64_t live, *, bint early=False, bint leaving=False):
        """Note that a request was refused, though the limit has room for it beside `live` bytes.

        `early`: storages were back that nothing had needed yet. `leaving`: blocks that leave made
        room.
        """
        cdef int kind = 2 if leaving else early
        cdef int64_t most = self.limit // (MAX_MORE if kind else MAX_LACK)
        self.waste[kind] = max(self.waste[kind], min(self.limit - live - nbytes, most))
        if leaving:         # the request is met, and costs no other step anything
            return
        self.wanted = max(self.wanted, live + nbytes + self.out)
        if self.has_fallen:
            self.rest = min(2 * self.rest, MAX_CALM)
        self.calm, self.has_fallen = 0, False

    cdef void add_point(self, int64_t live, int64_t peak, int64_t waste):
        cdef TrainingStep step = self.step
        cdef double bound = INFINITY    # the program has begun a new peak
        cdef int64_t all = live + self.out
        cdef int64_t before
        if live >= step.highest:
            step.waste = waste
        if self._peak >= 0 and (self.sees_peaks or peak > self._peak):
            before = step.lives[len(step.lives) - 1] if step.lives else all
            # A storage that moves counts as out before the program has released it.
            bound = max(peak + min(self.out, self.out_before), self.wanted) - max(before, all)
            bound = max(bound, 0.0)
            step.slack = max(step.slack, <int64_t>bound)
            step.highest = max(step.highest, peak)
        elif peak == self._peak:
            bound = peak - max(live, self.live)
        self._peak, self.live, self.out_before, self.wanted = peak, live, self.out, 0
        step.bounds.append(bound if step.lives else 0.0)
        step.lives.append(all)
        step.highest = max(step.highest, live)

    @property
    def margin(self):
        """Bytes of the limit that are left to fragmentation, and to copies under way."""
        return self.left()

    cdef int64_t left(self, bint leaving=False):
        cdef int64_t share = self.limit // MARGIN
        cdef int64_t known = max(self.waste[0], self.waste[1] if self.is_backward else 0)
        return share + max(known, share, self.waste[2] if leaving else 0)

    cdef int64_t usable(self):
        # The bytes that the points of a step without a plan may have.
        return self.limit - max(self.step.slack, self.left(), GUESS * self.step.largest)

    cdef void follow(self, Item first, int64_t live):
        # Follow the recorded step that begins as this one does.
        cdef TrainingStep plan = self._steps.get(first.key)
        cdef double limit, grain
        self.plan = plan
        if plan is None:
            return
        self.scale = <double>first.nbytes / (<Item>plan.items[0]).nbytes
        self.step.slack = round(plan.slack * self.scale)
        limit = (self.limit - self.left()) - (live + self.out - plan.lives[0])
        # Small differences between steps do not cost a new choice.
        grain = self.limit // GRAINS + 1
        rounded = [round(each / grain) for each in (limit, *plan.tops)]
        question = (rounded, [(<Item>each).end for each in plan.items], round(self.scale, 3))
        if question != self.solved:
            self.solved = question
            self.chosen = choose(plan.items, plan.tops, limit, self.scale)

    cdef bint is_like(self, Py_ssize_t number, Item item):
        cdef Item recorded
        if number >= len(self.plan.items):
            return False
        recorded = self.plan.items[number]
        return recorded.key == item.key and (
            fabs(item.nbytes - recorded.nbytes * self.scale) * LIKENESS <= item.nbytes
        )
