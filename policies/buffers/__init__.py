"""From a joint graph to the scheduling problem of its buffers, and from a sequence back to a decision."""
