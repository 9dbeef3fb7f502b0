/* The table of the instruments' controls; see controls.h. */
#include "../device/internal.h"

#define CONTROL(name) .name = hostdev_##name,
static const HostdevControls controls = {HOSTDEV_CONTROLS(CONTROL)};

const void *hostdev_controls(void) { return &controls; }
