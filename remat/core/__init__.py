"""Graphs, forms, devices, prices, primitives, errors, interrupting: plain data that every room reads."""
