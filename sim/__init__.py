"""A discrete-event cluster that carries plans out on profiled execution times."""
