"""What XLA did make of a program: its memory, kernels, traffic and operations, on devices near and absent."""
