"""The parts that turn notebooks into a course: the runner, handouts, and checks of exercises."""
