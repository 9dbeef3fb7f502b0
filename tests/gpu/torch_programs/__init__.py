"""What PyTorch's users do, as programs that run over PyTorch's own allocator and over gpumem.

Each is a function without arguments, in a process of its own. It asserts what holds over either
allocator, and returns what must be the same over both, to the bit.
"""
