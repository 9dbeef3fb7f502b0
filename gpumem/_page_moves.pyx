"""The driver's side of a plan; see _pages.pxd."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._bfc cimport LANE_RELEASED, NIL
from gpumem._bfc_holes cimport holes_fill, holes_trim, holes_unclaim
from gpumem._driver cimport CUDA_SUCCESS, CUresult, Place, place_enter, place_leave
from gpumem._page_driver cimport page_create, page_map, page_release, page_unmap
from gpumem._page_space cimport view_set, fill_granules, hole_at
from gpumem._pages cimport (
    Action,
    ACTION_CREATE,
    ACTION_MOVE,
    ACTION_RELEASE,
    address_of,
    Demand,
    GRANULE_BITS,
    granule_of,
    is_backed,
    Page,
    Plan,
    Space,
)


cdef CUresult space_execute(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    # Without the arena lock. First what can run out: on failure nothing else has been done, and
    # space_undo takes the plan back. Then unmaps, then maps; a page that the driver refuses to
    # map goes back to the driver when the plan is undone.
    cdef CUresult code = place_enter(place)
    if code != CUDA_SUCCESS:
        return code
    code = create_memory(space, plan, place, calls)
    if code == CUDA_SUCCESS:
        unmap_views(space, plan, place, calls)
        code = map_views(space, plan, place, calls)
        release_memory(space, plan, place, calls)
    place_leave(place)
    return code


cdef CUresult create_memory(Space* space, Plan* plan, Place* place,
                            uint64_t* calls) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    cdef Page* page
    for i in range(plan.count):
        if plan.actions[i].kind != ACTION_CREATE:
            continue
        page = &space.page[plan.actions[i].page]
        code = page_create(place, <uint64_t>page.granules << GRANULE_BITS, &page.memory)
        calls[0] += 1
        if code != CUDA_SUCCESS:
            break
        plan.actions[i].created = True
    if code != CUDA_SUCCESS:
        for i in range(plan.count):
            if plan.actions[i].created:
                page_release(place, space.page[plan.actions[i].page].memory)
                calls[0] += 1
    return code


cdef void unmap_views(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef uint32_t i, view
    cdef const Action* action
    for i in range(plan.count):
        action = &plan.actions[i]
        for view in range(2):
            if action.unmap[view] != NIL:
                page_unmap(place, address_of(space, action.unmap[view]),
                           <uint64_t>space.page[action.page].granules << GRANULE_BITS)
                calls[0] += 1


cdef CUresult map_views(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    cdef Action* action
    cdef Page* page
    for i in range(plan.count):
        action = &plan.actions[i]
        if action.kind != ACTION_CREATE and action.kind != ACTION_MOVE:
            continue
        page = &space.page[action.page]
        code = page_map(place, address_of(space, action.to),
                        <uint64_t>page.granules << GRANULE_BITS, page.memory)
        calls[0] += 2
        if code != CUDA_SUCCESS:
            mark_failed(plan)
            break
        action.done = True
        if action.kind == ACTION_CREATE:
            space.created += 1
        else:
            space.moved += 1
    return code


cdef void mark_failed(Plan* plan) noexcept nogil:
    # The driver refused a mapping after the unmaps: what is not done cannot be put back.
    cdef uint32_t i
    for i in range(plan.count):
        plan.actions[i].mapping_failed = True


cdef void release_memory(Space* space, Plan* plan, Place* place, uint64_t* calls) noexcept nogil:
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_RELEASE:
            page_release(place, space.page[plan.actions[i].page].memory)
            calls[0] += 1
            space.released += 1


cdef void space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil:
    # With the arena lock again: the claimed block shrinks to what was asked for, and the slots of
    # pages given back become free.
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_RELEASE:
            space.page[plan.actions[i].page].granules = 0
    if plan.chunk != NIL:
        holes_trim(space.table, plan.chunk, demand.size, epoch)


cdef void space_undo(Space* space, Plan* plan, const Demand* demand, uint64_t epoch,
                     Place* place) noexcept nogil:
    # With the arena lock: puts the books back to what the driver has. The claimed block becomes a
    # hole, then what is mapped in it becomes free again.
    cdef uint32_t i
    cdef uint64_t begin, end
    if plan.chunk != NIL:
        begin = space.table.chunks[plan.chunk].address
        end = begin + space.table.chunks[plan.chunk].size
        holes_unclaim(space.table, plan.chunk)
    for i in range(plan.count):
        undo_action(space, &plan.actions[plan.count - 1 - i], place)
    if plan.chunk != NIL:
        refill(space, begin, end, demand.lane, epoch)


cdef void undo_action(Space* space, Action* action, Place* place) noexcept nogil:
    cdef Page* page = &space.page[action.page]
    cdef uint64_t nbytes = <uint64_t>page.granules << GRANULE_BITS
    if action.done:
        return                      # it is where the plan wanted it: keep it there
    if action.kind == ACTION_CREATE:
        view_set(space, action.to, page.granules, NIL)
        space.physical -= nbytes
        if action.mapping_failed:
            page_release(place, page.memory)
        page.granules = 0
    elif action.kind == ACTION_MOVE and action.mapping_failed:
        # Its new place was refused; what is left of its old mappings goes too.
        view_set(space, action.to, page.granules, NIL)
        if page.dormant != NIL:
            page_unmap(place, address_of(space, page.dormant), nbytes)
            view_set(space, page.dormant, page.granules, NIL)
        page_release(place, page.memory)
        space.physical -= nbytes
        page.granules = 0
    elif action.kind == ACTION_MOVE:
        view_set(space, action.to, page.granules, NIL)
        page.active = action.origin
        put_back(space, action, page)
    elif action.kind == ACTION_RELEASE and not action.mapping_failed:
        space.physical += nbytes
        put_back(space, action, page)
    elif action.kind == ACTION_RELEASE:
        page.granules = 0
    elif not action.mapping_failed:
        page.dormant = action.unmap[0]
        page.dormant_lane = LANE_RELEASED
        page.dormant_epoch = 0
        view_set(space, page.dormant, page.granules, action.page)


cdef void put_back(Space* space, const Action* action, Page* page) noexcept nogil:
    # The driver was not asked yet: the page still has the views that it had.
    view_set(space, action.origin, page.granules, action.page)
    page.dormant = action.unmap[0]
    page.dormant_lane = LANE_RELEASED
    page.dormant_epoch = 0
    if page.dormant != NIL:
        view_set(space, page.dormant, page.granules, action.page)
    fill_granules(space, action.origin, page.granules, action.lane, action.epoch)


cdef void refill(Space* space, uint64_t begin, uint64_t end, uint32_t lane,
                 uint64_t epoch) noexcept nogil:
    cdef uint64_t address = begin
    cdef uint64_t stop
    while address < end:
        stop = address_of(space, granule_of(space, address) + 1)
        stop = stop if stop < end else end
        if is_backed(space, granule_of(space, address)):
            holes_fill(space.table, hole_at(space, address), address, stop, lane, epoch)
        address = stop
