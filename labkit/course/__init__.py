"""The parts that turn notebooks into a course: checks of exercises, and the runner of notebooks."""
