"""Floor 0: the frozen values that planners, executors and accounts pass to each other."""
