"""The driver table, contexts and what a driver refuses."""

from gpumem._native.driver.abi cimport *        # all of its names are CUDA's
from gpumem._native.driver.table cimport (
    Access, access_apply, access_has, access_init, access_next, AWAIT_EVENT, AWAIT_STREAM, check,
    context_allow, context_enter, context_is_dead, context_leave, context_relax, context_restore,
    context_synchronize, device_enter, device_leave, device_wait, device_wait_until, DeviceContext,
    DriverDevice, ends_with_capture, error_name, may_capture, note_call, point_wait,
    pointer_attribute, pointer_value, require, stream_captures, stream_refusal, synchronize_device,
    synchronize_event, synchronize_stream,
)
