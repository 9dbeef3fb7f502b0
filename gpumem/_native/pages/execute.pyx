"""The driver calls of a plan, which is then finished, or undone if a call was refused.

`space_execute` runs without the arena lock. Only the plan's own pages are touched there, and no
other plan is under way, because the grow lock is held. `space_finish` and `space_undo` change the
chunk table with the arena lock, and make no driver call.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.bfc cimport holes_fill, holes_trim, holes_undo_allocate, NIL, SLOT_RELEASED
from gpumem._native.driver cimport (
    access_apply, context_enter, context_leave, CUDA_SUCCESS, CUresult, DeviceContext, note_call,
)
from gpumem._native.pages.sleep cimport Sleeper, sleeper_add_page
from gpumem._native.pages.space cimport (
    fill_granules, hole_at, kept_view, note_dormant, orphan_add, page_create, page_give_slot,
    page_note, retired_add, space_drop_retired, view_set, view_unmap,
)
from gpumem._native.pages.types cimport (
    Action, ACTION_CREATE, ACTION_DROP, ACTION_DROP_RETIRED, ACTION_MOVE, ACTION_RELEASE,
    address_of, bytes_of, Demand, granule_of, is_backed, Page, page_over, Plan, Space,
)
from gpumem._support.atomics cimport sum_add
from gpumem._support.events cimport is_recorded, REC_MOVE, REC_RELEASE, REC_RESERVE
from gpumem._support.lock cimport Lock, lock_acquire, lock_release


cdef CUresult space_execute(Space* space, Plan* plan) noexcept nogil:
    # Memory is made first, because it can run out: if that fails, nothing else has been done.
    # Unmaps come before maps, since a page may be mapped where another one was. Memory is released
    # last. After a refusal the driver's side is undone here, so that `space_undo` restores only the
    # tables.
    cdef DeviceContext* context = space.context
    cdef uint64_t begin, made, end
    cdef CUresult code = context_enter(context)
    if code != CUDA_SUCCESS:
        plan.refused = "cuCtxPushCurrent"
        return code
    begin = context.now()
    code = create_memory(space, plan)
    made = context.now()
    if code == CUDA_SUCCESS:
        code = unmap_views(space, plan)
    if code == CUDA_SUCCESS:
        code = map_views(space, plan)
    # The time of calls for both kinds is shared equally by the pages.
    end = context.now()
    if plan.moves:
        plan.move_ns = (end - made) * plan.moves // (plan.moves + plan.creates)
    if plan.creates:
        plan.create_ns = end - begin - plan.move_ns
    release_unmapped(space, plan)
    context_leave(context)
    return code


cdef CUresult create_memory(Space* space, Plan* plan) noexcept nogil:
    cdef CUresult code
    cdef uint32_t i
    cdef Page* page
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_CREATE:
            page = &space.page[plan.actions[i].page]
            code = note_call(space.calls, &plan.refused, "cuMemCreate",
                             page_create(space.context, bytes_of(page), &page.memory))
            if code != CUDA_SUCCESS:
                return code
            plan.actions[i].created = True
    return CUDA_SUCCESS


cdef CUresult unmap_views(Space* space, Plan* plan) noexcept nogil:
    cdef CUresult code
    cdef uint32_t i, view
    cdef Action* action
    cdef const Page* page
    for i in range(plan.count):
        action = &plan.actions[i]
        page = &space.page[action.page]
        for view in range(2):       # the dormant one, then the active one
            if action.unmap[view] == NIL:
                continue
            # A page without memory sleeps: the driver has no view of it.
            action.slept = page.memory == 0
            if not action.slept:
                code = note_call(space.calls, &plan.refused, "cuMemUnmap",
                                 view_unmap(space, action.unmap[view], page.granules))
                if code != CUDA_SUCCESS:
                    return code
            action.unmapped[view] = True
    return CUDA_SUCCESS


cdef CUresult map_views(Space* space, Plan* plan) noexcept nogil:
    # Access is set for neighbouring views at once, which saves a call for each, 7 % of the time on
    # an H200. If it is refused, the mapped views are unmapped.
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t first = 0
    cdef uint32_t last
    while first < plan.count and code == CUDA_SUCCESS:
        if not maps(&plan.actions[first]):
            first += 1
            continue
        last = first
        code = map_run(space, plan, &last)
        end_run(space, plan, first, last, code == CUDA_SUCCESS)
        first = last
    return code


cdef inline bint maps(const Action* action) noexcept nogil:
    return action.kind == ACTION_CREATE or action.kind == ACTION_MOVE


cdef CUresult map_run(Space* space, Plan* plan, uint32_t* last) noexcept nogil:
    # Maps the page of action `last` and those that follow it in addresses; `last` ends after them.
    cdef uint64_t begin = address_of(space, plan.actions[last[0]].to)
    cdef uint64_t end = begin
    cdef const Page* page
    cdef CUresult code
    while last[0] < plan.count:
        if maps(&plan.actions[last[0]]):
            if address_of(space, plan.actions[last[0]].to) != end:
                break
            page = &space.page[plan.actions[last[0]].page]
            code = note_call(space.calls, &plan.refused, "cuMemMap", space.context.table.cuMemMap(
                end, bytes_of(page), 0, page.memory, 0))
            if code != CUDA_SUCCESS:
                return code
            end += bytes_of(page)
        last[0] += 1
    return note_call(space.calls, &plan.refused, "cuMemSetAccess",
                     access_apply(space.context, space.access, begin, end - begin))


cdef void end_run(Space* space, Plan* plan, uint32_t first, uint32_t last,
                  bint mapped) noexcept nogil:
    # All of a run is done, or none: after a refusal its views are unmapped.
    cdef Action* action
    cdef uint32_t i
    for i in range(first, last):
        action = &plan.actions[i]
        if not maps(action):
            continue
        if not mapped:
            view_unmap(space, action.to, space.page[action.page].granules)
            sum_add(space.calls, 1)
            continue
        action.done = True
        if action.kind == ACTION_MOVE:
            sum_add(&space.moved, 1)


cdef void release_unmapped(Space* space, Plan* plan) noexcept nogil:
    # Releases memory without a view: of pages that are released, and after a refusal of new pages
    # that are not mapped, or that lost their active view; the dormant one was unmapped before it.
    cdef uint32_t i
    cdef const Action* action
    for i in range(plan.count):
        action = &plan.actions[i]
        if not action.done and (action.created or action.unmapped[1]):
            release_page(space, &space.page[action.page])


cdef void release_page(Space* space, Page* page) noexcept nogil:
    # Releases memory without a view; if that is refused, it is tried again later.
    if page.memory == 0:
        return                          # the page sleeps
    sum_add(space.calls, 1)
    if space.context.table.cuMemRelease(page.memory) != CUDA_SUCCESS:
        orphan_add(space, page.memory)
    page.memory = 0


cdef void plan_note(const Space* space, const Plan* plan) noexcept nogil:
    # A dropped view is no event: its page keeps its memory.
    cdef const Action* action
    cdef const Page* page
    cdef uint32_t i
    if not is_recorded(space.events):
        return
    for i in range(plan.count):
        action = &plan.actions[i]
        page = &space.page[action.page]
        if action.done and action.kind == ACTION_CREATE:
            page_note(space, page, REC_RESERVE, action.to, NIL)
        elif action.done:
            page_note(space, page, REC_MOVE, action.to, action.origin)
        elif action.unmapped[1] and not action.slept:   # the active view, and with it the memory
            page_note(space, page, REC_RELEASE, action.origin, NIL)


cdef bint space_finish(Space* space, Plan* plan, const Demand* demand,
                       uint64_t epoch) noexcept nogil:
    # The claimed block shrinks to the size demanded, and the slots of released pages become free.
    # True: the remainder of its place is free in the requesting stream's epoch.
    cdef uint32_t i
    for i in range(plan.count):
        if plan.actions[i].kind == ACTION_CREATE:
            sum_add(&space.created, 1)
        elif plan.actions[i].kind == ACTION_RELEASE:
            page_drop(space, &space.page[plan.actions[i].page])
    return plan.chunk != NIL and holes_trim(space.table, plan.chunk, demand.size, epoch)


cdef void space_undo(Space* space, Plan* plan) noexcept nogil:
    # Restores the tables to the driver's mappings. The claimed block becomes a hole, the actions
    # are undone, then memory that is mapped in the hole becomes free again, with the mark that it
    # had.
    cdef uint32_t i
    cdef uint64_t begin = 0
    cdef uint64_t end = 0
    if plan.chunk != NIL:
        begin = space.table.chunks[plan.chunk].address
        end = begin + space.table.chunks[plan.chunk].size
        holes_undo_allocate(space.table, plan.chunk)
    # The last action first: a later one may use a view that an earlier one has left.
    for i in range(plan.count):
        undo_action(space, &plan.actions[plan.count - 1 - i])
    # Now it is known which pages are mapped in the claimed range.
    if plan.chunk != NIL:
        refill(space, plan, begin, end)


cdef void undo_action(Space* space, const Action* action) noexcept nogil:
    cdef Page* page = &space.page[action.page]
    if action.done:                 # it is where the plan wanted it: keep it there
        if action.kind == ACTION_CREATE:
            sum_add(&space.created, 1)
        return
    if action.kind == ACTION_CREATE:
        view_set(space, action.to, page.granules, NIL)
        space.physical -= bytes_of(page)
        page_give_slot(space, page)
        return
    if action.kind == ACTION_DROP:
        if not action.unmapped[0]:
            show_dormant(space, action, page)
        return
    if action.kind == ACTION_DROP_RETIRED:
        if not action.unmapped[0]:      # it is quiet, or it would not have been in the plan
            retired_add(space, action.page, action.unmap[0], SLOT_RELEASED, 0)
        return
    # A moved page leaves its new place; a released page counts as physical memory again.
    if action.kind == ACTION_MOVE:
        view_set(space, action.to, page.granules, NIL)
    else:
        space.physical += bytes_of(page)
    put_back(space, action, page)


cdef void put_back(Space* space, const Action* action, Page* page) noexcept nogil:
    # Restores the views of a page that are still mapped.
    page.dormant = NIL
    # All views were unmapped before the driver refused a later step: the page was released.
    if action.unmapped[1]:
        space.physical -= bytes_of(page)
        page_drop(space, page)
        return
    page.active = action.origin
    view_set(space, action.origin, page.granules, action.page)
    if action.unmap[0] != NIL and not action.unmapped[0]:
        show_dormant(space, action, page)
    fill_granules(space, action.origin, page.granules, action.stream_slot, action.epoch)


cdef void page_drop(Space* space, Page* page) noexcept nogil:
    # Its memory was released: the slot is unused.
    page_give_slot(space, page)
    sum_add(&space.released, 1)


cdef void show_dormant(Space* space, const Action* action, Page* page) noexcept nogil:
    page.dormant = action.unmap[0]      # it was quiet, or it would not have been in the plan
    page.dormant_stream_slot = SLOT_RELEASED
    page.dormant_epoch = 0
    view_set(space, page.dormant, page.granules, action.page)
    note_dormant(space, page)


cdef void refill(Space* space, const Plan* plan, uint64_t begin, uint64_t end) noexcept nogil:
    # Goes by granules, because each may have memory or none. Memory that was free there has the
    # mark of its piece; a page that moved there has the mark of its old place, and a new page has
    # none.
    cdef const Page* page
    cdef uint64_t address = begin
    cdef uint64_t stop
    cdef uint32_t piece = 0
    while address < end:
        page = page_over(space, granule_of(space, address))
        stop = min(address_of(space, granule_of(space, address) + 1), end)
        while piece < plan.piece_count and plan.pieces[piece].end <= address:
            piece += 1
        if piece < plan.piece_count and plan.pieces[piece].begin <= address:
            stop = min(stop, plan.pieces[piece].end)
            refill_part(space, address, stop, plan.pieces[piece].stream_slot,
                        plan.pieces[piece].epoch)
        else:
            if piece < plan.piece_count:
                stop = min(stop, plan.pieces[piece].begin)
            if page != NULL:
                refill_part(space, address, stop, page.dormant_stream_slot, page.dormant_epoch)
        address = stop


cdef inline void refill_part(Space* space, uint64_t begin, uint64_t end, uint32_t stream_slot,
                             uint64_t epoch) noexcept nogil:
    if is_backed(space, granule_of(space, begin)):
        holes_fill(space.table, hole_at(space, begin), begin, end, stream_slot, epoch)


# ---- Pages that sleep ----------------------------------------------------------------------------


cdef CUresult space_drop_dormant(Space* space, Lock* lock) noexcept nogil:
    # After a refusal all pages still have their memory and place.
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t i
    cdef Page* page
    if space.keeps_views:
        return unmap_kept(space)
    code = space_drop_retired(space, lock)
    if code != CUDA_SUCCESS:
        return code
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules == 0 or page.memory == 0 or page.dormant == NIL:
            continue
        code = view_unmap(space, page.dormant, page.granules)
        sum_add(space.calls, 1)
        if code != CUDA_SUCCESS:
            return code
        lock_acquire(lock)
        view_set(space, page.dormant, page.granules, NIL)
        page.dormant = NIL
        lock_release(lock)
    return code


cdef CUresult unmap_kept(Space* space) noexcept nogil:
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t first, page
    while code == CUDA_SUCCESS and space.views_asleep < space.page_count + space.retired_count:
        page = kept_view(space, space.views_asleep, &first)
        if page != NIL:
            code = view_unmap(space, first, space.page[page].granules)
            sum_add(space.calls, 1)
        space.views_asleep += code == CUDA_SUCCESS
    return code


cdef CUresult space_map_kept(Space* space, const char** call) noexcept nogil:
    # In the opposite order, so that the unmapped views are always the first ones.
    cdef CUresult code = CUDA_SUCCESS
    cdef uint32_t first, page
    while code == CUDA_SUCCESS and space.views_asleep:
        page = kept_view(space, space.views_asleep - 1, &first)
        if page != NIL:
            code = map_kept(space, &space.page[page], address_of(space, first), call)
        space.views_asleep -= code == CUDA_SUCCESS
    return code


cdef CUresult map_kept(Space* space, const Page* page, uint64_t address,
                       const char** call) noexcept nogil:
    cdef CUresult code = note_call(space.calls, call, "cuMemMap", space.context.table.cuMemMap(
        address, bytes_of(page), 0, page.memory, 0))
    if code != CUDA_SUCCESS:
        return code
    code = note_call(space.calls, call, "cuMemSetAccess",
                     access_apply(space.context, space.access, address, bytes_of(page)))
    if code != CUDA_SUCCESS:
        space.context.table.cuMemUnmap(address, bytes_of(page))
        sum_add(space.calls, 1)
    return code


cdef bint space_list_pages(Space* space, Sleeper* sleeper) noexcept nogil:
    cdef uint32_t i
    cdef Page* page
    for i in range(space.page_count):
        page = &space.page[i]
        if page.granules and page.active != NIL and not sleeper_add_page(
                sleeper, address_of(space, page.active), bytes_of(page), &page.memory):
            return False
    return True
