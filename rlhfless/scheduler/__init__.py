"""The planner: pure policies from frozen facts to a whole plan."""
