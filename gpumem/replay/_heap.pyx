"""Best fit with coalescing over segments of numbers, for the models of other allocators.

The chunk table of an arena has bins, stream slots and holes. This heap has the exact order of best
fit that the models need: the smallest free block that fits, the lowest address of those alike.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

# A range of one segment, in use or free; `before` and `after` are its neighbours there, -1: none.
cdef struct Piece:
    int64_t address
    int64_t size
    int32_t before
    int32_t after
    bint is_free            # also of a number that is unused


cdef class BestFitHeap:
    """Numbered blocks in segments without end.

    Parameters
    ----------
    min_remainder : int
        A block is split if at least this many bytes remain.
    releases : bool, optional
        Whether an empty segment is released.
    """

    cdef readonly int64_t reserved      # bytes of all segments held
    cdef int64_t min_remainder
    cdef bint releases
    cdef int64_t next_address
    cdef Piece* pieces
    cdef int32_t* unused                # numbers of pieces, a stack
    cdef int32_t* ordered               # free pieces by size, then address
    cdef int32_t room, unused_count, ordered_count

    def __init__(self, int64_t min_remainder, bint releases=False):
        self.min_remainder = min_remainder
        self.releases = releases

    def __dealloc__(self):
        free(self.pieces)
        free(self.unused)
        free(self.ordered)

    def allocate(self, int64_t size):
        """Return the number of the smallest free block of at least `size` bytes; -1 without one."""
        cdef int32_t place = self.place_of(size, -1)
        if place == self.ordered_count:
            return -1
        cdef int32_t number = self.ordered[place]
        self.take(place)
        self.split(number, size)
        return number

    def grow(self, int64_t size, int64_t segment):
        """Reserve a segment, and return the number of its first `size` bytes."""
        cdef int32_t number = self.new_piece(self.next_address, segment, -1, -1)
        self.next_address += segment
        self.reserved += segment
        self.split(number, size)
        return number

    def free(self, int32_t number):
        """Free a block of a number that was returned, and join it with its free neighbours."""
        if not 0 <= number < self.room or self.pieces[number].is_free:
            raise ValueError(f"block is {number}, expected the number of one that is in use")
        cdef int32_t other = self.pieces[number].before
        if other >= 0 and self.pieces[other].is_free:
            self.take(self.place_of(self.pieces[other].size, self.pieces[other].address))
            self.join(other, number)
            number = other
        other = self.pieces[number].after
        if other >= 0 and self.pieces[other].is_free:
            self.take(self.place_of(self.pieces[other].size, self.pieces[other].address))
            self.join(number, other)
        if self.releases and self.pieces[number].before < 0 and self.pieces[number].after < 0:
            self.reserved -= self.pieces[number].size
            self.drop(number)
        else:
            self.add(number)

    cdef int split(self, int32_t number, int64_t size) except -1:
        cdef int64_t left = self.pieces[number].size - size
        if left < self.min_remainder:
            return 0
        cdef int32_t after = self.pieces[number].after
        cdef int32_t tail = self.new_piece(self.pieces[number].address + size, left, number, after)
        if after >= 0:
            self.pieces[after].before = tail
        self.pieces[number].after = tail
        self.pieces[number].size = size
        self.add(tail)
        return 0

    cdef void join(self, int32_t number, int32_t after) noexcept:
        cdef int32_t beyond = self.pieces[after].after
        self.pieces[number].size += self.pieces[after].size
        self.pieces[number].after = beyond
        if beyond >= 0:
            self.pieces[beyond].before = number
        self.drop(after)

    cdef void add(self, int32_t number) noexcept:
        cdef int32_t place = self.place_of(self.pieces[number].size, self.pieces[number].address)
        memmove(&self.ordered[place + 1], &self.ordered[place],
                <size_t>(self.ordered_count - place) * sizeof(int32_t))
        self.ordered[place] = number
        self.ordered_count += 1
        self.pieces[number].is_free = True

    cdef void take(self, int32_t place) noexcept:
        self.pieces[self.ordered[place]].is_free = False
        self.ordered_count -= 1
        memmove(&self.ordered[place], &self.ordered[place + 1],
                <size_t>(self.ordered_count - place) * sizeof(int32_t))

    cdef int32_t place_of(self, int64_t size, int64_t address) noexcept:
        # Returns the place of the first free piece that is not smaller.
        cdef int32_t low = 0, high = self.ordered_count, middle
        cdef Piece* piece
        while low < high:
            middle = (low + high) // 2
            piece = &self.pieces[self.ordered[middle]]
            if piece.size < size or (piece.size == size and piece.address < address):
                low = middle + 1
            else:
                high = middle
        return low

    cdef int32_t new_piece(self, int64_t address, int64_t size, int32_t before,
                           int32_t after) except -1:
        if self.unused_count == 0:
            self.make_room()
        self.unused_count -= 1
        cdef int32_t number = self.unused[self.unused_count]
        self.pieces[number] = Piece(address, size, before, after, False)
        return number

    cdef void drop(self, int32_t number) noexcept:
        self.pieces[number].is_free = True
        self.unused[self.unused_count] = number
        self.unused_count += 1

    cdef int make_room(self) except -1:
        cdef size_t room = 2 * <size_t>self.room + 64
        cdef void* pieces = realloc(self.pieces, room * sizeof(Piece))
        if pieces != NULL:
            self.pieces = <Piece*>pieces
        cdef void* unused = realloc(self.unused, room * sizeof(int32_t))
        if unused != NULL:
            self.unused = <int32_t*>unused
        cdef void* ordered = realloc(self.ordered, room * sizeof(int32_t))
        if ordered != NULL:
            self.ordered = <int32_t*>ordered
        if pieces == NULL or unused == NULL or ordered == NULL:
            raise MemoryError("out of host memory for the blocks of a model")
        while <size_t>self.room < room:
            self.drop(self.room)
            self.room += 1
        return 0
