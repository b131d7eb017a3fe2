"""Commands: they compose traces, planner and executor, and print what came out."""
