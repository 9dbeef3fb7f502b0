"""What the bench of sleeping computes, at a tiny size."""

from bench.sleep import tenants

MIB = 1 << 20


def test_two_tenants_out_of_phase_share_a_limit_that_halves_divide():
    found = tenants("host", 64 * MIB)
    assert found == {"one limit": 128 * MIB, "two halves": 64 * MIB}
