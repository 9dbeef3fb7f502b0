/* The table of the instruments' controls; see controls.h. */
#include "../device/internal.h"

static const HostdevControls controls = {
    .call_count = hostdev_call_count,
    .total_calls = hostdev_total_calls,
    .reset_counts = hostdev_reset_counts,
    .used = hostdev_used,
    .live = hostdev_live,
    .fail = hostdev_fail,
    .fail_here = hostdev_fail_here,
    .delay_record = hostdev_delay_record,
    .lose_device = hostdev_lose_device,
    .clear_faults = hostdev_clear_faults,
    .use_h200_costs = hostdev_use_h200_costs,
    .find_misuse = hostdev_find_misuse,
    .misuse_count = hostdev_misuse_count,
    .misuse_report = hostdev_misuse_report,
    .rehearse_windows = hostdev_rehearse_windows,
    .last_import = hostdev_last_import,
};

const void *hostdev_controls(void) { return &controls; }
