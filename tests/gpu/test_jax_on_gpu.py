"""JAX beside gpumem on a GPU; each in a process, since JAX starts once."""

import pytest
from helpers import child

pytest.importorskip("jax", reason="JAX is not installed")

SETUP = """
import warnings
warnings.simplefilter("ignore")
import os
import gpumem
import gpumem.integrations.jax as integration
"""


def script(body):
    done = child.run(SETUP + body)
    if "no CUDA backend" in done.stdout:
        pytest.skip("this JAX has no CUDA backend")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


GPU = """
import jax
try:
    gpu = jax.devices("gpu")[0]
except RuntimeError:
    print("no CUDA backend")
    raise SystemExit
import jax.numpy as jnp
"""


def test_budget_limits_jax():
    script(
        """
integration.enable(budget=2 << 30)
"""
        + GPU
        + """
used = gpu.memory_stats()
assert used["bytes_limit"] <= 2 << 30, used
jnp.zeros(1 << 20).block_until_ready()
try:
    jnp.zeros((3 << 30) // 4).block_until_ready()
except Exception as error:
    assert "RESOURCE_EXHAUSTED" in str(error)
else:
    raise AssertionError("above its budget")
try:
    integration.disable()
except gpumem.errors.IntegrationError:
    print("ok")
"""
    )


def test_jax_shares_the_drivers_pool():
    script(
        """
pool = gpumem.DriverPool.default("cuda:0")
integration.enable(pool)
before = pool.stats().reserved
"""
        + GPU
        + """
array = jnp.zeros(64 << 20, jnp.uint8).block_until_ready()
assert pool.stats().reserved >= before + (64 << 20), pool.stats()
print("ok")
"""
    )


def test_jax_arrays_are_exchanged_without_a_copy():
    script(
        """
integration.enable(budget=0.2)
"""
        + GPU
        + """
arena = gpumem.Arena("cuda:0")
tensor = gpumem.full((4, 256), 3, "float32", resource=arena)
array = jax.dlpack.from_dlpack(tensor)
assert array.unsafe_buffer_pointer() == tensor.ptr
assert float(array.sum()) == 3 * 1024
made = jnp.arange(1024, dtype=jnp.float32)
back = gpumem.from_dlpack(made)
assert back.ptr == made.unsafe_buffer_pointer()
assert back.to("host").numpy().sum() == 1023 * 512
print("ok")
"""
    )
