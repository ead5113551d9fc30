"""Training steps that fit a device's memory, confirmed by the compiler."""
