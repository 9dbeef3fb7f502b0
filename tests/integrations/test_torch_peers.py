"""Which devices may touch whose memory beneath PyTorch's pluggable allocator, which is not told."""

from helpers import child


def test_arenas_of_a_pluggable_allocator_are_introduced_to_each_other():
    child.run_quietly(
        """
        import gpumem
        from gpumem._testing import torch_hooks
        gpumem.device.set_host_device_count(3)
        arenas = [gpumem.Arena(f"host:{i}") for i in range(2)]
        closed_off = gpumem.Arena("host:2", {"peers": "none"})
        torch_hooks.introduce([*arenas, closed_off])
        peers = [[each.index for each in arena.peers] for arena in arenas]
        assert peers == [[1, 2], [0, 2]] and closed_off.peers == ()
        """
    )
