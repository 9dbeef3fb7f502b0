"""Where an arena's regions come from: device, managed, pinned or physical memory."""
