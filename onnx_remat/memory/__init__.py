"""Memory of a step, as pure functions of arrays: lifetimes, order, buffers, arena, offsets in a slab."""
