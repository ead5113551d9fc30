"""The runtime of DTR: gradients of functions that run operator by operator, within a number of bytes."""
